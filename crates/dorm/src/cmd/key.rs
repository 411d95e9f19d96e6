//! `dorm key`: API keys.

use anyhow::Result;
use dorm_server::api::types::{CreatedKey, Key, NewKey};
use serde_json::json;

use crate::cli::Global;
use crate::client::encode;
use crate::output::{self, Table, age};

/// Make, list and withdraw API keys
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm key create ci")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Make a key and print it, this once
    Create {
        /// To tell it from others
        name: String,
    },
    /// List keys
    Ls,
    /// Withdraw a key
    Rm {
        /// As `dorm key ls` shows it
        id: String,
    },
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    match args.what {
        What::Create { name } => {
            let key: CreatedKey = client.post("/v1/keys", &NewKey { name }).await?;
            if global.json {
                output::json(&key)
            } else {
                output::line(key.secret)
            }
        }
        What::Ls => {
            let keys: Vec<Key> = client.get("/v1/keys").await?;
            if global.json {
                return output::json(&keys);
            }
            let mut table = Table::new(["ID", "NAME", "BEGINS", ">AGE", ">LAST USED"]);
            for key in keys {
                let used = key
                    .last_used
                    .map_or_else(|| "never".to_owned(), |t| format!("{} ago", age(t)));
                table.row([key.id.to_string(), key.name, key.prefix, age(key.created), used]);
            }
            table.print()
        }
        What::Rm { id } => {
            client.delete(&format!("/v1/keys/{}", encode(&id))).await?;
            if global.json {
                output::json(&json!({"id": id, "deleted": true}))
            } else {
                output::line(id)
            }
        }
    }
}
