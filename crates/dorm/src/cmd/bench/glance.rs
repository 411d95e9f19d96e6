//! A short look at what each isolation takes, for `dorm doctor`.

use std::time::Instant;

use anyhow::{Context, Error, Result};
use dorm_engine::doctor::Measured;
use dorm_server::api::types::{Agent, Template};
use dorm_server::isolation::Choice;

use super::{Bench, exec};
use crate::cli::Global;
use crate::exit::{INTERRUPTED, Quiet};
use crate::progress;

const MEMORY: u64 = 256 << 20;
const ROUNDS: usize = 5;

/// What agents of these isolations take, by the name that was given with each.
pub(crate) async fn measure(
    global: &Global,
    kinds: Vec<(&'static str, Choice)>,
) -> Result<Vec<(&'static str, Measured)>> {
    let client = global.client()?;
    let templates: Vec<Template> = client.get("/v1/templates").await?;
    let base = templates.iter().find(|template| template.name == "base");
    let template = base.or(templates.first()).cloned();
    let template =
        template.context("there is no template to make agents from; `dorm template build base` makes one")?;
    let bench = Bench::new(global, client, template, 1);
    let measured = async {
        let mut measured = Vec::new();
        for (name, kind) in kinds {
            let bar = progress::spinner(format!("measuring {name}"));
            let took = one(&bench, kind).await;
            bar.finish_and_clear();
            let (took, not_from_disk) = took.with_context(|| format!("cannot measure {name}"))?;
            if let Some(why) = not_from_disk {
                eprintln!("warning: {name} does not always come back from disk: {why:#}");
            }
            measured.push((name, took));
        }
        Ok(measured)
    };
    let result = tokio::select! {
        result = measured => result,
        _ = tokio::signal::ctrl_c() => Err(Quiet(INTERRUPTED).into()),
    };
    bench.clean_up().await;
    result
}

/// And what went wrong with going to disk or coming back, if anything did.
async fn one(bench: &Bench, kind: Choice) -> Result<(Measured, Option<Error>)> {
    // The first one also makes what is made once for each template.
    bench.delete(&boot(bench, kind).await?.name).await?;
    let begun = Instant::now();
    let agent = boot(bench, kind).await?;
    let boot = millis(begun);
    let guest = bench.client.guest(&agent.name, Some("root"));
    let (mut execs, mut standbys, mut disks) = (Vec::new(), Vec::new(), Vec::new());
    let mut not_from_disk = None;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        exec::run_true(&guest).await?;
        execs.push(millis(begun));
        standbys.push(woken(bench, &agent, "/pause").await?);
        match woken(bench, &agent, "/hibernate").await {
            Ok(took) => disks.push(took),
            Err(why) => not_from_disk = Some(why),
        }
    }
    bench.delete(&agent.name).await?;
    let measured = Measured {
        boot,
        exec: median(execs).context("it was measured")?,
        wake_from_standby: median(standbys).context("it was measured")?,
        wake_from_disk: median(disks),
    };
    Ok((measured, not_from_disk))
}

/// A new agent that has run a command.
async fn boot(bench: &Bench, kind: Choice) -> Result<Agent> {
    let agent = bench.agent_of(kind, MEMORY).await?;
    exec::run_true(&bench.client.guest(&agent.name, Some("root"))).await?;
    Ok(agent)
}

async fn woken(bench: &Bench, agent: &Agent, asleep: &str) -> Result<f64> {
    bench.ask(&agent.name, asleep).await?;
    let begun = Instant::now();
    bench.ask(&agent.name, "/wake").await?;
    Ok(millis(begun))
}

fn millis(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

fn median(mut of: Vec<f64>) -> Option<f64> {
    of.sort_by(f64::total_cmp);
    of.get(of.len() / 2).copied()
}
