//! Waiting for what comes about by itself.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Far beyond what anything takes: it only bounds how long a broken thing is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many times as long everything may take on this machine, as `DORM_E2E_SLOWNESS` says.
pub(crate) fn slowness() -> u32 {
    let told = std::env::var("DORM_E2E_SLOWNESS").ok();
    told.and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// Asks until the answer is there, and fails with `what` if it never comes.
pub(crate) fn eventually<T>(what: &str, ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    eventually_within(PATIENCE * slowness(), what, ask)
}

/// The same, of what takes long.
pub(crate) fn eventually_within<T>(
    patience: Duration,
    what: &str,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let until = Instant::now() + patience;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() > until {
            bail!("waited in vain: {what}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
