//! From the request for a build to its end.

use axum::Extension;
use axum::extract::State;
use dorm_engine::Id;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::errors::{Error, Result};
use super::super::extract::{Body, Path, Query};
use super::super::tags;
use super::Line;
use super::instructions::{self, Start};
use crate::api::types::Progress;
use crate::api::{ApiError, AppState};
use crate::records::{BuildRecord, BuildStatus, TemplateLimits, Workspace};
use crate::templates::number_in;

/// Lines in one answer; the SDKs ask for the rest.
const PAGE: usize = 100;
const MIB: u64 = 1 << 20;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::e2b) struct NewBuild {
    name: Option<String>,
    alias: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
    #[serde(rename = "minFreeDiskMB")]
    min_free_disk_mb: Option<u64>,
}

impl NewBuild {
    fn limits(&self) -> Result<TemplateLimits> {
        let checked = |what: &str, given: Option<u64>, least: u64, most: u64| match given {
            Some(given) if !(least..=most).contains(&given) => Err(Error::invalid(format!(
                "{what} is {given}: from {least} to {most}"
            ))),
            _ => Ok(given),
        };
        checked("cpuCount", self.cpu_count.map(u64::from), 1, 1024)?;
        let memory = checked("memoryMB", self.memory_mb, 32, 1 << 30)?;
        let disk = checked("minFreeDiskMB", self.min_free_disk_mb, 0, 1 << 30)?;
        Ok(TemplateLimits {
            cpu_millis: self.cpu_count.map(|count| count * 1000),
            memory: memory.map(|mb| mb * MIB),
            disk: disk.map(|mb| mb * MIB),
        })
    }
}

pub(in crate::e2b) async fn request(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Body(new): Body<NewBuild>,
) -> Result<(StatusCode, axum::Json<Value>)> {
    let limits = new.limits()?;
    let given = new.name.or(new.alias).unwrap_or_default();
    let (name, tag) = tags::split(&given);
    let mut wanted: Vec<String> = Vec::new();
    for tag in tag.into_iter().chain(new.tags) {
        let tag = tag.to_ascii_lowercase();
        tags::template(&name, &tag)?;
        if !wanted.contains(&tag) {
            wanted.push(tag);
        }
    }
    if wanted.is_empty() {
        tags::template(&name, tags::DEFAULT)?;
        wanted.push(tags::DEFAULT.to_owned());
    }
    let id = tags::uuid(&Id::random());
    let build = BuildRecord {
        id: id.clone(),
        workspace,
        name: name.clone(),
        tags: wanted.clone(),
        limits,
        status: BuildStatus::Waiting,
        step: None,
    };
    state.builds.add(build).await?;
    let answer = json!({
        "templateID": name, "buildID": id, "public": false, "names": [name], "tags": wanted, "aliases": [name],
    });
    Ok((StatusCode::ACCEPTED, axum::Json(answer)))
}

pub(in crate::e2b) async fn start(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((_, id)): Path<(String, String)>,
    Body(start): Body<Start>,
) -> Result<StatusCode> {
    let build = state.builds.get(&workspace, &id)?;
    let force = start.force();
    let (recipe, script) = instructions::read(&state, &workspace, &build, start).await?;
    // Whoever asked may go away in the middle of it.
    let begun = tokio::spawn(async move {
        state.builds.begin(&workspace, &id).await?;
        let target = tags::template(&build.name, &build.tags[0])?;
        let begun = state
            .templates
            .build_script(&workspace, &target, recipe, script, force)
            .await;
        match begun {
            Ok(progress) => {
                tokio::spawn(follow(state.clone(), id, progress));
                Ok(StatusCode::ACCEPTED)
            }
            Err(error) => {
                let error = Error::from(ApiError::from(error));
                state.builds.end(&id, Err(error.message.clone())).await;
                Err(error)
            }
        }
    });
    begun.await.unwrap_or_else(|_| {
        Err(Error::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the build could not begin",
        ))
    })
}

/// Keeps what a build says until it is over.
async fn follow(state: AppState, id: String, mut progress: tokio::sync::mpsc::Receiver<Progress>) {
    let mut outcome = Err("the build was broken off".to_owned());
    state.builds.at_step(&id, "base");
    let mut in_script = false;
    while let Some(news) = progress.recv().await {
        match news {
            Progress::Step { step, steps, title } => {
                let number = number_in(&title);
                in_script |= number.is_some();
                let step_name = number.unwrap_or(if in_script { "finalize" } else { "base" });
                state.builds.at_step(&id, step_name);
                state.builds.log(&id, "info", format!("[{step}/{steps}] {title}"));
            }
            Progress::Log { line } => state.builds.log(&id, "info", line),
            Progress::Done { .. } => outcome = Ok(()),
            Progress::Error { error } => {
                let hint = error.hint.map(|hint| format!("\n{hint}")).unwrap_or_default();
                outcome = Err(format!("{}{hint}", error.message));
            }
        }
    }
    conclude(state, id, outcome).await;
}

/// Gives the template its other tags, and the build its end.
pub(super) async fn conclude(state: AppState, id: String, mut outcome: Result<(), String>) {
    if outcome.is_ok() {
        outcome = tag(&state, &id).await;
    }
    state.builds.end(&id, outcome).await;
}

async fn tag(state: &AppState, id: &str) -> Result<(), String> {
    let (workspace, name, tags) = {
        let known = state.builds.known();
        let record = &known.builds.get(id).ok_or("the build is forgotten")?.record;
        (record.workspace.clone(), record.name.clone(), record.tags.clone())
    };
    let first = tags::template(&name, &tags[0]).map_err(|error| error.message)?;
    let made = state.store.template_by_name_or_id(&workspace, &first).await;
    let made = made.map_err(|error| error.to_string())?;
    if made.built.build.as_deref() != Some(id) {
        // It was there already: from now on it is what this build made, too.
        let copied = state
            .templates
            .copy(&workspace, &first, &first, Some(id.to_owned()))
            .await;
        copied.map_err(|error| error.to_string())?;
    }
    for tag in &tags[1..] {
        let assigned = tags::assign(state, &workspace, &name, &tags[0], tag).await;
        assigned.map_err(|error| error.message)?;
    }
    Ok(())
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::e2b) struct Since {
    #[serde(default)]
    logs_offset: usize,
    limit: Option<usize>,
}

pub(in crate::e2b) async fn status(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((template, id)): Path<(String, String)>,
    Query(since): Query<Since>,
) -> Result<axum::Json<Value>> {
    let record = state.builds.get(&workspace, &id)?;
    let page = since.limit.unwrap_or(PAGE).clamp(1, PAGE);
    let known = state.builds.known();
    let lines = known
        .builds
        .get(&id)
        .map(|build| build.log.as_slice())
        .unwrap_or_default();
    let lines: Vec<Value> = lines
        .iter()
        .skip(since.logs_offset)
        .take(page)
        .map(Line::on_wire)
        .collect();
    let mut answer = json!({
        "templateID": template,
        "buildID": id,
        "logs": lines.iter().map(|line| line["message"].clone()).collect::<Vec<_>>(),
        "logEntries": lines,
        "status": match &record.status {
            BuildStatus::Waiting => "waiting",
            BuildStatus::Building => "building",
            BuildStatus::Ready => "ready",
            BuildStatus::Failed(_) => "error",
        },
    });
    if let BuildStatus::Failed(reason) = &record.status {
        answer["reason"] = json!({ "message": reason, "step": record.step, "logEntries": [] });
    }
    Ok(axum::Json(answer))
}
