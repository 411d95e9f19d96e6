//! A template that is being made: its id, the right to its name, and how it ends, either way.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{Id, chain};
use tokio::sync::mpsc;

use super::report::Report;
use super::{Claim, Parts, Result, TemplateError, Templates};
use crate::api::types::{Progress, Template};
use crate::build_slots::BuildSlot;
use crate::records::{Built, TemplateDefaults, TemplateRecord, now};

/// Progress that may wait for its reader; more holds the work up.
const QUEUE: usize = 256;
/// Bytes that a template may hold beyond its parent, so that no archive or recipe fills the pool.
pub(super) const DISK: u64 = 40 << 30;

pub(super) struct Making {
    pub(super) templates: Arc<Templates>,
    pub(super) id: Id,
    pub(super) report: Report,
    pub(super) slot: Option<BuildSlot>,
    claim: Claim,
    recorded: bool,
}

/// What came of it, and whether it was there already.
pub(super) type Made = (Template, bool);

impl Making {
    pub(super) async fn begin(
        templates: &Arc<Templates>,
        claim: Claim,
    ) -> Result<(Self, mpsc::Receiver<Progress>)> {
        let (to, progress) = mpsc::channel(QUEUE);
        let log = templates.log_path(claim.name());
        let report = Report::new(to, &log, templates.closed.clone()).await?;
        let templates = templates.clone();
        let making = Self {
            templates,
            id: Id::random(),
            report,
            slot: None,
            claim,
            recorded: false,
        };
        Ok((making, progress))
    }

    pub(super) fn parts(&self) -> &Parts {
        &self.templates.parts
    }

    pub(super) fn name(&self) -> &str {
        self.claim.name()
    }

    pub(super) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Waits for a slot, whose uids and address the work may use from then on.
    pub(super) async fn take_slot(&mut self) -> Result<(u32, u32)> {
        let slots = self.parts().build_slots.clone();
        let slot = tokio::select! {
            slot = slots.take() => slot,
            () = self.report.abandoned() => return Err(TemplateError::Cancelled),
        };
        let numbers = (slot.slot, slot.uid_base);
        self.slot = Some(slot);
        Ok(numbers)
    }

    pub(super) async fn seal(&mut self) -> Result<()> {
        self.report.step("Seal the template").await;
        Ok(self.parts().homes.seal(&self.id).await?)
    }

    /// Bytes that the template holds beyond its parent, as far as they are known.
    pub(super) async fn size(&self) -> u64 {
        match self.parts().homes.usage(&self.id).await {
            Ok(usage) => usage.used,
            Err(error) => {
                tracing::debug!(error = %chain(&error), "the size of a template is not known");
                0
            }
        }
    }

    /// Makes the template a copy of another.
    pub(super) async fn copy(
        &mut self,
        from: &TemplateRecord,
        build: Option<String>,
    ) -> Result<TemplateRecord> {
        let templates = self.templates.clone();
        {
            let _files = templates.files.lock().await;
            self.parts().homes.create(&self.id, &from.id, DISK).await?;
            self.parts().homes.seal(&self.id).await?;
        }
        let built = Built {
            build: build.or_else(|| from.built.build.clone()),
            ..from.built.clone()
        };
        let (hash, defaults) = (from.recipe_hash.clone(), from.defaults.clone());
        self.record(hash, from.size, defaults, built).await
    }

    /// Makes the sealed template the one of its name, and removes the one before.
    pub(super) async fn record(
        &mut self,
        hash: Option<String>,
        size: u64,
        defaults: TemplateDefaults,
        built: Built,
    ) -> Result<TemplateRecord> {
        let record = TemplateRecord {
            id: self.id.clone(),
            workspace: self.claim.workspace().clone(),
            name: self.name().to_owned(),
            recipe_hash: hash,
            defaults,
            built,
            size,
            created: now(),
        };
        let replaced = self.parts().store.insert_template(&record).await?;
        self.recorded = true;
        if let Some(old) = replaced {
            self.templates.remove_files(&old).await;
        }
        Ok(record)
    }

    /// Tells the outcome. What was made of a template that did not come to be is removed first.
    pub(super) async fn conclude(self, outcome: Result<Made>) {
        let last = match outcome {
            Ok((template, cached)) => Progress::Done { template, cached },
            Err(error) => {
                let error = self.report.failed(error);
                tracing::info!(template = self.name(), error = %chain(&error), "a template was not made");
                if !self.recorded {
                    self.discard().await;
                }
                Progress::Error { error: error.body() }
            }
        };
        // The name is free again before anyone is told.
        let Self {
            report, claim, slot, ..
        } = self;
        drop((claim, slot));
        report.end(last).await;
    }

    pub(super) async fn discard(&self) {
        let Parts { engine, homes, .. } = self.parts();
        let left = |what: &str, error: &dyn std::error::Error| {
            tracing::error!(id = %self.id, error = %chain(error), "{what} of a template that was not made is left");
        };
        if let Err(error) = engine.stop(&self.id, Duration::ZERO).await {
            left("the box", &error);
        }
        if let Err(error) = engine.sweep(&self.id).await {
            left("something", &error);
        }
        if let Err(error) = homes.delete(&self.id).await {
            left("the home", &error);
        }
        if let Err(error) = homes.delete_template(&self.id).await {
            left("the sealed home", &error);
        }
    }
}
