//! Many agents: running forks of one, and a thousand on disk.

use std::collections::HashSet;
use std::time::Instant;

use anyhow::{Context, Result};
use dorm_server::api::types::{Agent, Fork};

use super::report::{Figure, Measurement, Samples};
use super::{Bench, load};
use crate::client::agent_path;

const FORK: &str = "fork with memory, one by one";
const LIST: &str = "dorm ls, all on disk";
const LIST_ALONE: &str = "dorm ls, one agent";
pub(super) const WAKE_ALONE: &str = "wake from disk, one agent alone";
pub(super) const WAKE_CROWDED: &str = "the same agent, among all on disk";
pub(super) const FIRST_ALONE: &str = "first wake of a fork, few on disk";
pub(super) const FIRST_CROWDED: &str = "first wake of another of them each time";

/// Running copies of one agent: by one request, and by as many requests.
pub(super) async fn forks(bench: &Bench, count: u32) -> Result<(Vec<Measurement>, Vec<Figure>)> {
    let agent = small(bench).await?;
    let begun = Instant::now();
    let made = fork(bench, &agent, Some(count), true).await?;
    let took = begun.elapsed();
    let names: HashSet<&str> = made.iter().map(|fork| fork.name.as_str()).collect();
    let all: Vec<Agent> = bench.client.get("/v1/agents?usage=true").await?;
    let of = |figure: fn(&Agent) -> Option<u64>| {
        let forks = all.iter().filter(|agent| names.contains(agent.name.as_str()));
        forks.filter_map(figure).sum::<u64>() as f64 / f64::from(count)
    };
    let source = all.iter().find(|one| one.name == agent.name);
    let source = source.and_then(|one| one.memory_used).unwrap_or(0) as f64;
    let figures = vec![
        Figure::count("forks of one agent, with its memory, by one request", count),
        Figure::ms("time for each", took.as_secs_f64() * 1e3 / f64::from(count)),
        Figure::mib("RAM of each", of(|agent| agent.memory_used)),
        Figure::mib("RAM of the agent that they are forks of", source),
        // The files of the image are shared by all.
        Figure::mib(
            "disk of each",
            of(|agent| Some(agent.disk_used? - agent.image_size.unwrap_or(0))),
        ),
    ];
    delete_all(bench, &made).await?;
    let (mut one_by_one, mut samples) = (Vec::new(), Samples::new()?);
    for _ in 0..count {
        let begun = Instant::now();
        one_by_one.extend(fork(bench, &agent, None, true).await?);
        samples.add(begun.elapsed())?;
    }
    delete_all(bench, &one_by_one).await?;
    bench.delete(&agent.name).await?;
    Ok((vec![Measurement::new(FORK, &samples, None)], figures))
}

/// Agents that cost disk only.
pub(super) async fn hibernated(bench: &Bench, count: u32) -> Result<(Vec<Measurement>, Vec<Figure>)> {
    let agent = small(bench).await?;
    let listed_alone = list(bench).await?;
    let alone = wake_again(bench, &agent).await?;
    let few = bench.slow_runs() + 1;
    let first_alone = wake_each(bench, &fork(bench, &agent, Some(few), false).await?).await?;
    let memory_before = daemon_memory(bench);
    let begun = Instant::now();
    let crowd = fork(bench, &agent, Some(count), false).await?;
    let took = begun.elapsed();
    let memory_after = daemon_memory(bench);
    let listed = list(bench).await?;
    let among = wake_again(bench, &agent).await?;
    let (woken, rest) = crowd.split_at(crowd.len().min(few as usize));
    let first_among = wake_each(bench, woken).await?;
    delete_all(bench, rest).await?;
    bench.delete(&agent.name).await?;
    let mut figures = vec![
        Figure::count("agents on disk", count),
        Figure::ms("time to make each", took.as_secs_f64() * 1e3 / f64::from(count)),
    ];
    if let (Ok(before), Ok(after)) = (memory_before, memory_after) {
        figures.push(Figure::mib("daemon, with all of them", after as f64));
        let each = (after as f64 - before as f64) / f64::from(count);
        figures.push(Figure::kib("daemon, for each of them", each));
    }
    let measured = vec![
        Measurement::new(LIST_ALONE, &listed_alone, None),
        Measurement::new(LIST, &listed, None),
        Measurement::new(WAKE_ALONE, &alone, None),
        Measurement::new(WAKE_CROWDED, &among, None),
        Measurement::new(FIRST_ALONE, &first_alone, None),
        Measurement::new(FIRST_CROWDED, &first_among, None),
    ];
    Ok((measured, figures))
}

/// A small agent that runs.
async fn small(bench: &Bench) -> Result<Agent> {
    let agent = bench.agent().await?;
    if load::missing(bench, &agent.name).await?.is_none() {
        load::rest(bench, &agent.name).await?;
    }
    Ok(agent)
}

async fn fork(bench: &Bench, agent: &Agent, count: Option<u32>, start: bool) -> Result<Vec<Agent>> {
    let name = bench.new_name();
    bench.will_make((1..=count.unwrap_or(0)).map(|n| format!("{name}-{n}")));
    let request = Fork {
        name,
        count,
        from: None,
        files_only: false,
        start,
    };
    bench.have_made(&agent_path(&agent.name, "/fork"), &request).await
}

async fn delete_all(bench: &Bench, agents: &[Agent]) -> Result<()> {
    for agent in agents {
        bench.delete(&agent.name).await?;
    }
    Ok(())
}

/// Wakes the same one over and over. The first time is not counted.
async fn wake_again(bench: &Bench, agent: &Agent) -> Result<Samples> {
    let mut samples = Samples::new()?;
    for round in 0..=bench.slow_runs() {
        bench.ask(&agent.name, "/hibernate").await?;
        let begun = Instant::now();
        bench.ask(&agent.name, "/wake").await?;
        if round > 0 {
            samples.add(begun.elapsed())?;
        }
    }
    Ok(samples)
}

/// Wakes one after the other, each of which is gone when the next is woken. The first is not counted.
async fn wake_each(bench: &Bench, agents: &[Agent]) -> Result<Samples> {
    let mut samples = Samples::new()?;
    for (round, agent) in agents.iter().enumerate() {
        let begun = Instant::now();
        bench.ask(&agent.name, "/wake").await?;
        if round > 0 || agents.len() == 1 {
            samples.add(begun.elapsed())?;
        }
        bench.delete(&agent.name).await?;
    }
    Ok(samples)
}

async fn list(bench: &Bench) -> Result<Samples> {
    let mut samples = Samples::new()?;
    for round in 0..=bench.slow_runs() {
        let begun = Instant::now();
        let _: serde_json::Value = bench.client.get("/v1/agents?usage=true").await?;
        if round > 0 {
            samples.add(begun.elapsed())?;
        }
    }
    Ok(samples)
}

/// Bytes of RAM that the daemon holds, if it is on this machine.
fn daemon_memory(bench: &Bench) -> Result<u64> {
    let text = std::fs::read(bench.data.join("daemon.json"))?;
    let daemon: serde_json::Value = serde_json::from_slice(&text)?;
    let pid = daemon["pid"].as_u64().context("the daemon's pid is not known")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = line
        .and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse().ok())
        .context("no RSS")?;
    Ok(kib << 10)
}
