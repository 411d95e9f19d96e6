//! From the request for a new agent to the end of its first command.

use std::time::Instant;

use anyhow::Result;

use super::report::{Measurement, Samples};
use super::{Bench, exec};

pub(super) const NAME: &str = "create + first exec";

pub(super) async fn measure(bench: &Bench) -> Result<Measurement> {
    let mut samples = Samples::new()?;
    for warm_up in [true]
        .into_iter()
        .chain(std::iter::repeat_n(false, bench.runs as usize))
    {
        let begun = Instant::now();
        let agent = bench.agent().await?;
        exec::run_true(&bench.client.guest(&agent.name, Some("root"))).await?;
        if !warm_up {
            samples.add(begun.elapsed())?;
        }
        bench.delete(&agent.name).await?;
    }
    Ok(Measurement::new(NAME, &samples, None))
}
