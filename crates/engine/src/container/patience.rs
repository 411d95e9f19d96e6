//! How long CRIU may take to bring back a box, and the end of one that takes longer.

use std::path::Path;
use std::time::Duration;

use crate::host::{Host, failed};
use crate::{EngineError, Id, criu};

/// For tests: the time that any restore may take, in milliseconds.
const VARIABLE: &str = "DORM_RESTORE_LIMIT";

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Patience {
    declared: Option<Duration>,
}

impl Patience {
    pub(super) fn from_environment() -> Self {
        let millis = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok());
        Self {
            declared: millis.map(Duration::from_millis),
        }
    }

    pub(super) fn with(self, image: &Path) -> Duration {
        let files = std::fs::read_dir(image).into_iter().flatten().flatten();
        let size: u64 = files.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
        self.declared.unwrap_or_else(|| criu::patience_with(size))
    }
}

/// Ends a restore that took longer than `limit`. Says nothing against the image.
pub(super) async fn end(host: &Host, id: &Id, limit: Duration) -> EngineError {
    // Nothing moves until all of it is killed: what CRIU holds would go on without CRIU.
    let group = host.cgroups.group(id.as_str());
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || group.freeze()).await {
        tracing::debug!(%id, %error, "a restore that takes too long cannot be held still");
    }
    if let Err(error) = host.remove_remains(id).await {
        tracing::warn!(%id, error = %crate::chain(&error), "remains of a box that did not come back");
    }
    let why = format!("criu did not come to an end within {} s", limit.as_secs_f32());
    failed("was restored")(why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_grows_with_the_image() {
        let image = tempfile::tempdir().unwrap();
        let patience = Patience::default();
        let base = criu::patience_with(0);
        assert_eq!(patience.with(image.path()), base);
        for name in ["pages-1.img", "pages-2.img"] {
            let file = std::fs::File::create(image.path().join(name)).unwrap();
            file.set_len(4 << 30).unwrap();
        }
        assert_eq!(patience.with(image.path()), base + Duration::from_secs(1024));
    }
}
