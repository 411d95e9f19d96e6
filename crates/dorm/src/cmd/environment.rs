//! `dorm environment`: the environment variables that dorm reads.

use anyhow::Result;
use serde_json::json;

use crate::cli::Global;
use crate::{env, output};

/// List the environment variables that dorm reads
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm environment", after_long_help = format!("Example: dorm environment\n\n{}", env::reference()))]
pub(crate) struct Args {}

pub(crate) fn run(global: &Global, _args: Args) -> Result<()> {
    if global.json {
        let all: Vec<_> = env::ALL
            .iter()
            .map(|v| json!({"name": v.name, "what": v.what, "config_key": v.key}))
            .collect();
        return output::json(&all);
    }
    output::bytes(env::reference().as_bytes())
}
