//! To standby and back, beside the freezer alone.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::report::{Measurement, Samples};
use super::{Bench, exec};

pub(super) const EXEC: &str = "exec of true, between pauses";
pub(super) const PAUSE: &str = "pause";
pub(super) const WAKE: &str = "wake from standby + exec of true";
pub(super) const FREEZE: &str = "host: freeze";
pub(super) const THAW: &str = "host: thaw + fork + exec of true";
const WARM_UPS: u32 = 3;

pub(super) async fn measure(bench: &Bench) -> Result<Vec<Measurement>> {
    let agent = bench.agent().await?;
    let guest = bench.client.guest(&agent.name, Some("root"));
    let (mut run, mut pause, mut wake) = (Samples::new()?, Samples::new()?, Samples::new()?);
    for round in 0..WARM_UPS + bench.runs {
        let begun = Instant::now();
        exec::run_true(&guest).await?;
        let ran = begun.elapsed();
        let begun = Instant::now();
        bench.ask(&agent.name, "/pause").await?;
        let paused = begun.elapsed();
        let begun = Instant::now();
        exec::run_true(&guest).await?;
        if round >= WARM_UPS {
            wake.add(begun.elapsed())?;
            run.add(ran)?;
            pause.add(paused)?;
        }
    }
    let mut measured = vec![
        Measurement::new(EXEC, &run, None),
        Measurement::new(PAUSE, &pause, None),
        Measurement::new(WAKE, &wake, None),
    ];
    match &bench.bare {
        Err(why) => measured.extend([FREEZE, THAW].map(|name| Measurement::skipped(name, why))),
        Ok(bare) => {
            let (mut freeze, mut thaw) = (Samples::new()?, Samples::new()?);
            let mut command = Command::new("/bin/true");
            // As in `spawn`: this makes the standard library fork.
            std::os::unix::process::CommandExt::uid(&mut command, 0);
            for _ in 0..bench.runs {
                let begun = Instant::now();
                bare.freeze(&agent.id).context("cannot freeze")?;
                freeze.add(begun.elapsed())?;
                let begun = Instant::now();
                bare.thaw(&agent.id).context("cannot thaw")?;
                command.status().context("cannot start /bin/true")?;
                thaw.add(begun.elapsed())?;
            }
            measured.push(Measurement::new(FREEZE, &freeze, None));
            measured.push(Measurement::new(THAW, &thaw, None));
        }
    }
    bench.delete(&agent.name).await?;
    Ok(measured)
}
