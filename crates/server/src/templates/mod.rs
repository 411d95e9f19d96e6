//! Templates: read-only homes that agents start from, with defaults for them.
//!
//! ```text
//!   build    recipe ──▶ home (bootstrapped, or a copy of the parent) ──▶ box runs the steps ──▶ seal
//!   import   upload ──▶ empty home ──▶ layers unpacked in a sandbox ───────────────────────────▶ seal
//!                                                                  then: record ─▶ remove the old
//! ```
//!
//! A template is made under a new id, and the record that names it is written last and at once: until
//! then the name means what it meant before, and whatever fails leaves nothing behind. One piece of work
//! is under way for a name at a time. It ends when whoever asked for it goes away.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dorm_engine::{Engine, Homes, Id};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::types::Template;
use crate::build_slots::BuildSlots;
use crate::config::Config;
use crate::records::{TemplateRecord, Workspace};
use crate::store::{Store, StoreError};

use self::making::Making;

mod build;
mod cache;
mod error;
mod import;
mod making;
mod recipe;
mod report;
mod script;
mod steps;
#[cfg(test)]
mod tests;
mod uploads;

pub use error::TemplateError;
pub use import::ImportOptions;
pub(crate) use recipe::check_name;
pub(crate) use script::number_in;
pub use script::{Instruction, Script};

pub type Result<T, E = TemplateError> = std::result::Result<T, E>;

/// What templates are made of.
pub struct Parts {
    pub config: Arc<Config>,
    pub store: Arc<dyn Store>,
    pub engine: Arc<dyn Engine>,
    pub homes: Arc<dyn Homes>,
    pub build_slots: Arc<BuildSlots>,
}

pub struct Templates {
    parts: Parts,
    /// Names that something is being made for, each with the template it is made from.
    claims: Mutex<HashMap<(Workspace, String), Option<Id>>>,
    /// Held while a template's files are copied or removed, so that none vanish in between.
    files: tokio::sync::Mutex<()>,
    uploads: uploads::Uploads,
    tasks: TaskTracker,
    closed: CancellationToken,
}

impl Templates {
    pub fn new(parts: Parts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            claims: Mutex::default(),
            files: tokio::sync::Mutex::default(),
            uploads: uploads::Uploads::default(),
            tasks: TaskTracker::new(),
            closed: CancellationToken::new(),
        })
    }

    /// Breaks off what is being made, and returns when it is cleared away.
    pub async fn close(&self) {
        self.closed.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    pub async fn list(&self, workspace: &Workspace) -> Result<Vec<Template>> {
        let mut templates = Vec::new();
        for record in self.parts.store.list_templates(workspace).await? {
            templates.push(self.view(record).await?);
        }
        Ok(templates)
    }

    /// By name or id.
    pub async fn get(&self, workspace: &Workspace, template: &str) -> Result<Template> {
        let record = self
            .parts
            .store
            .template_by_name_or_id(workspace, template)
            .await?;
        self.view(record).await
    }

    /// Agents made from it keep their homes.
    pub async fn delete(self: &Arc<Self>, workspace: &Workspace, template: &str) -> Result<()> {
        let record = self
            .parts
            .store
            .template_by_name_or_id(workspace, template)
            .await?;
        let _claim = self.claim(workspace, &record.name)?;
        if self
            .claims()
            .values()
            .flatten()
            .any(|parent| *parent == record.id)
        {
            return Err(TemplateError::InUse(record.name));
        }
        self.parts.store.delete_template(workspace, &record.id).await?;
        self.remove_files(&record.id).await;
        remove_log(&self.log_path(&record.name)).await;
        Ok(())
    }

    /// Makes `name` mean what `from` means now, in constant time. The copy is that of `build`, or of the same one as before.
    pub async fn copy(
        self: &Arc<Self>,
        workspace: &Workspace,
        from: &str,
        name: &str,
        build: Option<String>,
    ) -> Result<TemplateRecord> {
        recipe::check_name(name)?;
        let claim = self.claim(workspace, name)?;
        let source = self.parts.store.template_by_name_or_id(workspace, from).await?;
        claim.made_from(&source.id);
        let (mut making, _progress) = Making::begin(self, claim).await?;
        let copied = making.copy(&source, build).await;
        if copied.is_err() {
            making.discard().await;
        }
        copied
    }

    /// What the last build or import of this name printed.
    pub async fn log(&self, workspace: &Workspace, template: &str) -> Result<String> {
        let name = match self.parts.store.template_by_name_or_id(workspace, template).await {
            Ok(record) => record.name,
            // A build that failed leaves a log and no template.
            Err(StoreError::NotFound { .. }) if recipe::check_name(template).is_ok() => template.to_owned(),
            Err(e) => return Err(e.into()),
        };
        match tokio::fs::read(self.log_path(&name)).await {
            Ok(log) => Ok(String::from_utf8_lossy(&log).into_owned()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(TemplateError::NoLog(name)),
            Err(e) => Err(TemplateError::io("read the log")(e)),
        }
    }

    fn log_path(&self, name: &str) -> std::path::PathBuf {
        self.parts
            .config
            .data
            .join("logs")
            .join(format!("template-{name}.log"))
    }

    async fn view(&self, record: TemplateRecord) -> Result<Template> {
        let agents = self.parts.store.agents_of_template(&record.id).await?;
        Ok(Template {
            id: record.id,
            name: record.name,
            created: record.created,
            recipe_hash: record.recipe_hash,
            user: record.defaults.user,
            workdir: record.defaults.workdir,
            env: record.defaults.env,
            start: record.defaults.start,
            start_keeps_awake: record.defaults.start_keeps_awake,
            size: record.size,
            agents,
        })
    }

    /// The files of a template that has no record any more. What cannot be removed now is removed at
    /// the next start.
    async fn remove_files(&self, id: &Id) {
        let _files = self.files.lock().await;
        if let Err(error) = self.parts.homes.delete_template(id).await {
            tracing::error!(%id, error = %dorm_engine::chain(&error), "the files of a template are left");
        }
    }

    fn claims(&self) -> MutexGuard<'_, HashMap<(Workspace, String), Option<Id>>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(self: &Arc<Self>, workspace: &Workspace, name: &str) -> Result<Claim> {
        let key = (workspace.clone(), name.to_owned());
        let mut claims = self.claims();
        if self.closed.is_cancelled() {
            return Err(TemplateError::Cancelled);
        }
        if claims.contains_key(&key) {
            return Err(TemplateError::Busy(name.to_owned()));
        }
        claims.insert(key.clone(), None);
        Ok(Claim {
            templates: self.clone(),
            key,
        })
    }
}

async fn remove_log(path: &std::path::Path) {
    match tokio::fs::remove_file(path).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(%error, path = %path.display(), "the log of a template is left");
        }
        _ => {}
    }
}

/// The sole right to make something for a name, given back when this is dropped.
struct Claim {
    templates: Arc<Templates>,
    key: (Workspace, String),
}

impl Claim {
    /// Keeps `parent` from being deleted meanwhile.
    fn made_from(&self, parent: &Id) {
        self.templates
            .claims()
            .insert(self.key.clone(), Some(parent.clone()));
    }

    fn workspace(&self) -> &Workspace {
        &self.key.0
    }

    fn name(&self) -> &str {
        &self.key.1
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.templates.claims().remove(&self.key);
    }
}
