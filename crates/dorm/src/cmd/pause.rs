//! `dorm pause`: to standby.

use anyhow::Result;
use serde_json::{Value, json};

use super::each;
use crate::cli::Global;
use crate::client::agent_path;
use crate::progress;

/// Put agents to standby: frozen in memory, back at once
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm pause demo")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    each(&args.names, global.json, async |name| {
        let bar = progress::spinner(format!("pausing {name}"));
        let agent = client
            .post::<Value>(&agent_path(name, "/pause"), &json!({}))
            .await;
        bar.finish_and_clear();
        agent
    })
    .await
}
