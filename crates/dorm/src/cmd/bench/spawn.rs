//! The bare limit of any exec: starting /bin/true on the host and waiting for it.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use super::report::{Measurement, Samples};

pub(super) const FORK: &str = "host: fork + exec of true";
const SPAWN: &str = "host: posix_spawn of true";
const WARM_UPS: u32 = 10;

pub(super) fn measure(runs: u32) -> Result<Vec<Measurement>> {
    let mut spawn = Command::new("/bin/true");
    let mut fork = Command::new("/bin/true");
    // The standard library forks where an id is to be set, and spawns otherwise.
    fork.uid(rustix::process::getuid().as_raw());
    Ok(vec![
        of(FORK, fork, runs)?,
        of(SPAWN, spawn.stdin(Stdio::null()), runs)?,
    ])
}

fn of(
    name: &'static str,
    mut command: impl std::borrow::BorrowMut<Command>,
    runs: u32,
) -> Result<Measurement> {
    let command = command.borrow_mut();
    let mut samples = Samples::new()?;
    for round in 0..WARM_UPS + runs {
        let begun = Instant::now();
        command.status().context("cannot start /bin/true")?;
        if round >= WARM_UPS {
            samples.add(begun.elapsed())?;
        }
    }
    Ok(Measurement::new(name, &samples, None))
}
