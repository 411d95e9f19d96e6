//! Standby of a sandbox: its kernel holds every task where it is, and then stands still itself.
//!
//! The tasks are held first, so that the kernel can go on alone, to write a memory image, without any of them running. Its
//! count of holds must come out even, or it breaks off; therefore a mark in the run directory says whether they are held, and
//! says nothing while that changes. Where a daemon ended in between, the kernel is looked at.

use std::io;
use std::time::Duration;

use super::Gvisor;
use crate::host::LiveBox;
use crate::{EngineError, Id, Result};

const MARK: &str = "held";
/// What the mark holds once the tasks are.
const SURE: &[u8] = b"yes";
/// What its ports are is good to know of a box that sleeps, but not worth waiting for.
const ASIDE: Duration = Duration::from_secs(1);
/// How often, and how far apart, no task must be seen to move before all are taken for held. One that may move does so at once.
const LOOKS: u32 = 30;
const APART: Duration = Duration::from_millis(100);

impl Gvisor {
    pub(super) async fn freeze_box(&self, live: &LiveBox) -> Result<()> {
        let failed = || EngineError::io("cannot freeze the box");
        if !self.settle(live).await? {
            if let Ok(Ok(ports)) = tokio::time::timeout(ASIDE, self.ask_for_ports(&live.id)).await {
                let mut listeners = self.listeners();
                // A good time to forget those of boxes that are gone.
                listeners.retain(|id, _| self.host.live(id).is_ok());
                listeners.insert(live.id.clone(), ports);
            }
            self.mark(&live.id, b"").map_err(failed())?;
            self.control(&live.id).pause().await.map_err(failed())?;
            self.mark(&live.id, SURE).map_err(failed())?;
        }
        live.freeze().await
    }

    pub(super) async fn thaw_box(&self, live: &LiveBox) -> Result<()> {
        let failed = || EngineError::io("cannot thaw the box");
        if self.settle(live).await? {
            live.thaw()?;
            self.mark(&live.id, b"").map_err(failed())?;
            self.control(&live.id).resume().await.map_err(failed())?;
        }
        live.thaw()?;
        self.listeners().remove(&live.id);
        self.unmark(&live.id).map_err(failed())
    }

    /// Whether the tasks are held.
    async fn settle(&self, live: &LiveBox) -> Result<bool> {
        let failed = || EngineError::io("cannot find out whether the box is held");
        match self.read_mark(&live.id).map_err(failed())? {
            None => Ok(false),
            Some(mark) if mark == SURE => Ok(true),
            Some(_) => {
                // Its kernel has to run to say so.
                live.thaw()?;
                let held = self.are_tasks_held(&live.id).await.map_err(failed())?;
                tracing::info!(id = %live.id, held, "found a box whose standby was broken off");
                match held {
                    true => self.mark(&live.id, SURE),
                    false => self.unmark(&live.id),
                }
                .map_err(failed())?;
                Ok(held)
            }
        }
    }

    /// Holds nest: one more, taken back at once, comes after whatever was under way, and changes nothing. Then whoever is
    /// held by none moves.
    async fn are_tasks_held(&self, id: &Id) -> io::Result<bool> {
        let control = self.control(id);
        control.pause().await?;
        control.resume().await?;
        for _ in 0..LOOKS {
            if !control.all_tasks_stand().await? {
                return Ok(false);
            }
            tokio::time::sleep(APART).await;
        }
        Ok(true)
    }

    pub(super) fn is_held(&self, id: &Id) -> Result<bool> {
        let mark = self.read_mark(id);
        let mark = mark.map_err(EngineError::io("cannot find out whether the box is held"))?;
        Ok(mark.is_some_and(|mark| mark == SURE))
    }

    fn read_mark(&self, id: &Id) -> io::Result<Option<Vec<u8>>> {
        match std::fs::read(self.host.run_directory(id).join(MARK)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    fn mark(&self, id: &Id, text: &[u8]) -> io::Result<()> {
        std::fs::write(self.host.run_directory(id).join(MARK), text)
    }

    fn unmark(&self, id: &Id) -> io::Result<()> {
        match std::fs::remove_file(self.host.run_directory(id).join(MARK)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
