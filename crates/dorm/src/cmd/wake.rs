//! `dorm wake`: from standby, from disk or from files.

use anyhow::Result;

use super::ask_each;
use crate::cli::Global;

/// Wake agents, and wait until they run
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm wake demo")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    ask_each(global, &args.names, "waking", "wake").await
}
