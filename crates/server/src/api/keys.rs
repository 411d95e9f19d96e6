//! `/v1/keys`.

use axum::Extension;
use axum::extract::State;
use dorm_engine::Id;
use http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::{ApiError, ApiResult, Code};
use super::extract::{Json, Path};
use super::state::AppState;
use super::types::{CreatedKey, ErrorBody, Key, NewKey};
use crate::records::{KeyRecord, Workspace};

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(delete))
}

/// Create a key, whose secret is shown this once
#[utoipa::path(post, path = "/v1/keys", tag = "keys", request_body = NewKey,
    responses((status = 201, body = CreatedKey), (status = 400, body = ErrorBody)))]
async fn create(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Json(new): Json<NewKey>,
) -> ApiResult<(StatusCode, Json<CreatedKey>)> {
    let name = new.name.trim();
    if name.is_empty() || name.chars().count() > 100 || name.chars().any(char::is_control) {
        return Err(ApiError::invalid("this cannot be the name of a key")
            .hint("a name is 1 to 100 characters, in one line"));
    }
    let (key, secret) = state.keys.create(&workspace, name).await?;
    Ok((
        StatusCode::CREATED,
        Json(CreatedKey {
            key: on_wire(key),
            secret,
        }),
    ))
}

/// List keys, without their secrets
#[utoipa::path(get, path = "/v1/keys", tag = "keys", responses((status = 200, body = Vec<Key>)))]
async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
) -> ApiResult<Json<Vec<Key>>> {
    let keys = state.keys.list(&workspace).await?;
    Ok(Json(keys.into_iter().map(on_wire).collect()))
}

/// Delete a key, which opens nothing from then on
#[utoipa::path(delete, path = "/v1/keys/{id}", tag = "keys",
    responses((status = 204), (status = 404, body = ErrorBody)))]
async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    let missing = |_| {
        ApiError::new(Code::NotFound, format!("there is no key {id:?}")).hint("`dorm key ls` shows the keys")
    };
    let id: Id = id.parse().map_err(missing)?;
    state.keys.delete(&workspace, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn on_wire(key: KeyRecord) -> Key {
    Key {
        id: key.id,
        name: key.name,
        created: key.created,
        last_used: key.last_used,
        prefix: key.prefix,
    }
}
