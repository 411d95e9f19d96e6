//! `dorm pause`: to standby.

use anyhow::Result;

use super::ask_each;
use crate::cli::Global;

/// Put agents to standby: frozen in memory, back at once
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm pause demo")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    ask_each(global, &args.names, "pausing", "pause").await
}
