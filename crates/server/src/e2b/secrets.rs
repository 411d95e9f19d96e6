//! Secrets of a workspace: their values go in, and never out.

use std::collections::BTreeMap;

use axum::Extension;
use axum::extract::State;
use dorm_engine::Id;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::errors::{Error, Result};
use super::extract::{Body, Path, Query};
use super::list::page;
use super::time::rfc3339;
use crate::api::AppState;
use crate::records::{SecretRecord, Workspace, now};

const MAX_VALUE: usize = 64 * 1024;
const MAX_NAME: usize = 128;

#[derive(Deserialize)]
pub(super) struct NewSecret {
    name: String,
    value: String,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
}

#[derive(Deserialize)]
pub(super) struct Update {
    value: String,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ListQuery {
    limit: Option<usize>,
    next_token: Option<String>,
}

fn on_wire(secret: &SecretRecord) -> Value {
    json!({
        "secretID": secret.id,
        "name": secret.name,
        "currentVersion": secret.version,
        "metadata": secret.metadata,
        "createdAt": rfc3339(secret.created),
        "updatedAt": rfc3339(secret.updated),
    })
}

fn check_value(value: &str) -> Result<()> {
    match value.len() {
        1..=MAX_VALUE => Ok(()),
        _ => Err(Error::invalid(format!("a secret is 1 to {MAX_VALUE} bytes"))),
    }
}

pub(super) async fn create(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Body(new): Body<NewSecret>,
) -> Result<(StatusCode, axum::Json<Value>)> {
    check_value(&new.value)?;
    let fits = |c: char| !c.is_control() && !"{}".contains(c);
    if !(1..=MAX_NAME).contains(&new.name.len()) || !new.name.chars().all(fits) {
        return Err(Error::invalid(format!(
            "a secret's name is 1 to {MAX_NAME} bytes, without braces"
        )));
    }
    let time = now();
    let secret = SecretRecord {
        id: Id::random(),
        workspace,
        name: new.name,
        value: new.value,
        version: 1,
        metadata: new.metadata,
        created: time,
        updated: time,
    };
    state.store.insert_secret(&secret).await?;
    Ok((StatusCode::CREATED, axum::Json(on_wire(&secret))))
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Query(query): Query<ListQuery>,
) -> Result<(HeaderMap, axum::Json<Vec<Value>>)> {
    let all = state.store.secrets(&workspace).await?;
    let place = |secret: &SecretRecord| (secret.created, secret.id.to_string());
    let (page, headers) = page(all, query.limit, query.next_token.as_deref(), place, true)?;
    Ok((headers, axum::Json(page.iter().map(on_wire).collect())))
}

/// By id or name.
async fn find(state: &AppState, workspace: &Workspace, wanted: &str) -> Result<SecretRecord> {
    let all = state.store.secrets(workspace).await?;
    let found = all
        .into_iter()
        .find(|one| one.id.as_str() == wanted || one.name == wanted);
    found.ok_or_else(|| Error::new(StatusCode::NOT_FOUND, format!("secret {wanted:?} not found")))
}

pub(super) async fn show(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(secret): Path<String>,
) -> Result<axum::Json<Value>> {
    Ok(axum::Json(on_wire(&find(&state, &workspace, &secret).await?)))
}

pub(super) async fn update(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(secret): Path<String>,
    Body(update): Body<Update>,
) -> Result<axum::Json<Value>> {
    check_value(&update.value)?;
    let mut secret = find(&state, &workspace, &secret).await?;
    secret.value = update.value;
    secret.version += 1;
    secret.updated = now();
    if let Some(metadata) = update.metadata {
        secret.metadata = metadata;
    }
    state.store.update_secret(&secret).await?;
    Ok(axum::Json(on_wire(&secret)))
}

pub(super) async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(secret): Path<String>,
) -> Result<StatusCode> {
    let secret = find(&state, &workspace, &secret).await?;
    state.store.delete_secret(&workspace, &secret.id).await?;
    Ok(StatusCode::NO_CONTENT)
}
