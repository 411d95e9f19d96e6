//! Sends a request into a box, which is woken first if it sleeps, and hands back what it answers.
//!
//! Bodies stream both ways, with neither limit nor timeout. As long as a request, its answer or the connection that it
//! was upgraded to is open, the agent is in use.

use std::pin::pin;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use dorm_engine::EngineError;
use http::StatusCode;
use http::uri::PathAndQuery;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::headers;
use super::upstream::{Proxy, box_uri, links};
use crate::held::Held;
use crate::lifecycle::{Agent, OpenRequest, Trouble, in_full};
use crate::records::State;

/// Of each direction of an upgraded connection.
const COPY_BUFFER: usize = 32 * 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    #[error(transparent)]
    Trouble(#[from] Trouble),
    #[error("the box could not be reached")]
    Unreachable(#[source] EngineError),
    #[error("the agent went to sleep before it answered; ask again, which wakes it")]
    Asleep,
    #[error(
        "the agent went to sleep before it answered, and may have done what was asked; see what became of it before you ask again"
    )]
    CutOff,
    #[error("{0}")]
    Broken(String),
}

/// Headers that concern the daemon are the caller's to remove.
pub(crate) async fn forward(
    proxy: &Proxy,
    agent: &Arc<Agent>,
    port: u16,
    mut request: Request,
) -> Result<Response, Failed> {
    // Counted before the state is looked at: a box with an open request is not idle.
    let open = agent.open_request();
    agent.ensure_running().await?;
    let links = links(agent, port);
    let unanswered = links.asking();
    let which = (agent.generation(), links.epoch());
    let again = request.method().is_idempotent();
    let path = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
    *request.uri_mut() = box_uri(&agent.profile.id, which, port, path);
    *request.version_mut() = http::Version::HTTP_11;
    headers::remove_hop_by_hop(request.headers_mut());
    let client_side = request.extensions_mut().remove::<OnUpgrade>();
    let mut asking = pin!(proxy.request(request));
    let mut published = agent.subscribe();
    let answered = loop {
        let paused = async {
            let seen = published.wait_for(|now| now.status.state == State::Standby);
            seen.await.is_ok()
        };
        tokio::select! {
            answered = &mut asking => break answered,
            // Paused in the very moment in which the request came: it would not be answered.
            _ = paused => agent.ensure_running().await?,
        }
    };
    drop(unanswered);
    let mut response = answered.map_err(|error| match (links.epoch() == which.1, again) {
        (true, _) => error.into(),
        (false, true) => Failed::Asleep,
        (false, false) => Failed::CutOff,
    })?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let box_side = hyper::upgrade::on(&mut response);
        if let Some(client_side) = client_side {
            tokio::spawn(join(client_side, box_side, open));
        }
        headers::remove_hop_by_hop(response.headers_mut());
        return Ok(response.map(|_| Body::empty()));
    }
    let (mut parts, body) = response.into_parts();
    headers::remove_hop_by_hop(&mut parts.headers);
    Ok(Response::from_parts(
        parts,
        // The request is open until the end of its answer.
        Body::new(Held::new(body, open)),
    ))
}

/// Bytes in both directions, until both sides have said that they are done, or one is gone.
async fn join(client_side: OnUpgrade, box_side: OnUpgrade, _open: OpenRequest) {
    let Ok((client_side, box_side)) = tokio::try_join!(client_side, box_side) else {
        return;
    };
    let (mut client_side, mut box_side) = (TokioIo::new(client_side), TokioIo::new(box_side));
    let copied =
        tokio::io::copy_bidirectional_with_sizes(&mut client_side, &mut box_side, COPY_BUFFER, COPY_BUFFER);
    if let Err(error) = copied.await {
        tracing::debug!(%error, "an upgraded connection ended early");
    }
}

impl From<hyper_util::client::legacy::Error> for Failed {
    fn from(error: hyper_util::client::legacy::Error) -> Self {
        let text = in_full(&error);
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
        while let Some(error) = cause {
            if let Some(EngineError::PortClosed { id, port }) = error.downcast_ref::<EngineError>() {
                let (id, port) = (id.clone(), *port);
                return Self::Unreachable(EngineError::PortClosed { id, port });
            }
            cause = error.source();
        }
        Self::Broken(format!("the box did not answer: {text}"))
    }
}
