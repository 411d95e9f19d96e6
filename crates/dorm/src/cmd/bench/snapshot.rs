//! Snapshots of a live agent: how long it is held still; and whether the size of a home matters.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dorm_engine::criu::bare::Bare;
use dorm_server::api::types::{Agent, Fork, NewSnapshot, Snapshot};

use super::report::{Figure, Measurement, Samples};
use super::{Bench, load};
use crate::client::{agent_path, encode};
use crate::size::Size;

const FULL: &str = "live snapshot, 100 MiB";
pub(super) const HELD: &str = "agent held still by it";
pub(super) const DUMP: &str = "criu dump, 100 MiB";
pub(super) const FILES_SMALL: &str = "files-only snapshot, home of 50 MiB";
pub(super) const FILES_LARGE: &str = "files-only snapshot, large home";
pub(super) const FORK_SMALL: &str = "files-only fork, home of 50 MiB";
pub(super) const FORK_LARGE: &str = "files-only fork, large home";
pub(super) const SMALL_HOME: Size = Size(50 << 20);

pub(super) async fn live(bench: &Bench) -> Result<Vec<Measurement>> {
    let agent = bench.agent().await?;
    if let Some(why) = load::missing(bench, &agent.name).await? {
        bench.delete(&agent.name).await?;
        return Ok([FULL, HELD, DUMP]
            .map(|name| Measurement::skipped(name, &why))
            .into());
    }
    load::hold(bench, &agent.name, load::LARGE).await?;
    let (mut taken, mut held, mut dump) = (Samples::new()?, Samples::new()?, Samples::new()?);
    for round in 0..=bench.slow_runs() {
        load::longest_gap(bench, &agent.name).await?;
        let begun = Instant::now();
        let snapshot = take(bench, &agent, false).await?;
        let took = begun.elapsed();
        let gap = load::longest_gap(bench, &agent.name).await?;
        forget(bench, &agent, &snapshot).await?;
        if round > 0 {
            taken.add(took)?;
            held.add(Duration::from_secs_f64(
                gap.context("the agent was not held still")?,
            ))?;
        }
        if let Ok(bare) = &bench.bare {
            let took = dump_alone(bench, bare, &agent).await?;
            if round > 0 {
                dump.add(took)?;
            }
        }
    }
    bench.delete(&agent.name).await?;
    let dumped = match &bench.bare {
        Ok(_) => Measurement::new(DUMP, &dump, None),
        Err(why) => Measurement::skipped(DUMP, why),
    };
    Ok(vec![
        Measurement::new(FULL, &taken, None),
        Measurement::new(HELD, &held, None),
        dumped,
    ])
}

/// What CRIU alone takes to write the memory of an agent that has been in its box since it was made.
pub(super) async fn dump_alone(bench: &Bench, bare: &Bare, agent: &Agent) -> Result<Duration> {
    bench.ask(&agent.name, "/pause").await?;
    let images = tempfile::tempdir_in(bench.data.join("images"))
        .or_else(|_| tempfile::tempdir())
        .context("cannot make a directory for an image")?;
    let (bare, id, path) = (bare.clone(), agent.id.clone(), images.path().to_owned());
    let pid = agent.pid.context("the agent has no process")?;
    let took = bench
        .unbroken(async move { bare.dump(&id, pid, &path).await })
        .await?;
    bench.ask(&agent.name, "/wake").await?;
    Ok(took)
}

pub(super) async fn files(bench: &Bench, large: Size) -> Result<(Vec<Measurement>, Vec<Figure>)> {
    let disk = large.0.saturating_mul(2);
    let (small_agent, large_agent) = (bench.agent().await?, bench.agent_with_disk(disk).await?);
    if let Some(why) = load::missing(bench, &small_agent.name).await? {
        let skipped =
            [FILES_SMALL, FILES_LARGE, FORK_SMALL, FORK_LARGE].map(|name| Measurement::skipped(name, &why));
        return Ok((skipped.into(), Vec::new()));
    }
    fill(bench, &small_agent.name, SMALL_HOME).await?;
    fill(bench, &large_agent.name, large).await?;
    let mut snapshots = [Samples::new()?, Samples::new()?];
    let mut forks = [Samples::new()?, Samples::new()?];
    for round in 0..=bench.slow_runs() {
        for (n, agent) in [&small_agent, &large_agent].into_iter().enumerate() {
            let begun = Instant::now();
            let snapshot = take(bench, agent, true).await?;
            let took = begun.elapsed();
            forget(bench, agent, &snapshot).await?;
            let name = bench.new_name();
            let request = Fork {
                name: name.clone(),
                count: None,
                from: None,
                files_only: true,
                start: true,
            };
            let begun = Instant::now();
            let _: Vec<Agent> = bench
                .have_made(&agent_path(&agent.name, "/fork"), &request)
                .await?;
            let forked = begun.elapsed();
            bench.delete(&name).await?;
            if round > 0 {
                snapshots[n].add(took)?;
                forks[n].add(forked)?;
            }
        }
    }
    bench.delete(&small_agent.name).await?;
    bench.delete(&large_agent.name).await?;
    let measured = vec![
        Measurement::new(FILES_SMALL, &snapshots[0], None),
        Measurement::new(FILES_LARGE, &snapshots[1], None),
        Measurement::new(FORK_SMALL, &forks[0], None),
        Measurement::new(FORK_LARGE, &forks[1], None),
    ];
    Ok((measured, vec![Figure::mib("the large home", large.0 as f64)]))
}

/// Files of 1 MiB, on disk when this returns.
async fn fill(bench: &Bench, agent: &str, size: Size) -> Result<()> {
    let script = format!(
        "mkdir -p /var/tmp/bench && python3 -c 'import os
block = os.urandom(1 << 20)
for n in range({}): open(f\"/var/tmp/bench/{{n}}\", \"wb\").write(block)
os.sync()'",
        size.0 >> 20
    );
    let filled = bench.shell(agent, &script).await?;
    ensure!(
        filled.is_some(),
        "the home of {agent} could not be filled with {size}"
    );
    Ok(())
}

pub(super) async fn take(bench: &Bench, agent: &Agent, files_only: bool) -> Result<Snapshot> {
    let request = NewSnapshot {
        label: "bench".to_owned(),
        files_only,
    };
    bench
        .client
        .post(&agent_path(&agent.name, "/snapshots"), &request)
        .await
}

pub(super) async fn forget(bench: &Bench, agent: &Agent, snapshot: &Snapshot) -> Result<()> {
    let path = format!("/snapshots/{}", encode(snapshot.id.as_str()));
    bench.client.delete(&agent_path(&agent.name, &path)).await
}
