//! `dorm fork`: running copies of an agent.

use anyhow::Result;
use dorm_server::api::types::{Agent, Fork};

use crate::cli::Global;
use crate::client::agent_path;
use crate::{output, progress};

/// Make running copies of an agent, with its memory
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm fork demo try --count 3")]
pub(crate) struct Args {
    /// Name or id
    name: String,
    /// Name of the copy; of several, NEW-1, NEW-2 and so on
    new: String,
    /// How many
    #[arg(long, value_name = "N")]
    count: Option<u32>,
    /// As it was at this snapshot, by id or label; the newest, where several have the label
    #[arg(long, value_name = "SNAPSHOT")]
    from: Option<String>,
    /// Without the memory
    #[arg(long)]
    files_only: bool,
    /// Leave it to the first use to start them
    #[arg(long)]
    no_start: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let request = Fork {
        name: args.new,
        count: args.count,
        from: args.from,
        files_only: args.files_only,
        start: !args.no_start,
    };
    let bar = progress::spinner(format!("forking {}", args.name));
    let forks: Vec<Agent> = global
        .client()?
        .post(&agent_path(&args.name, "/fork"), &request)
        .await?;
    bar.finish_and_clear();
    if global.json {
        return output::json(&forks);
    }
    for fork in forks {
        output::line(fork.name)?;
    }
    Ok(())
}
