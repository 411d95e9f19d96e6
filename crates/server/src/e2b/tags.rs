//! Names, aliases and tags of templates. `NAME:TAG` is a template of its own, which shares its files with the one that it
//! was made from; the default tag is the name alone.

use axum::Extension;
use axum::extract::State;
use dorm_engine::Id;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::errors::{Error, Result};
use super::extract::{Body, Path};
use super::time::rfc3339;
use crate::api::{ApiError, AppState};
use crate::records::{TemplateRecord, Workspace};

pub(super) const DEFAULT: &str = "default";

/// Of `namespace/name:tag` the name and the tag; this server has no namespaces.
pub(super) fn split(reference: &str) -> (String, Option<String>) {
    let reference = reference.rsplit_once('/').map_or(reference, |(_, name)| name);
    let reference = reference.to_ascii_lowercase();
    match reference.split_once(':') {
        Some((name, tag)) => (
            name.to_owned(),
            Some(tag.to_owned()).filter(|tag| !tag.is_empty()),
        ),
        None => (reference, None),
    }
}

/// The template that a name and a tag stand for.
pub(super) fn template(name: &str, tag: &str) -> Result<String> {
    let named = match tag {
        DEFAULT => name.to_owned(),
        tag => format!("{name}:{tag}"),
    };
    let checked = crate::templates::check_name(&named);
    checked.map_err(ApiError::from)?;
    Ok(named)
}

/// What a reference stands for.
pub(super) fn of(reference: &str) -> Result<String> {
    let (name, tag) = split(reference);
    template(&name, tag.as_deref().unwrap_or(DEFAULT))
}

/// E2B's builds have UUIDs; this one follows from an id.
pub(super) fn uuid(id: &Id) -> String {
    let hash = blake3::hash(id.as_str().as_bytes()).to_hex();
    let (a, b, c, d, e) = (
        &hash[..8],
        &hash[8..12],
        &hash[13..16],
        &hash[17..20],
        &hash[20..32],
    );
    format!("{a}-{b}-4{c}-8{d}-{e}")
}

fn build_of(template: &TemplateRecord) -> String {
    template.built.build.clone().unwrap_or_else(|| uuid(&template.id))
}

/// Gives what `name:from` stands for another tag.
pub(super) async fn assign(
    state: &AppState,
    workspace: &Workspace,
    name: &str,
    from: &str,
    tag: &str,
) -> Result<TemplateRecord> {
    let (source, target) = (template(name, from)?, template(name, tag)?);
    if source == target {
        return Ok(state.store.template_by_name_or_id(workspace, &source).await?);
    }
    let copied = state.templates.copy(workspace, &source, &target, None).await;
    Ok(copied.map_err(ApiError::from)?)
}

pub(super) async fn alias(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(alias): Path<String>,
) -> Result<axum::Json<Value>> {
    let found = state
        .store
        .template_by_name_or_id(&workspace, &of(&alias)?)
        .await?;
    let (name, _) = split(&found.name);
    Ok(axum::Json(json!({ "templateID": name, "public": false })))
}

#[derive(Debug, Deserialize)]
pub(super) struct Assign {
    target: String,
    tags: Vec<String>,
}

pub(super) async fn assign_all(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Body(wanted): Body<Assign>,
) -> Result<(StatusCode, axum::Json<Value>)> {
    let (name, from) = split(&wanted.target);
    let from = from.unwrap_or_else(|| DEFAULT.to_owned());
    let tags: Vec<String> = wanted.tags.iter().map(|tag| tag.to_ascii_lowercase()).collect();
    let mut last = None;
    for tag in &tags {
        last = Some(assign(&state, &workspace, &name, &from, tag).await?);
    }
    let last = last.ok_or_else(|| Error::invalid("tags are missing"))?;
    let answer = json!({ "tags": tags, "buildID": build_of(&last) });
    Ok((StatusCode::CREATED, axum::Json(answer)))
}

#[derive(Debug, Deserialize)]
pub(super) struct Remove {
    name: String,
    tags: Vec<String>,
}

pub(super) async fn remove_all(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Body(unwanted): Body<Remove>,
) -> Result<StatusCode> {
    let (name, _) = split(&unwanted.name);
    for tag in &unwanted.tags {
        let target = template(&name, &tag.to_ascii_lowercase())?;
        let deleted = state.templates.delete(&workspace, &target).await;
        deleted.map_err(ApiError::from)?;
    }
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(reference): Path<String>,
) -> Result<axum::Json<Vec<Value>>> {
    let (name, _) = split(&reference);
    let tagged = |found: &TemplateRecord| {
        let (plain, tag) = split(&found.name);
        let tag = tag.unwrap_or_else(|| DEFAULT.to_owned());
        (plain == name)
            .then(|| json!({ "tag": tag, "buildID": build_of(found), "createdAt": rfc3339(found.created) }))
    };
    let all = state.store.list_templates(&workspace).await?;
    let tags: Vec<Value> = all.iter().filter_map(tagged).collect();
    match tags.is_empty() {
        true => Err(Error::new(
            StatusCode::NOT_FOUND,
            format!("template {reference:?} not found"),
        )),
        false => Ok(axum::Json(tags)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_has_a_name_and_perhaps_a_tag() {
        for (reference, expected) in [
            ("web", "web"),
            ("team/Web:V1", "web:v1"),
            ("web:default", "web"),
            ("web:", "web"),
        ] {
            assert_eq!(of(reference).unwrap(), expected);
        }
        assert!(of("").is_err() && of("a b").is_err() && of("debian:bookworm").is_err());
    }

    #[test]
    fn the_id_of_a_build_is_a_uuid() {
        let id = uuid(&Id::random());
        let lengths: Vec<usize> = id.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
    }
}
