//! `/v1/templates`.

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use tokio::sync::mpsc;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::{ApiError, ApiResult, Code};
use super::extract::{Json, Path, Query};
use super::state::AppState;
use super::types::{BuildTemplate, ErrorBody, Progress, Template};
use crate::records::Workspace;
use crate::templates::{ImportOptions, TemplateError};

/// A recipe holds the content of its files.
const MAX_RECIPE: usize = 64 << 20;

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(get, delete))
        .routes(routes!(build))
        .layer(DefaultBodyLimit::max(MAX_RECIPE))
        .routes(routes!(import))
        .routes(routes!(log))
}

/// List templates
#[utoipa::path(get, path = "/v1/templates", tag = "templates", responses((status = 200, body = Vec<Template>)))]
async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
) -> ApiResult<Json<Vec<Template>>> {
    Ok(Json(state.templates.list(&workspace).await?))
}

/// Show a template, by name or id
#[utoipa::path(get, path = "/v1/templates/{template}", tag = "templates",
    params(("template" = String, Path, description = "Name or id")),
    responses((status = 200, body = Template), (status = 404, body = ErrorBody)))]
async fn get(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(template): Path<String>,
) -> ApiResult<Json<Template>> {
    Ok(Json(state.templates.get(&workspace, &template).await?))
}

/// Delete a template; agents made from it keep their homes
#[utoipa::path(delete, path = "/v1/templates/{template}", tag = "templates",
    params(("template" = String, Path, description = "Name or id")),
    responses((status = 204), (status = 404, body = ErrorBody),
        (status = 409, description = "It is being made, or built from", body = ErrorBody)))]
async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(template): Path<String>,
) -> ApiResult<StatusCode> {
    state.templates.delete(&workspace, &template).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Build a template from a recipe
///
/// The answer is newline-delimited JSON, one `Progress` a line, of which the last is `done` or `error`.
/// Closing the connection ends the build.
#[utoipa::path(post, path = "/v1/templates/{name}/build", tag = "templates", request_body = BuildTemplate,
    params(("name" = String, Path, description = "A template of this name is replaced")),
    responses((status = 200, body = Progress, content_type = "application/x-ndjson"),
        (status = 400, body = ErrorBody), (status = 404, description = "No such parent", body = ErrorBody),
        (status = 409, description = "It is being made already", body = ErrorBody)))]
async fn build(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(name): Path<String>,
    Json(request): Json<BuildTemplate>,
) -> ApiResult<Response> {
    Ok(streamed(state.templates.build(&workspace, &name, request).await?))
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// Run the image's entrypoint and command in every box of the template.
    start: bool,
}

/// Import a template: a root filesystem, an OCI image layout, or what `docker save` writes
///
/// The body is a tar archive, which may be compressed with gzip or zstd. The answer begins when it has
/// arrived, and is newline-delimited JSON as of a build.
#[utoipa::path(post, path = "/v1/templates/{name}/import", tag = "templates",
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    params(("name" = String, Path, description = "A template of this name is replaced"), ImportQuery),
    responses((status = 200, body = Progress, content_type = "application/x-ndjson"),
        (status = 400, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 507, description = "No room for it", body = ErrorBody)))]
async fn import(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(name): Path<String>,
    Query(query): Query<ImportQuery>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let length = headers
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    let options = ImportOptions {
        start: query.start,
        length,
    };
    Ok(streamed(
        state
            .templates
            .import(&workspace, &name, options, body.into_data_stream())
            .await?,
    ))
}

/// Show what the last build or import printed
#[utoipa::path(get, path = "/v1/templates/{template}/log", tag = "templates",
    params(("template" = String, Path, description = "Name or id; also of a template that could not be made")),
    responses((status = 200, body = String, content_type = "text/plain"), (status = 404, body = ErrorBody)))]
async fn log(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(template): Path<String>,
) -> ApiResult<String> {
    Ok(state.templates.log(&workspace, &template).await?)
}

fn streamed(progress: mpsc::Receiver<Progress>) -> Response {
    let lines = stream::unfold(progress, async |mut progress| {
        let one = progress.recv().await?;
        let line = serde_json::to_vec(&one).map(|mut line| {
            line.push(b'\n');
            Bytes::from(line)
        });
        Some((line, progress))
    });
    ([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        let body = error.body();
        let code = match body.code.as_str() {
            "not_found" => Code::NotFound,
            "already_exists" => Code::AlreadyExists,
            "invalid_argument" => Code::InvalidArgument,
            "conflict" => Code::Conflict,
            "no_space" => Code::NoSpace,
            "unavailable" => Code::Unavailable,
            _ => Code::Internal,
        };
        let answer = Self::new(code, body.message);
        match body.hint {
            Some(hint) => answer.hint(hint),
            None => answer,
        }
    }
}

#[cfg(test)]
mod tests;
