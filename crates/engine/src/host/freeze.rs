//! Standby: a box whose processes are where they were, and use no processor.

use super::LiveBox;
use crate::{EngineError, Result};

impl LiveBox {
    pub(crate) async fn freeze(&self) -> Result<()> {
        let group = self.group.clone();
        // It takes a fraction of a millisecond, unless a process hangs in the kernel.
        let frozen = tokio::task::spawn_blocking(move || group.freeze()).await;
        let frozen = frozen.unwrap_or_else(|e| Err(std::io::Error::other(e)));
        frozen.map_err(EngineError::io("cannot freeze the box"))
    }

    pub(crate) fn thaw(&self) -> Result<()> {
        self.group.thaw().map_err(EngineError::io("cannot thaw the box"))
    }
}
