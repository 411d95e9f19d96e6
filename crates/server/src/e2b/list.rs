//! Lists of sandboxes: filters, order, pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderMap, HeaderValue};
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use super::errors::{Error, Result};
use super::extract::Query;
use super::sandboxes::Sandbox;
use super::time;
use super::types::Listed;
use super::view::Found;
use crate::api::AppState;
use crate::records::{SandboxRecord, State as AgentState, Workspace};

const PAGE: usize = 100;
const NEXT_TOKEN: &str = "x-next-token";

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ListQuery {
    metadata: Option<String>,
    state: Option<String>,
    order: Option<String>,
    started_after: Option<String>,
    template: Option<String>,
    limit: Option<usize>,
    next_token: Option<String>,
}

/// All of the first version's list run.
pub(super) async fn list_running(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Vec<Listed>>> {
    let query = ListQuery {
        state: Some("running".to_owned()),
        limit: None,
        ..query
    };
    let found = Filter::of(&query)?.apply(&state, &workspace);
    Ok(axum::Json(found.iter().map(Found::listed).collect()))
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Query(query): Query<ListQuery>,
) -> Result<(HeaderMap, axum::Json<Vec<Listed>>)> {
    let found = Filter::of(&query)?.apply(&state, &workspace);
    let place = |found: &Found| place(&found.record(), found.agent.profile.id.as_str());
    let (page, headers) = page(
        found,
        query.limit,
        query.next_token.as_deref(),
        place,
        is_newest_first(&query)?,
    )?;
    Ok((headers, axum::Json(page.iter().map(Found::listed).collect())))
}

type Place = (i64, String);

fn place(record: &SandboxRecord, id: &str) -> Place {
    (record.started, id.to_owned())
}

fn is_newest_first(query: &ListQuery) -> Result<bool> {
    match query.order.as_deref() {
        None | Some("desc") => Ok(true),
        Some("asc") => Ok(false),
        Some(other) => Err(Error::invalid(format!("order is {other:?}, not asc or desc"))),
    }
}

/// Sorts by place, and gives the page after the token, with the header that leads to the next one.
pub(super) fn page<T>(
    mut all: Vec<T>,
    limit: Option<usize>,
    token: Option<&str>,
    place: impl Fn(&T) -> Place,
    newest_first: bool,
) -> Result<(Vec<T>, HeaderMap)> {
    let limit = limit.unwrap_or(PAGE);
    if !(1..=1000).contains(&limit) {
        return Err(Error::invalid("limit is out of range: from 1 to 1000"));
    }
    all.sort_by_cached_key(&place);
    if newest_first {
        all.reverse();
    }
    if let Some(token) = token.filter(|token| !token.is_empty()) {
        let last = read_token(token)?;
        all.retain(|one| {
            if newest_first {
                place(one) < last
            } else {
                place(one) > last
            }
        });
    }
    let mut headers = HeaderMap::new();
    if all.len() > limit {
        all.truncate(limit);
        if let Some(last) = all.last() {
            let (time, id) = place(last);
            let token = URL_SAFE_NO_PAD.encode(format!("{time}.{id}"));
            let token = HeaderValue::try_from(token).expect("base64 is a header's value");
            headers.insert(NEXT_TOKEN, token);
        }
    }
    Ok((all, headers))
}

fn read_token(token: &str) -> Result<Place> {
    let read = || {
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
        let (time, id) = text.split_once('.')?;
        Some((time.parse().ok()?, id.to_owned()))
    };
    read().ok_or_else(|| Error::invalid("nextToken is none that this server gave"))
}

struct Filter {
    metadata: BTreeMap<String, String>,
    running: bool,
    paused: bool,
    after: Option<i64>,
    template: Option<String>,
}

impl Filter {
    fn of(query: &ListQuery) -> Result<Self> {
        let mut filter = Self {
            metadata: query.metadata.as_deref().map(metadata).unwrap_or_default(),
            running: query.state.is_none(),
            paused: query.state.is_none(),
            after: query.started_after.as_deref().map(time::parse).transpose()?,
            template: query.template.clone(),
        };
        for state in query.state.iter().flat_map(|states| states.split(',')) {
            match state {
                "running" => filter.running = true,
                "paused" => filter.paused = true,
                other => {
                    let message = format!("state is {other:?}, not running or paused");
                    return Err(Error::invalid(message));
                }
            }
        }
        Ok(filter)
    }

    /// Only what was made through this API: a client that cleans up must not find agents that are meant to stay.
    fn apply(&self, state: &AppState, workspace: &Workspace) -> Vec<Found> {
        let found = |sandbox: Arc<Sandbox>| {
            let agent = state.registry.by_id(&sandbox.id)?;
            let of_workspace = agent.profile.workspace == *workspace && agent.state() != AgentState::Deleting;
            (of_workspace && self.fits(&sandbox.record())).then_some(Found {
                agent,
                sandbox: Some(sandbox),
            })
        };
        state.sandboxes.all().into_iter().filter_map(found).collect()
    }

    fn fits(&self, record: &SandboxRecord) -> bool {
        let state = match record.paused {
            Some(_) => self.paused,
            None => self.running,
        };
        let has = |(key, value): (&String, &String)| record.metadata.get(key) == Some(value);
        let template = |wanted: &String| {
            *wanted == record.template || record.alias.as_ref().is_some_and(|alias| alias == wanted)
        };
        state
            && self.metadata.iter().all(has)
            && self.after.is_none_or(|after| record.started > after)
            && self.template.as_ref().is_none_or(template)
    }
}

/// `key=value&…`, each encoded twice; the query's own encoding is off already.
fn metadata(text: &str) -> BTreeMap<String, String> {
    let decode = |part: &str| {
        let form = part.replace('+', " ");
        let once = percent_decode_str(&form).decode_utf8_lossy().into_owned();
        percent_decode_str(&once).decode_utf8_lossy().into_owned()
    };
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(key), decode(value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_as_often_as_it_was_encoded() {
        // urlencode({quote("a b"): quote("c&d=ü")})
        let read = metadata("a%2520b=c%2526d%253D%25C3%25BC&plain=x");
        let expected = [("a b", "c&d=ü"), ("plain", "x")];
        assert_eq!(
            read,
            expected
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into_iter()
                .collect()
        );
    }

    #[test]
    fn pages_follow_each_other_without_gap_or_repetition() {
        let all: Vec<(i64, &str)> = vec![(1, "b"), (3, "a"), (1, "a"), (2, "x"), (3, "b")];
        for newest_first in [true, false] {
            let mut token = None;
            let mut seen = Vec::new();
            loop {
                let place = |one: &(i64, &str)| (one.0, one.1.to_owned());
                let (page, headers) =
                    page(all.clone(), Some(2), token.as_deref(), place, newest_first).unwrap();
                assert!(page.len() <= 2);
                seen.extend(page);
                match headers.get(NEXT_TOKEN) {
                    Some(next) => token = Some(next.to_str().unwrap().to_owned()),
                    None => break,
                }
            }
            let mut expected = all.clone();
            expected.sort_unstable();
            if newest_first {
                expected.reverse();
            }
            assert_eq!(seen, expected);
        }
        assert!(page(all, None, Some("nonsense"), |one| (one.0, String::new()), true).is_err());
    }
}
