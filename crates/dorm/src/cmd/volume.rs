//! `dorm volume`: data that outlives agents.

use anyhow::Result;
use dorm_server::api::types::{NewVolume, Volume};
use serde_json::json;

use super::each;
use crate::cli::Global;
use crate::client::encode;
use crate::output::{self, Table, time};

/// Data that outlives agents: make, list and delete volumes
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm volume create models, then: dorm new demo --volume models:/models")]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Make an empty volume
    Create {
        /// Lowercase letters, digits and hyphens
        name: String,
    },
    /// List volumes, and who mounts them
    Ls,
    /// Delete volumes and what is in them
    Rm {
        /// Names or ids
        #[arg(required = true)]
        names: Vec<String>,
    },
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    match args.verb {
        Verb::Create { name } => {
            let volume: Volume = client.post("/v1/volumes", &NewVolume { name }).await?;
            if global.json {
                return output::json(&volume);
            }
            output::line(volume.id.as_str())
        }
        Verb::Ls => {
            let volumes: Vec<Volume> = client.get("/v1/volumes").await?;
            if global.json {
                return output::json(&volumes);
            }
            let mut table = Table::new(["NAME", "ID", "CREATED", "AGENTS"]);
            for volume in volumes {
                table.row([
                    volume.name,
                    volume.id.to_string(),
                    time(volume.created),
                    volume.agents.join(", "),
                ]);
            }
            table.print()
        }
        Verb::Rm { names } => {
            each(&names, global.json, async |name| {
                client.delete(&format!("/v1/volumes/{}", encode(name))).await?;
                Ok(json!({ "name": name }))
            })
            .await
        }
    }
}
