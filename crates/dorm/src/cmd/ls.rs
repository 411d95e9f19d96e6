//! `dorm ls`: lists agents.

use anyhow::Result;
use dorm_server::api::types::{Agent, Lifetime};

use crate::cli::Global;
use crate::output::{self, Table, age};
use crate::size::Size;

/// List agents
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "list",
    after_help = "Example: dorm ls --quiet | xargs dorm stop"
)]
pub(crate) struct Args {
    /// Names only
    #[arg(long, short)]
    quiet: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let agents: Vec<Agent> = global.client()?.get("/v1/agents").await?;
    if global.json {
        return output::json(&agents);
    }
    if args.quiet {
        return agents.iter().try_for_each(|a| output::line(&a.name));
    }
    let mut table = Table::new([
        "NAME", "STATE", ">FOR", "TEMPLATE", ">CPUS", ">MEMORY", ">DISK", ">AGE", "NOTE",
    ]);
    for agent in agents {
        let note = match (agent.state.as_str(), agent.lifetime) {
            ("failed", _) => agent.reason,
            (_, Lifetime::Ephemeral) => "ephemeral".to_owned(),
            (_, Lifetime::Persistent) => String::new(),
        };
        table.row([
            agent.name,
            agent.state,
            age(agent.since),
            agent.template,
            agent.cpus.to_string(),
            Size(agent.memory).to_string(),
            Size(agent.disk).to_string(),
            age(agent.created),
            note,
        ]);
    }
    table.print()
}
