//! `dorm start`: starts agents.

use anyhow::Result;

use super::ask_each;
use crate::cli::Global;

/// Start agents, and wait until they run
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm start demo")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    ask_each(global, &args.names, "starting", "start").await
}
