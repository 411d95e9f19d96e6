//! What sandboxes used.

use std::collections::BTreeMap;

use axum::Extension;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use super::errors::Result;
use super::extract::{Path, Query};
use super::history::{self, Sample};
use super::time::rfc3339;
use super::types::Metric;
use super::view::{Found, find};
use crate::api::AppState;
use crate::records::{State as AgentState, Workspace, now};

/// A sample that is younger is as good as a new one.
const FRESH: i64 = 1000;
/// Seconds since 1970 are below, milliseconds above: old SDKs send these.
const SECONDS: i64 = 100_000_000_000;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Span {
    start: Option<i64>,
    end: Option<i64>,
}

pub(super) async fn of_one(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    Query(span): Query<Span>,
) -> Result<axum::Json<Vec<Metric>>> {
    let found = find(&state, &workspace, &id)?;
    let millis = |time: i64| if time.abs() < SECONDS { time * 1000 } else { time };
    let start = span.start.map_or(i64::MIN, millis);
    // To the end of that second.
    let end = span.end.map_or(i64::MAX, |end| millis(end) + 999);
    let samples = samples(&state, &found, start, end).await;
    Ok(axum::Json(
        samples.iter().map(|sample| on_wire(&found, sample)).collect(),
    ))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Several {
    /// Separated by commas.
    sandbox_ids: String,
}

/// The newest of each; those that are not there are left out.
pub(super) async fn of_several(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Query(query): Query<Several>,
) -> Result<axum::Json<Value>> {
    let mut newest = BTreeMap::new();
    for id in query.sandbox_ids.split(',') {
        if let Ok(found) = find(&state, &workspace, id)
            && let Some(sample) = samples(&state, &found, i64::MIN, i64::MAX).await.last()
        {
            newest.insert(id.to_owned(), on_wire(&found, sample));
        }
    }
    Ok(axum::Json(json!({ "sandboxes": newest })))
}

async fn samples(state: &AppState, found: &Found, start: i64, end: i64) -> Vec<Sample> {
    let Some(sandbox) = &found.sandbox else {
        return now_only(state, found).await.into_iter().collect();
    };
    let newest = sandbox.history().newest();
    let stale = newest.is_none_or(|newest| now() - newest > FRESH);
    if stale && found.agent.state() == AgentState::Running {
        history::sample(&*state.engine, &*state.homes, &found.agent, sandbox).await;
    }
    sandbox.history().between(start, end)
}

/// Of dorm's own agents no history is kept.
async fn now_only(state: &AppState, found: &Found) -> Option<Sample> {
    let id = &found.agent.profile.id;
    let stats = state.engine.stats(id).await.ok()?;
    let disk = state.homes.usage(id).await.map_or(0, |usage| usage.used);
    Some(Sample {
        time: now(),
        cpu_percent: 0.0,
        memory: stats.memory_bytes,
        disk,
    })
}

fn on_wire(found: &Found, sample: &Sample) -> Metric {
    let limits = &found.agent.profile.spec.limits;
    Metric {
        timestamp: rfc3339(sample.time),
        timestamp_unix: sample.time / 1000,
        cpu_count: limits.cpu_millis.div_ceil(1000).max(1),
        cpu_used_pct: sample.cpu_percent,
        mem_used: sample.memory,
        mem_total: limits.memory,
        mem_cache: 0,
        disk_used: sample.disk,
        disk_total: limits.disk,
    }
}
