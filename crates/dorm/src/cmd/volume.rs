//! `dorm volume`: data that outlives agents.

use anyhow::Result;
use dorm_server::api::types::{NewVolume, Volume};
use serde_json::json;

use super::each;
use crate::cli::Global;
use crate::client::encode;
use crate::output::{self, Table, time};
use crate::size::Size;

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
        /// What it may hold, as 20G; as much as a home if absent
        #[arg(long, value_name = "SIZE")]
        size: Option<Size>,
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

fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| Size(bytes).to_string())
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    match args.verb {
        Verb::Create { name, size } => {
            let new = NewVolume {
                name,
                size: size.map(|size| size.0),
            };
            let volume: Volume = client.post("/v1/volumes", &new).await?;
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
            let mut table = Table::new(["NAME", "ID", "USED", "SIZE", "CREATED", "AGENTS"]);
            for volume in volumes {
                table.row([
                    volume.name,
                    volume.id.to_string(),
                    size(volume.used),
                    size(volume.size),
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
