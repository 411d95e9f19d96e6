//! Random operations on many agents while the daemon is killed at random, checked against a model.
//!
//! `./scripts/torture --minutes N --seed S`. The same seed gives the same operations, as long as the same
//! things are acknowledged. Every operation and its answer is written to `operations.log` in the work directory,
//! which is kept if anything is wrong. `DORM_E2E_ISOLATION` says how the agents are isolated.

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

mod chaos;
mod client;
#[path = "../harness/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "the tests need other parts of it"
)]
mod harness;
mod inspect;
mod model;
mod operation;
mod plan;
mod random;

use chaos::Torture;

struct Arguments {
    minutes: f64,
    seed: u64,
    agents: usize,
    verbose: bool,
}

fn arguments() -> Result<Option<Arguments>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let mut found = Arguments {
        minutes: 2.0,
        seed: u64::from(now.subsec_nanos()) ^ now.as_secs(),
        agents: 6,
        verbose: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} wants a value"));
        match word.as_str() {
            "--minutes" => found.minutes = value()?.parse().context("--minutes wants a number")?,
            "--seed" => found.seed = value()?.parse().context("--seed wants a number")?,
            "--agents" => found.agents = value()?.parse().context("--agents wants a number")?,
            "--verbose" => found.verbose = true,
            "--list" => return Ok(None),
            "-h" | "--help" => {
                eprintln!("usage: torture [--minutes N] [--seed S] [--agents N] [--verbose]");
                return Ok(None);
            }
            other => bail!("`{other}` is not known; see --help"),
        }
    }
    Ok(Some(found))
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(Some(arguments)) => arguments,
        Ok(None) => return ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::from(2);
        }
    };
    if let Some(code) = harness::engines::nothing_to_run() {
        return code;
    }
    let interrupted = || {
        harness::World::tear_down();
        std::process::exit(130);
    };
    let set_up = ctrlc::set_handler(interrupted).map_err(anyhow::Error::from);
    if let Err(error) = set_up.and_then(|()| harness::World::set_up("dorm-torture-")) {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    eprintln!(
        "torture for {} minutes with --seed {}",
        arguments.minutes, arguments.seed
    );
    let time = Duration::from_secs_f64(arguments.minutes * 60.0);
    let done = Torture::begin(arguments.seed, arguments.agents, arguments.verbose).and_then(|mut torture| {
        let done = torture.run(time).and_then(|()| torture.end());
        done.with_context(|| torture.report())
    });
    match done {
        Ok(summary) => {
            eprintln!("{summary}");
            harness::World::tear_down();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error:?}");
            eprintln!("again with: ./scripts/torture --seed {}", arguments.seed);
            harness::World::keep();
            ExitCode::FAILURE
        }
    }
}
