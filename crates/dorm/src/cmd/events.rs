//! `dorm events`: what happened to agents, and what happens.

use anyhow::Result;
use dorm_server::api::types::Event;

use crate::cli::Global;
use crate::client::{Client, agent_path};
use crate::output::{self, Table, printable, time};

/// Show what happened to an agent, or to all, with reasons
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm events demo --follow")]
pub(crate) struct Args {
    /// Name or id; all agents if absent
    name: Option<String>,
    /// Go on with what happens from now on
    #[arg(long, short)]
    follow: bool,
    /// At most so many of those that are past [default: 100, with --follow 10]
    #[arg(long, short = 'n', value_name = "N")]
    limit: Option<u32>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let path = match &args.name {
        Some(name) => agent_path(name, "/events"),
        None => "/v1/events".to_owned(),
    };
    if args.follow {
        let limit = args.limit.unwrap_or(10);
        return follow(&client, &path, limit, global.json).await;
    }
    let limit = args.limit.unwrap_or(100);
    let events: Vec<Event> = client.get(&format!("{path}?limit={limit}")).await?;
    if global.json {
        return output::json(&events);
    }
    let mut table = Table::new(["TIME", "AGENT", "FROM", "TO", ">TOOK", "REASON"]);
    for event in events {
        table.row([
            time(event.time),
            event.name,
            event.from.unwrap_or_default(),
            event.to,
            event.millis.map(|ms| format!("{ms} ms")).unwrap_or_default(),
            event.reason,
        ]);
    }
    table.print()
}

async fn follow(client: &Client, path: &str, limit: u32, json: bool) -> Result<()> {
    let mut events = client.follow(path, limit).await?;
    while let Some(event) = events.next().await? {
        if json {
            output::json_line(&event)?;
        } else {
            output::line(in_words(&event))?;
        }
    }
    Ok(())
}

fn in_words(event: &Event) -> String {
    let from = event.from.as_deref().unwrap_or("nothing");
    let took = event.millis.map(|ms| format!(" in {ms} ms")).unwrap_or_default();
    let reason = printable(&event.reason);
    format!(
        "{}  {}  {from} -> {}{took}: {reason}",
        time(event.time),
        event.name,
        event.to
    )
}
