//! The place of a box on its home: one at a time.

use std::sync::Arc;

use super::{Host, LiveBox, Slot};
use crate::{BoxRecord, BoxSpec, EngineError, Result};

impl Host {
    /// Makes the box that `coming` brings up the one that runs on the home of `spec`, or leaves nothing of it.
    pub(crate) async fn occupy(
        &self,
        spec: &BoxSpec,
        coming: impl Future<Output = Result<(LiveBox, BoxRecord)>>,
    ) -> Result<BoxRecord> {
        if !self.pool.home_path(&spec.id).exists() {
            return Err(EngineError::NoHome(spec.id.clone()));
        }
        {
            let mut boxes = self.boxes();
            if boxes.contains_key(&spec.id) {
                return Err(EngineError::AlreadyRunning(spec.id.clone()));
            }
            boxes.insert(spec.id.clone(), Slot::Starting);
        }
        // If this future is dropped halfway, the reservation goes, and the next start sweeps the rest.
        let reservation = Reservation {
            host: self,
            spec,
            settled: false,
        };
        if self.cgroups.group(spec.id.as_str()).exists() || self.run_directory(&spec.id).exists() {
            self.remove_remains(&spec.id).await?;
        }
        match coming.await {
            Ok((live, record)) => {
                self.boxes().insert(spec.id.clone(), Slot::Live(Arc::new(live)));
                reservation.settle();
                Ok(record)
            }
            Err(error) => {
                if let Err(remains) = self.remove_remains(&spec.id).await {
                    tracing::warn!(id = %spec.id, error = %crate::chain(&remains), "remains of a box that did not come up");
                }
                Err(error)
            }
        }
    }
}

/// Frees the place of a box that did not come up.
struct Reservation<'a> {
    host: &'a Host,
    spec: &'a BoxSpec,
    settled: bool,
}

impl Reservation<'_> {
    fn settle(mut self) {
        self.settled = true;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.host.boxes().remove(&self.spec.id);
        }
    }
}
