//! `dorm template rm`: deletes templates. Agents made from them keep their homes.

use anyhow::Result;
use serde_json::json;

use super::path;
use crate::cli::Global;
use crate::cmd::{each, rm::confirm};

/// Delete templates; agents made from them stay
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm template rm tools --yes")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    if !args.yes {
        confirm(&format!("Delete template {}?", args.names.join(", ")))?;
    }
    each(&args.names, global.json, async |name| {
        client.delete(&path(name, "")).await?;
        Ok(json!({"name": name, "deleted": true}))
    })
    .await
}
