//! A command in a running box, from the request to its exit code, on a connection that is kept.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::Bench;
use super::report::{Measurement, Samples};
use crate::client::guest::Guest;
use crate::client::wire::StartRequest;

pub(super) const NAME: &str = "exec of true";
const WARM_UPS: u32 = 10;

pub(super) async fn measure(bench: &Bench) -> Result<Measurement> {
    let agent = bench.agent().await?;
    let guest = bench.client.guest(&agent.name, Some("root"));
    let mut samples = Samples::new()?;
    for round in 0..WARM_UPS + bench.runs {
        let begun = Instant::now();
        run_true(&guest).await?;
        if round >= WARM_UPS {
            samples.add(begun.elapsed())?;
        }
    }
    bench.delete(&agent.name).await?;
    Ok(Measurement::new(NAME, &samples, None))
}

pub(super) async fn run_true(guest: &Guest<'_>) -> Result<()> {
    let (_, _, end) = guest.run(&StartRequest::command("/bin/true", [""; 0])).await?;
    ensure!(end.code() == 0, "`true` ended with {}", end.code());
    Ok(())
}
