//! Standby: a box whose processes are where they were, and use no processor.

use super::Container;
use crate::{EngineError, Id, Result};

impl Container {
    pub(super) async fn freeze_box(&self, id: &Id) -> Result<()> {
        let group = self.live(id)?.group.clone();
        // It takes a fraction of a millisecond, unless a process hangs in the kernel.
        let frozen = tokio::task::spawn_blocking(move || group.freeze()).await;
        let frozen = frozen.unwrap_or_else(|e| Err(std::io::Error::other(e)));
        frozen.map_err(EngineError::io("cannot freeze the box"))
    }

    pub(super) fn thaw_box(&self, id: &Id) -> Result<()> {
        let live = self.live(id)?;
        live.group
            .thaw()
            .map_err(EngineError::io("cannot thaw the box"))?;
        let names = live.take_names();
        if !names.is_empty() {
            let home = self.pool.home_path(id);
            tokio::task::spawn_blocking(move || crate::criu::forget(&home, &names));
        }
        Ok(())
    }
}
