//! `dorm snapshot`, `dorm snapshots`, `dorm rollback`.

use anyhow::Result;
use dorm_server::api::types::{NewSnapshot, Rollback, RolledBack, Snapshot};

use crate::cli::Global;
use crate::client::{agent_path, encode};
use crate::output::{self, Table, time};
use crate::progress;
use crate::size::Size;

/// Keep an agent as it is now, with its memory, while it goes on
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm snapshot demo --label before-upgrade")]
pub(crate) struct TakeArgs {
    /// Name or id
    name: String,
    /// To find it by
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
    /// Without the memory
    #[arg(long)]
    files_only: bool,
}

pub(crate) async fn take(global: &Global, args: TakeArgs) -> Result<()> {
    let request = NewSnapshot {
        label: args.label,
        files_only: args.files_only,
    };
    let bar = progress::spinner(format!("snapshotting {}", args.name));
    let snapshot: Snapshot = global
        .client()?
        .post(&agent_path(&args.name, "/snapshots"), &request)
        .await?;
    bar.finish_and_clear();
    if global.json {
        return output::json(&snapshot);
    }
    output::line(snapshot.id.as_str())
}

/// List the snapshots of an agent, or delete some
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm snapshots demo --delete before-upgrade")]
pub(crate) struct ListArgs {
    /// Name or id
    name: String,
    /// Delete this one, by id or by a label that no other has
    #[arg(long, value_name = "SNAPSHOT")]
    delete: Vec<String>,
}

pub(crate) async fn list(global: &Global, args: ListArgs) -> Result<()> {
    let client = global.client()?;
    if !args.delete.is_empty() {
        return super::each(&args.delete, global.json, async |snapshot| {
            let path = format!("/snapshots/{}", encode(snapshot));
            client.delete(&agent_path(&args.name, &path)).await?;
            Ok(serde_json::json!({ "snapshot": snapshot }))
        })
        .await;
    }
    let snapshots: Vec<Snapshot> = client.get(&agent_path(&args.name, "/snapshots")).await?;
    if global.json {
        return output::json(&snapshots);
    }
    let mut table = Table::new(["ID", "TIME", "KIND", ">MEMORY", ">FILES", "LABEL", "PARENT"]);
    for snapshot in snapshots {
        table.row([
            snapshot.id.to_string(),
            time(snapshot.made),
            snapshot.kind,
            Size(snapshot.size).to_string(),
            Size(snapshot.files.unwrap_or_default()).to_string(),
            snapshot.label,
            snapshot.parent.map(|id| id.to_string()).unwrap_or_default(),
        ]);
    }
    table.print()
}

/// Bring an agent back to a snapshot; what it is now is kept as another
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm rollback demo before-upgrade")]
pub(crate) struct RollbackArgs {
    /// Name or id
    name: String,
    /// Id or label; the newest, where several have the label
    snapshot: String,
}

pub(crate) async fn rollback(global: &Global, args: RollbackArgs) -> Result<()> {
    let request = Rollback {
        snapshot: args.snapshot,
    };
    let bar = progress::spinner(format!("rolling back {}", args.name));
    let back: RolledBack = global
        .client()?
        .post(&agent_path(&args.name, "/rollback"), &request)
        .await?;
    bar.finish_and_clear();
    if global.json {
        return output::json(&back);
    }
    if let Some(lost) = back.lost {
        eprintln!("warning: {lost}");
    }
    output::line(format!(
        "{} is {}; what it was before is snapshot {}",
        back.agent.name, back.agent.state, back.before.id
    ))
}
