//! `dorm doctor`: what this machine has of what dorm needs, and what its engines were seen to take.

use anyhow::{Context, Result};
use dorm_engine::doctor::{Check, Measured, Status, check, keep};
use dorm_server::isolation::Choice;

use super::bench::glance;
use crate::cli::Global;
use crate::exit::Quiet;
use crate::output;

/// Check what this machine has of what dorm needs
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: dorm doctor --measure\n\nExit code 1 if something is missing that dorm cannot do without."
)]
pub(crate) struct Args {
    /// Start agents on the daemon that runs, to measure what all isolations that work, or these, take; kept for the next time
    #[arg(long, value_name = "ISOLATION", num_args = 0..)]
    measure: Option<Vec<Choice>>,
}

const ENGINES: [(&str, Choice); 3] = [
    ("container", Choice::Container),
    ("gvisor", Choice::Gvisor),
    ("vm", Choice::Vm),
];

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let data = global.data();
    let looked_at = data.clone();
    let mut checks = tokio::task::spawn_blocking(move || check(&looked_at)).await?;
    if let Some(chosen) = args.measure {
        let works = |name: &str| {
            let mut checks = checks.iter();
            checks.any(|check| check.name == name && check.status == Status::Ok)
        };
        let kinds = ENGINES
            .into_iter()
            .filter(|(name, kind)| works(name) && (chosen.is_empty() || chosen.contains(kind)));
        for (name, measured) in glance::measure(global, kinds.collect()).await? {
            for check in checks.iter_mut().filter(|check| check.name == name) {
                check.measured = Some(measured.clone());
            }
        }
        keep(&data, &checks).with_context(|| format!("cannot keep it in {}", data.display()))?;
    }
    checks.extend(records(global).await);
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

#[derive(serde::Deserialize)]
struct Info {
    #[serde(default)]
    damage: Vec<String>,
}

/// What a daemon that runs says of its records.
async fn records(global: &Global) -> Option<Check> {
    let info: Info = global.client().ok()?.get("/v1/info").await.ok()?;
    let fix = "until these are mended or deleted, nothing is removed from the disk for want of a record";
    Some(Check {
        name: "records".to_owned(),
        status: if info.damage.is_empty() {
            Status::Ok
        } else {
            Status::Warn
        },
        found: match info.damage.is_empty() {
            true => "all can be read".to_owned(),
            false => info.damage.join("; "),
        },
        enables: "what the daemon knows of agents, snapshots, volumes, templates and keys".to_owned(),
        fix: (!info.damage.is_empty()).then(|| fix.to_owned()),
        measured: None,
    })
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
    text.push('\n');
    text += &engines(checks);
    let fixes: Vec<_> = checks.iter().filter_map(|c| Some((c, c.fix.as_ref()?))).collect();
    if !fixes.is_empty() {
        text.push('\n');
    }
    for (check, fix) in fixes {
        text += &format!("{}: {fix}\n", check.name);
    }
    text
}

/// What each engine that works was seen to take.
fn engines(checks: &[Check]) -> String {
    let mut table = output::Table::new(["ISOLATION", "BOOT", "EXEC", "WAKE FROM STANDBY", "FROM DISK"]);
    let mut unknown = false;
    for (name, _) in ENGINES {
        let Some(check) = checks
            .iter()
            .find(|check| check.name == name && check.status == Status::Ok)
        else {
            continue;
        };
        let ms = |of: fn(&Measured) -> Option<f64>| match check.measured.as_ref().and_then(of) {
            Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
            Some(ms) => format!("{ms:.0} ms"),
            None => "-".to_owned(),
        };
        unknown |= check.measured.is_none();
        table.row([
            name.to_owned(),
            ms(|m| Some(m.boot)),
            ms(|m| Some(m.exec)),
            ms(|m| Some(m.wake_from_standby)),
            ms(|m| m.wake_from_disk),
        ]);
    }
    let mut text = table.render();
    if unknown {
        text += "`dorm doctor --measure` fills this in, by a daemon that runs.\n";
    }
    text
}
