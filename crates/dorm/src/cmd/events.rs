//! `dorm events`: what happened to an agent.

use anyhow::Result;
use dorm_server::api::types::Event;

use crate::cli::Global;
use crate::client::agent_path;
use crate::output::{self, Table, time};

/// Show what happened to an agent, with reasons
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm events demo")]
pub(crate) struct Args {
    /// Name or id
    name: String,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let events: Vec<Event> = global.client()?.get(&agent_path(&args.name, "/events")).await?;
    if global.json {
        return output::json(&events);
    }
    let mut table = Table::new(["TIME", "FROM", "TO", ">TOOK", "REASON"]);
    for event in events {
        table.row([
            time(event.time),
            event.from.unwrap_or_default(),
            event.to,
            event.millis.map(|ms| format!("{ms} ms")).unwrap_or_default(),
            event.reason,
        ]);
    }
    table.print()
}
