//! `dorm template ls`: lists templates.

use anyhow::Result;
use dorm_server::api::types::Template;

use crate::cli::Global;
use crate::output::{self, Table, age};
use crate::size::Size;

/// List templates
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm template ls")]
pub(crate) struct Args {}

pub(crate) async fn run(global: &Global, _args: Args) -> Result<()> {
    let templates: Vec<Template> = global.client()?.get("/v1/templates").await?;
    if global.json {
        return output::json(&templates);
    }
    let mut table = Table::new(["NAME", "ID", ">SIZE", ">AGENTS", "USER", ">AGE", "FROM"]);
    for template in templates {
        table.row([
            template.name,
            template.id.to_string(),
            Size(template.size).to_string(),
            template.agents.to_string(),
            template.user.unwrap_or_else(|| "root".to_owned()),
            age(template.created),
            if template.recipe_hash.is_some() {
                "recipe"
            } else {
                "import"
            }
            .to_owned(),
        ]);
    }
    table.print()
}
