//! `dorm ports` and `dorm url`: what listens in a box, and where it is reached.

use anyhow::Result;
use dorm_server::api::types::{Port, PortUrl};

use crate::cli::Global;
use crate::client::agent_path;
use crate::output::{self, Table};

/// List the ports that something listens on in an agent
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm ports demo --json | jq -r '.[].url'")]
pub(crate) struct ListArgs {
    /// Name or id
    name: String,
}

/// Print the URL of an agent's port
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: xdg-open $(dorm url demo 3000 --token)")]
pub(crate) struct UrlArgs {
    /// Name or id
    name: String,
    port: u16,
    /// A link that opens a port which is not public: whoever has it may use all of the agent's ports
    #[arg(long)]
    token: bool,
}

pub(crate) async fn list(global: &Global, args: ListArgs) -> Result<()> {
    let ports: Vec<Port> = global.client()?.get(&agent_path(&args.name, "/ports")).await?;
    if global.json {
        return output::json(&ports);
    }
    let mut table = Table::new([">PORT", "ADDRESS", "URL"]);
    for port in ports {
        table.row([port.port.to_string(), port.addresses.join(", "), port.url]);
    }
    table.print()
}

pub(crate) async fn url(global: &Global, args: UrlArgs) -> Result<()> {
    let path = agent_path(&args.name, &format!("/ports/{}", args.port));
    let url: PortUrl = global.client()?.get(&path).await?;
    if global.json {
        return output::json(&url);
    }
    output::line(if args.token { url.link } else { url.url })
}
