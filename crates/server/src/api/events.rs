//! `/v1/events` and `/v1/agents/{agent}/events`: a list, or a stream of server-sent events.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dorm_engine::Id;
use futures_util::stream;
use http::HeaderMap;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use serde::Deserialize;
use tokio::sync::watch;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::ApiResult;
use super::extract::{Json, Path, Query};
use super::state::AppState;
use super::types::{ErrorBody, Event};
use crate::lifecycle::Departed;
use crate::records::{EventRecord, Workspace};
use crate::store::StoreError;

/// A comment goes out this often, so that dead connections are noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const AT_ONCE: u32 = 256;

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(of_all))
        .routes(routes!(of_one))
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    /// At most so many; 100 if absent, 1000 at most.
    limit: Option<u32>,
    /// Go on with new ones, as server-sent events, oldest first. So does `Accept: text/event-stream`.
    #[serde(default)]
    follow: bool,
    /// In a stream: begin after this one. So does the header `Last-Event-ID`.
    after: Option<i64>,
}

impl EventsQuery {
    /// How many of those that are past are read. A stream of none of them begins after the newest.
    fn most(&self) -> u32 {
        self.limit.unwrap_or(100).clamp(1, 1000)
    }
}

/// What happened to all agents, newest first, or as a stream
#[utoipa::path(get, path = "/v1/events", tag = "events", params(EventsQuery),
    responses((status = 200, body = Vec<Event>)))]
async fn of_all(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let mark = state.registry.departures();
    let newest = state.store.newest_events(&workspace, query.most()).await?;
    answer(state, workspace, None, mark, newest, &query, &headers)
}

/// What happened to an agent, newest first, or as a stream
#[utoipa::path(get, path = "/v1/agents/{agent}/events", tag = "events",
    params(("agent", description = "Name or id"), EventsQuery),
    responses((status = 200, body = Vec<Event>), (status = 404, body = ErrorBody)))]
async fn of_one(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let agent = state.registry.get(&workspace, &agent)?;
    let mark = state.registry.departures();
    let newest = state.store.events(&agent.profile.id, query.most()).await?;
    let id = agent.profile.id.clone();
    answer(state, workspace, Some(id), mark, newest, &query, &headers)
}

fn answer(
    state: AppState,
    workspace: Workspace,
    agent: Option<Id>,
    mark: u64,
    newest: Vec<EventRecord>,
    query: &EventsQuery,
    headers: &HeaderMap,
) -> ApiResult<Response> {
    let text = |name: http::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let streams = text(ACCEPT).is_some_and(|accept| accept.contains("text/event-stream"));
    let asked = query.limit.map_or(usize::MAX, |limit| limit as usize);
    if !query.follow && !streams {
        let events: Vec<_> = newest
            .into_iter()
            .take(asked)
            .map(|event| on_wire(&state, event))
            .collect();
        return Ok(Json(events).into_response());
    }
    let last_seen = text(http::HeaderName::from_static("last-event-id")).and_then(|id| id.parse().ok());
    let goes_on = query.after.or(last_seen);
    let after = goes_on.unwrap_or_else(|| match (asked, newest.last()) {
        (_, None) => 0,
        (0, Some(newest)) => newest.seq,
        (_, Some(oldest)) => oldest.seq - 1,
    });
    let following = Following {
        // Whoever goes on may have missed the end of an agent.
        mark: goes_on.map_or(mark, |_| 0),
        recorded: state.registry.recorded(),
        state,
        workspace,
        agent,
        after,
    };
    let body = Body::from_stream(stream::unfold(following, Following::next));
    let kind = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
    Ok((kind, body).into_response())
}

fn on_wire(state: &AppState, event: EventRecord) -> Event {
    let name = match state.registry.by_id(&event.agent) {
        Some(agent) => agent.profile.name.clone(),
        None => event.agent.to_string(),
    };
    named(name, event)
}

fn named(name: String, event: EventRecord) -> Event {
    Event {
        seq: event.seq,
        agent: event.agent,
        name,
        time: event.time,
        from: event.from.map(|state| state.as_str().to_owned()),
        to: event.to.as_str().to_owned(),
        reason: event.reason,
        millis: event.millis,
    }
}

struct Following {
    state: AppState,
    workspace: Workspace,
    agent: Option<Id>,
    after: i64,
    /// Of agents that are gone, those that have gone since.
    mark: u64,
    recorded: watch::Receiver<u64>,
}

impl Following {
    /// The next piece of the stream; none once the daemon ends, or the one agent is gone.
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        loop {
            self.recorded.borrow_and_update();
            let registry = &self.state.registry;
            // Before its last events are looked for.
            let is_gone = self.agent.as_ref().is_some_and(|id| registry.by_id(id).is_none());
            let events = match self.find().await {
                Ok(events) => events,
                Err(error) => {
                    tracing::warn!(%error, "a stream of events ends");
                    return None;
                }
            };
            if let Some(last) = events.last() {
                self.after = last.seq;
                let text: String = events.iter().map(in_text).collect();
                return Some((Ok(text.into()), self));
            }
            if is_gone {
                return None;
            }
            tokio::select! {
                () = self.state.shutdown.cancelled() => return None,
                changed = self.recorded.changed() => changed.ok()?,
                () = tokio::time::sleep(KEEP_ALIVE) => {
                    return Some((Ok(Bytes::from_static(b": still here\n\n")), self));
                }
            }
        }
    }

    /// What comes next, in order.
    async fn find(&self) -> Result<Vec<Event>, StoreError> {
        let Self { state, workspace, .. } = self;
        let agent = self.agent.as_ref();
        let departed = || state.registry.departed(workspace, agent, self.mark, self.after);
        let gone_by_now = departed().iter().map(|departed| departed.event.seq).max();
        let found = state.store.events_after(workspace, agent, self.after, AT_ONCE);
        let found = found.await?;
        // What is newer than all that, the next look finds, with what came before it.
        let newest = found.last().map(|event| event.seq);
        let end = match found.len() == AT_ONCE as usize {
            true => newest,
            false => newest.max(gone_by_now),
        };
        let mut events: BTreeMap<i64, Event> = BTreeMap::new();
        events.extend(found.into_iter().map(|event| (event.seq, on_wire(state, event))));
        // Once more: whoever has gone meanwhile is among them.
        for Departed { name, event, .. } in departed() {
            if Some(event.seq) <= end {
                events.insert(event.seq, named(name, event));
            }
        }
        Ok(events.into_values().collect())
    }
}

fn in_text(event: &Event) -> String {
    let json = serde_json::to_string(event).expect("an event is plain data");
    format!("id: {}\nevent: transition\ndata: {json}\n\n", event.seq)
}
