//! `dorm hibernate`: to disk.

use anyhow::Result;

use super::ask_each;
use crate::cli::Global;

/// Put agents to disk with their memory; returns when nothing can be lost
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm hibernate demo")]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    ask_each(global, &args.names, "saving", "hibernate").await
}
