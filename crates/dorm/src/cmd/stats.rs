//! `dorm stats`: what agents use now.

use anyhow::Result;
use dorm_server::api::types::{Agent, Stats};

use crate::cli::Global;
use crate::client::{Client, agent_path};
use crate::output::{self, Table};
use crate::size::Size;

/// Show what agents use of their limits
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm stats demo")]
pub(crate) struct Args {
    /// Names or ids; all agents if there are none
    names: Vec<String>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let names = if args.names.is_empty() {
        client
            .get::<Vec<Agent>>("/v1/agents")
            .await?
            .into_iter()
            .map(|a| a.name)
            .collect()
    } else {
        args.names
    };
    let mut all = Vec::new();
    for name in names {
        all.push(of(&client, &name).await?);
    }
    if global.json {
        return output::json(&all);
    }
    let mut table = Table::new([
        "NAME",
        "STATE",
        ">CPU TIME",
        ">CPUS",
        ">MEMORY",
        ">PEAK",
        ">LIMIT",
        ">PIDS",
        ">DISK",
        ">LIMIT",
        "NOTE",
    ]);
    for stats in all {
        table.row([
            stats.name.clone(),
            stats.state.clone(),
            format!("{:.1}s", stats.cpu_seconds),
            stats.cpus.to_string(),
            Size(stats.memory_used).to_string(),
            Size(stats.memory_peak).to_string(),
            Size(stats.memory_limit).to_string(),
            format!("{}/{}", stats.pids, stats.pids_limit),
            Size(stats.disk_used).to_string(),
            Size(stats.disk_limit).to_string(),
            note(&stats),
        ]);
    }
    table.print()
}

pub(crate) async fn of(client: &Client, name: &str) -> Result<Stats> {
    client.get(&agent_path(name, "/stats")).await
}

fn note(stats: &Stats) -> String {
    let mut notes = Vec::new();
    if stats.oom_kills > 0 {
        notes.push(format!("out of memory: {} killed", stats.oom_kills));
    }
    if stats.forks_refused > 0 {
        notes.push(format!("process limit: {} refused", stats.forks_refused));
    }
    notes.join(", ")
}
