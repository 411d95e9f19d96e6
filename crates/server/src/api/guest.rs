//! `/v1/agents/{agent}/guest/…`: to the guest of a box, which is started if there is none.

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use http::uri::PathAndQuery;
use http::{StatusCode, Uri};

use super::errors::{ApiError, ApiResult, Code};
use super::extract::Path;
use super::state::AppState;
use crate::proxy::{Failed, GUEST_PORT, for_guest, forward, is_internal};
use crate::records::Workspace;

pub(super) async fn to_guest(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((agent, _)): Path<(String, String)>,
    mut request: Request,
) -> ApiResult<Response> {
    let agent = state.registry.get(&workspace, &agent)?;
    let uri = guest_uri(request.uri());
    if is_internal(uri.path()) {
        return Err(
            ApiError::new(Code::Unauthorized, "only the daemon itself may set up a guest")
                .status(StatusCode::FORBIDDEN),
        );
    }
    *request.uri_mut() = uri;
    for_guest(request.headers_mut());
    let answered = forward(&state.proxy, &agent, GUEST_PORT, request).await;
    answered.map_err(|failed| match failed {
        Failed::Trouble(trouble) => trouble.into(),
        Failed::Unreachable(error) => error.into(),
        Failed::Asleep => ApiError::new(Code::Unavailable, failed.to_string()),
        Failed::CutOff => {
            ApiError::new(Code::Unavailable, failed.to_string()).status(StatusCode::BAD_GATEWAY)
        }
        Failed::Broken(_) => ApiError::new(Code::Unavailable, failed.to_string())
            .status(StatusCode::BAD_GATEWAY)
            .hint("the box may just have ended; trying again starts it anew"),
    })
}

/// The same path and query, as they were sent, below the guest's root.
fn guest_uri(uri: &Uri) -> Uri {
    let whole = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    // "/v1/agents/{agent}/guest" lies before the fifth slash.
    let at = whole.match_indices('/').nth(4).map_or(whole.len(), |(at, _)| at);
    whole[at..].parse().expect("part of a URI is a URI")
}
