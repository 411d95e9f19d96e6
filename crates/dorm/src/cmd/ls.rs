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
    let path = if args.quiet {
        "/v1/agents"
    } else {
        "/v1/agents?usage=true"
    };
    let agents: Vec<Agent> = global.client()?.get(path).await?;
    if args.quiet && !global.json {
        return agents.iter().try_for_each(|a| output::line(&a.name));
    }
    if global.json {
        return output::json(&agents);
    }
    let mut table = Table::new([
        "NAME", "STATE", ">FOR", ">IDLE", ">RAM", ">DISK", "TEMPLATE", ">AGE", "NOTE",
    ]);
    for agent in agents {
        let note = note(&agent);
        table.row([
            agent.name,
            agent.state,
            age(agent.since),
            agent
                .idle
                .map(|seconds| format!("{seconds:.0}s"))
                .unwrap_or_default(),
            agent
                .memory_used
                .map(|used| Size(used).to_string())
                .unwrap_or_default(),
            agent
                .disk_used
                .map(|used| Size(used).to_string())
                .unwrap_or_default(),
            agent.template,
            age(agent.created),
            note,
        ]);
    }
    table.print()
}

fn note(agent: &Agent) -> String {
    let mut notes = Vec::new();
    if agent.state == "failed" || agent.reason.contains("its memory is lost") {
        notes.push(agent.reason.clone());
    }
    if agent.state == "standby" && agent.durable {
        notes.push("durable".to_owned());
    }
    if agent.keep_awake {
        notes.push("kept awake".to_owned());
    }
    if agent.lifetime == Lifetime::Ephemeral {
        notes.push("ephemeral".to_owned());
    }
    notes.join(", ")
}
