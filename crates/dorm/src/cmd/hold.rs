//! `dorm hold`, `dorm holds`, `dorm unhold`: keep agents from going to sleep by themselves.

use anyhow::Result;
use dorm_server::api::types::{Hold, NewHold};
use serde_json::json;

use super::{each, parse_time};
use crate::cli::Global;
use crate::client::{agent_path, encode};
use crate::output::{self, Table, time};

/// Keep an agent from going to sleep by itself, for a time
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm hold demo --for 1h --reason 'the customer looks at it'")]
pub(crate) struct HoldArgs {
    /// Name or id
    name: String,
    /// As 90, 90s, 15m, 1h or 2d
    #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
    time: f64,
    /// Shown by `dorm why`
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

pub(crate) async fn hold(global: &Global, args: HoldArgs) -> Result<()> {
    let request = NewHold {
        seconds: args.time,
        reason: args.reason,
    };
    let hold: Hold = global
        .client()?
        .post(&agent_path(&args.name, "/holds"), &request)
        .await?;
    if global.json {
        return output::json(&hold);
    }
    output::line(format!(
        "{} is held until {} ({})",
        hold.agent,
        time(hold.until),
        hold.id
    ))
}

/// List what keeps agents from going to sleep
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm holds demo")]
pub(crate) struct HoldsArgs {
    /// Name or id; all agents if absent
    name: Option<String>,
}

pub(crate) async fn holds(global: &Global, args: HoldsArgs) -> Result<()> {
    let path = args
        .name
        .map_or("/v1/holds".to_owned(), |name| agent_path(&name, "/holds"));
    let holds: Vec<Hold> = global.client()?.get(&path).await?;
    if global.json {
        return output::json(&holds);
    }
    let mut table = Table::new(["AGENT", "UNTIL", "ID", "REASON"]);
    for hold in holds {
        table.row([hold.agent, time(hold.until), hold.id.to_string(), hold.reason]);
    }
    table.print()
}

/// Let agents go to sleep again
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm unhold demo")]
pub(crate) struct UnholdArgs {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
    /// This hold only
    #[arg(long, value_name = "HOLD")]
    id: Option<String>,
}

pub(crate) async fn unhold(global: &Global, args: UnholdArgs) -> Result<()> {
    let client = global.client()?;
    let rest = args
        .id
        .map_or("/holds".to_owned(), |id| format!("/holds/{}", encode(id)));
    each(&args.names, global.json, async |name| {
        client.delete(&agent_path(name, &rest)).await?;
        Ok(json!({ "name": name }))
    })
    .await
}
