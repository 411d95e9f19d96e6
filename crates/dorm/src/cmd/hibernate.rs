//! `dorm hibernate`: to disk.

use anyhow::Result;
use serde_json::{Value, json};

use super::each;
use crate::cli::Global;
use crate::client::agent_path;
use crate::progress;

/// Put agents to disk with their memory; returns when nothing can be lost
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm hibernate demo")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    each(&args.names, global.json, async |name| {
        let bar = progress::spinner(format!("saving {name}"));
        let agent = client
            .post::<Value>(&agent_path(name, "/hibernate"), &json!({}))
            .await;
        bar.finish_and_clear();
        agent
    })
    .await
}
