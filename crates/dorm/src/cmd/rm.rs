//! `dorm rm`: deletes agents with their homes.

use std::io::{BufRead, IsTerminal};

use anyhow::Result;
use serde_json::json;

use super::each;
use crate::cli::Global;
use crate::client::agent_path;
use crate::exit::{Exit, Failure, Quiet};
use crate::progress;

/// Delete agents and all their files
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm rm demo --yes")]
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
        confirm(&format!("Delete {} with all files?", args.names.join(", ")))?;
    }
    each(&args.names, global.json, async |name| {
        let bar = progress::spinner(format!("deleting {name}"));
        let deleted = client.delete(&agent_path(name, "")).await;
        bar.finish_and_clear();
        deleted.map(|()| json!({"name": name, "deleted": true}))
    })
    .await
}

/// Asks on the terminal. Where nobody can be asked, it is refused.
pub(crate) fn confirm(question: &str) -> Result<()> {
    if !std::io::stdin().is_terminal() {
        let refused = Failure::new(
            Exit::Usage,
            "this deletes for good, and there is no terminal to ask on",
        );
        return Err(refused.hint("say --yes if it is meant").into());
    }
    eprint!("{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
        Ok(())
    } else {
        Err(Quiet(1).into())
    }
}
