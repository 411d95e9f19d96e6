//! `dorm completions`: scripts that complete dorm's command line.

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::{cli, output};

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm completions bash > /etc/bash_completion.d/dorm")]
pub(crate) struct Args {
    shell: Shell,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli::Cli::command(), "dorm", &mut script);
    output::bytes(&script)
}
