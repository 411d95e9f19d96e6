//! `dorm set`: changes an agent that there is.

use anyhow::Result;
use dorm_server::api::types::AgentChange;
use dorm_server::isolation::Choice;
use serde_json::Value;

use super::each;
use crate::cli::Global;
use crate::client::agent_path;
use crate::progress;

/// Change agents; their files stay
///
/// For another isolation an agent is stopped, so that what is in its memory is lost, and started again if it ran or slept.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm set demo --isolation vm")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
    /// What stands between the agent and this machine: container, gvisor, vm, or auto
    #[arg(long, value_name = "KIND")]
    isolation: Choice,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let change = AgentChange {
        isolation: Some(args.isolation),
    };
    each(&args.names, global.json, async |name| {
        let bar = progress::spinner(format!("changing {name}"));
        let agent = client.patch::<Value>(&agent_path(name, ""), &change).await;
        bar.finish_and_clear();
        agent
    })
    .await
}
