//! `dorm template`: what agents start from.

mod build;
mod import;
mod log;
mod ls;
mod render;
mod rm;

use anyhow::Result;

use crate::cli::Global;
use crate::client::encode;

/// Build, import, list and delete templates
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm template build tools -f recipe.toml")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Build(build::Args),
    Import(import::Args),
    Ls(ls::Args),
    Log(log::Args),
    Rm(rm::Args),
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    match args.what {
        What::Build(args) => build::run(global, args).await,
        What::Import(args) => import::run(global, args).await,
        What::Ls(args) => ls::run(global, args).await,
        What::Log(args) => log::run(global, args).await,
        What::Rm(args) => rm::run(global, args).await,
    }
}

fn path(template: &str, rest: &str) -> String {
    format!("/v1/templates/{}{rest}", encode(template))
}
