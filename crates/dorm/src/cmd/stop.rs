//! `dorm stop`: stops agents; their homes stay.

use anyhow::Result;
use dorm_server::api::types::{Agent, StopRequest};
use serde_json::Value;

use super::{each, parse_seconds};
use crate::cli::Global;
use crate::client::agent_path;
use crate::progress;

/// Stop agents; their files stay
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm stop demo --grace 30")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    names: Vec<String>,
    /// All that run or sleep
    #[arg(long)]
    all: bool,
    /// Seconds its processes have to end before they are ended [default: the daemon's stop_grace]
    #[arg(long, value_name = "S", value_parser = parse_seconds)]
    grace: Option<f64>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let names = if args.all {
        let agents: Vec<Agent> = client.get("/v1/agents").await?;
        agents
            .into_iter()
            .filter(|a| !matches!(a.state.as_str(), "stopped" | "stopping" | "failed" | "deleting"))
            .map(|a| a.name)
            .collect()
    } else {
        args.names
    };
    each(&names, global.json, async |name| {
        let bar = progress::spinner(format!("stopping {name}"));
        let request = StopRequest { grace: args.grace };
        let agent = client.post::<Value>(&agent_path(name, "/stop"), &request).await;
        bar.finish_and_clear();
        agent
    })
    .await
}
