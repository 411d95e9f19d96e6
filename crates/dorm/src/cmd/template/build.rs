//! `dorm template build`: makes a template by a recipe.

use std::path::PathBuf;

use anyhow::Result;
use dorm_server::api::types::BuildTemplate;
use http::{Method, header};

use super::{path, render};
use crate::cli::Global;
use crate::client::full;
use crate::exit::{Exit, Failure};
use crate::recipe;

/// Make a template by a recipe; one that is built already is left as it is
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: dorm template build tools -f recipe.toml, where recipe.toml holds

    from = \"base\"                 # or debian:bookworm
    apt = [\"ripgrep\", \"jq\"]
    run = [\"pip install --break-system-packages requests\"]
    user = \"user\"
    start = \"python3 -m http.server 8000\"
    [[files]]
    path = \"/etc/motd\"            # with source = \"FILE\" or content = \"TEXT\"
    content = \"hello\\n\"
    mode = \"0644\"

`dorm template build base` and `dorm template build code-interpreter-v1` need no file: their recipes come with dorm."
)]
pub(crate) struct Args {
    name: String,
    /// The recipe
    #[arg(long, short, value_name = "RECIPE")]
    file: Option<PathBuf>,
    /// Build it again even if nothing has changed
    #[arg(long)]
    force: bool,
    /// Show the build's log while it runs
    #[arg(long, short)]
    verbose: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let recipe = match &args.file {
        Some(file) => recipe::read(file)?,
        None => match recipe::built_in(&args.name) {
            Some(recipe) => recipe?,
            None => {
                let missing = Failure::new(Exit::Usage, format!("there is no recipe for {}", args.name));
                let names: Vec<_> = recipe::built_in_names().collect();
                let hint = format!("name one with -f recipe.toml; {} need none", names.join(" and "));
                return Err(missing.hint(hint).into());
            }
        },
    };
    let client = global.client()?;
    let request = client
        .request(Method::POST, &path(&args.name, "/build"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(full(serde_json::to_vec(&BuildTemplate {
            recipe,
            force: args.force,
        })?))?;
    let response = client.send(request).await?;
    render::follow(response, &args.name, args.verbose, global.json).await
}
