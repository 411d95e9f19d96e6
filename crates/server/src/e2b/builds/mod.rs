//! Template builds, as the SDKs' builder asks for them: a place for the build, archives of files, the instructions, and
//! then questions until it is over.
//!
//! ```text
//!   POST /v3/templates ─▶ waiting ─▶ PUT archives ─▶ POST …/builds/{id} ─▶ building ─▶ ready | error
//! ```
//!
//! The id of a template is its name here, since dorm gives every build of it an id of its own. What became of a build is
//! recorded; its log goes with the daemon. A build that was under way when the daemon ended has failed, and says so,
//! unless the template was finished.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::errors::{Error, Result};
use super::time::rfc3339;
use crate::api::AppState;
use crate::records::{BuildRecord, BuildStatus, Workspace, now};
use crate::store::{Store, StoreError};

mod instructions;
mod routes;
mod uploads;

pub(super) use routes::{request, start, status};
pub(super) use uploads::{upload, upload_link};

/// Builds that are remembered, and how much of what each has said.
const MAX_BUILDS: usize = 200;
const MAX_LOG_BYTES: usize = 512 << 10;
/// Of why a build failed.
const MAX_REASON: usize = 16 << 10;
/// Links to upload to that were not used yet.
const MAX_LINKS: usize = 1000;

pub struct Builds {
    store: Arc<dyn Store>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    builds: HashMap<String, Build>,
    /// Oldest first.
    order: VecDeque<String>,
    /// Oldest first.
    links: VecDeque<uploads::Link>,
}

struct Build {
    record: BuildRecord,
    log: Vec<Line>,
    log_bytes: usize,
}

struct Line {
    time: i64,
    level: &'static str,
    text: String,
}

impl Line {
    fn on_wire(&self) -> Value {
        json!({ "timestamp": rfc3339(self.time), "message": self.text, "level": self.level })
    }
}

impl Builds {
    pub async fn open(store: Arc<dyn Store>) -> Result<Self, StoreError> {
        let builds = Self {
            store,
            known: Mutex::default(),
        };
        for mut record in builds.store.builds().await? {
            if record.status == BuildStatus::Building && !builds.is_made(&record).await? {
                let reason = "the daemon ended while the template was being built; build it again";
                record.status = BuildStatus::Failed(reason.to_owned());
                builds.store.save_build(&record).await?;
            }
            builds.remember(record);
        }
        Ok(builds)
    }

    /// Whether the template came to be, and only the record of it is missing.
    async fn is_made(&self, record: &BuildRecord) -> Result<bool, StoreError> {
        let Ok(name) = super::tags::template(&record.name, &record.tags[0]) else {
            return Ok(false);
        };
        match self.store.template_by_name_or_id(&record.workspace, &name).await {
            Ok(template) => Ok(template.built.build.as_ref() == Some(&record.id)),
            Err(StoreError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Those whose template is there, but perhaps not with all its tags.
    pub(super) fn unfinished(&self) -> Vec<String> {
        let known = self.known();
        let building = |build: &&Build| build.record.status == BuildStatus::Building;
        known
            .builds
            .values()
            .filter(building)
            .map(|build| build.record.id.clone())
            .collect()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, record: BuildRecord) {
        let mut log = Vec::new();
        if let BuildStatus::Failed(reason) = &record.status {
            log.push(Line {
                time: now(),
                level: "error",
                text: reason.clone(),
            });
        }
        let build = Build {
            record,
            log,
            log_bytes: 0,
        };
        let (mut known, id) = (self.known(), build.record.id.clone());
        known.order.push_back(id.clone());
        known.builds.insert(id, build);
    }

    async fn add(&self, record: BuildRecord) -> Result<()> {
        self.store.save_build(&record).await?;
        self.remember(record);
        let oldest = {
            let mut known = self.known();
            let over = known.order.len() > MAX_BUILDS;
            let is_done = |id: &String| known.builds[id].record.status != BuildStatus::Building;
            let oldest = known.order.iter().position(is_done).filter(|_| over);
            let oldest = oldest.and_then(|at| known.order.remove(at));
            oldest.inspect(|id| drop(known.builds.remove(id)))
        };
        match oldest {
            Some(id) => Ok(self.store.delete_build(&id).await?),
            None => Ok(()),
        }
    }

    fn get(&self, workspace: &Workspace, id: &str) -> Result<BuildRecord> {
        let known = self.known();
        let found = known.builds.get(id).map(|build| &build.record);
        let found = found.filter(|record| record.workspace == *workspace);
        found
            .cloned()
            .ok_or_else(|| Error::new(http::StatusCode::NOT_FOUND, format!("build {id:?} not found")))
    }

    /// Takes the build on, for one caller alone.
    async fn begin(&self, workspace: &Workspace, id: &str) -> Result<()> {
        let record = {
            let mut known = self.known();
            let build = known
                .builds
                .get_mut(id)
                .filter(|build| build.record.workspace == *workspace);
            match build {
                Some(build) if build.record.status == BuildStatus::Waiting => {
                    build.record.status = BuildStatus::Building;
                    build.record.clone()
                }
                _ => {
                    let message = "this build was started already";
                    return Err(Error::new(http::StatusCode::CONFLICT, message));
                }
            }
        };
        let saved = self.store.save_build(&record).await;
        if saved.is_err()
            && let Some(build) = self.known().builds.get_mut(id)
        {
            build.record.status = BuildStatus::Waiting;
        }
        Ok(saved?)
    }

    async fn end(&self, id: &str, outcome: Result<(), String>) {
        let outcome = outcome.map_err(|mut reason| {
            reason.truncate(reason.floor_char_boundary(MAX_REASON));
            reason
        });
        if let Err(reason) = &outcome {
            self.log(id, "error", reason.clone());
        }
        let record = {
            let mut known = self.known();
            let Some(build) = known.builds.get_mut(id) else {
                return;
            };
            build.record.status = match outcome {
                Ok(()) => BuildStatus::Ready,
                Err(reason) => BuildStatus::Failed(reason),
            };
            build.record.clone()
        };
        if let Err(error) = self.store.save_build(&record).await {
            tracing::error!(%error, build = id, "what became of a build is not recorded");
        }
    }

    fn at_step(&self, id: &str, step: &str) {
        if let Some(build) = self.known().builds.get_mut(id) {
            build.record.step = Some(step.to_owned());
        }
    }

    fn log(&self, id: &str, level: &'static str, text: String) {
        if let Some(build) = self.known().builds.get_mut(id)
            && (build.log_bytes < MAX_LOG_BYTES || level == "error")
        {
            build.log_bytes += text.len();
            build.log.push(Line {
                time: now(),
                level,
                text,
            });
        }
    }
}

/// Ends what the daemon before this one had all but finished.
pub(super) fn finish(state: &AppState) {
    for id in state.builds.unfinished() {
        tokio::spawn(routes::conclude(state.clone(), id, Ok(())));
    }
}
