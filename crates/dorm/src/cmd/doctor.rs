//! `dorm doctor`: what this machine has of what dorm needs.

use anyhow::Result;
use dorm_engine::doctor::{Check, Status, check};

use crate::cli::Global;
use crate::exit::Quiet;
use crate::output;

/// Check what this machine has of what dorm needs
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: dorm doctor\n\nExit code 1 if something is missing that dorm cannot do without."
)]
pub(crate) struct Args {}

pub(crate) async fn run(global: &Global, _args: Args) -> Result<()> {
    let data = global.data();
    let checks = tokio::task::spawn_blocking(move || check(&data)).await?;
    if global.json {
        output::json(&checks)?;
    } else {
        output::bytes(render(&checks).as_bytes())?;
    }
    if checks.iter().any(|c| c.status == Status::Missing) {
        Err(Quiet(1).into())
    } else {
        Ok(())
    }
}

fn render(checks: &[Check]) -> String {
    let mut table = output::Table::new(["", "WHAT", "FOUND", "ENABLES"]);
    for check in checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Missing => "MISSING",
        };
        table.row([
            mark.to_owned(),
            check.name.clone(),
            check.found.clone(),
            check.enables.clone(),
        ]);
    }
    let mut text = table.render();
    let fixes: Vec<_> = checks.iter().filter_map(|c| Some((c, c.fix.as_ref()?))).collect();
    if !fixes.is_empty() {
        text.push('\n');
    }
    for (check, fix) in fixes {
        text += &format!("{}: {fix}\n", check.name);
    }
    text
}
