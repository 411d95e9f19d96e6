//! The benchmark, scaled down: that every figure is there, not what it is.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{self, Server, Skip};

harness::tests![
    sleep_snapshots_forks_and_crowds_are_measured_and_leave_nothing,
    every_engine_is_measured_beside_what_it_is_made_of,
    a_benchmark_that_is_interrupted_leaves_nothing,
    what_cannot_be_measured_is_refused,
];

/// With CRIU, which the tests need anyway.
const MEASURED: &[&str] = &[
    "exec of true, between pauses",
    "pause",
    "wake from standby + exec of true",
    "host: freeze",
    "host: thaw + fork + exec of true",
    "hibernate, 100 MiB",
    "wake from disk, 100 MiB",
    "wake from disk + exec of true, 100 MiB",
    "wake from disk, 100 MiB, not in page cache",
    "criu restore, 100 MiB",
    "criu restore, 100 MiB, not in page cache",
    "plain read of the image's memory, 100 MiB",
    "live snapshot, 100 MiB",
    "agent held still by it",
    "criu dump, 100 MiB",
    "files-only snapshot, home of 50 MiB",
    "files-only snapshot, large home",
    "files-only fork, home of 50 MiB",
    "files-only fork, large home",
    "fork with memory, one by one",
    "dorm ls, one agent",
    "dorm ls, all on disk",
    "wake from disk, one agent alone",
    "the same agent, among all on disk",
    "first wake of a fork, few on disk",
    "first wake of another of them each time",
];

/// Which there may be on this machine, or not.
const PEERS: &[&str] = &[
    "podman container checkpoint, 100 MiB",
    "podman container restore, 100 MiB",
    "runsc checkpoint, 100 MiB",
    "runsc restore, 100 MiB",
];

const FIGURES: &[&str] = &[
    "the large home",
    "forks of one agent, with its memory, by one request",
    "time for each",
    "RAM of each",
    "RAM of the agent that they are forks of",
    "disk of each",
    "agents on disk",
    "time to make each",
    "daemon, with all of them",
    "daemon, for each of them",
];

const RATIOS: &[&str] = &[
    "wake from standby + exec against exec",
    "wake from standby + exec against the bare thaw",
    "pause against a bare freeze",
    "wake from disk against criu restore",
    "the same, not in page cache",
    "held still by a live snapshot against criu dump",
    "files-only snapshot of a large home against a small",
    "files-only fork of a large home against a small",
    "wake from disk among many against one alone",
    "hibernate against criu dump",
];

fn row(report: &Value, table: &str, name: &str) -> Result<Value> {
    let rows = report[table].as_array().context("no table")?;
    let found = rows.iter().find(|row| row["name"] == name);
    found
        .cloned()
        .with_context(|| format!("`{name}` is missing in {report:#}"))
}

fn positive(row: &Value, field: &str) -> bool {
    row[field].as_f64().is_some_and(|value| value > 0.0)
}

fn sleep_snapshots_forks_and_crowds_are_measured_and_leave_nothing() -> Result<()> {
    let server = Server::start()?;
    let templates = server.remains.templates();
    let groups = "standby wake peers snapshot homes forks hibernated".split(' ');
    let only = groups.flat_map(|group| ["--only", group]);
    let scaled = "bench --runs 2 --forks 2 --hibernated 4 --home 60M".split(' ');
    let report = server.json(&scaled.chain(only).collect::<Vec<_>>())?;
    let row = |table: &str, name: &str| row(&report, table, name);
    for name in MEASURED {
        let row = row("measurements", name)?;
        for field in ["runs", "p50_ms", "p95_ms", "p99_ms", "max_ms"] {
            ensure!(positive(&row, field), "{field} of {row}");
        }
    }
    for name in PEERS {
        let row = row("measurements", name)?;
        ensure!(positive(&row, "p50_ms") || row["skipped"].is_string(), "{row}");
    }
    for name in FIGURES {
        let row = row("figures", name)?;
        ensure!(row["value"].is_number() && row["unit"].is_string(), "{row}");
    }
    ensure!(row("measurements", "fork with memory, one by one")?["runs"] == 2);
    ensure!(row("figures", "agents on disk")?["value"] == 4.0);
    for name in RATIOS {
        let row = row("ratios", name)?;
        ensure!(positive(&row, "ratio"), "{row}");
    }
    let wish = row("wishes", "wake from disk, 100 MiB")?;
    ensure!(wish["wish_ms"] == 25.0 && wish["reached"].is_boolean(), "{wish}");
    ensure!(
        wish["of_which"].as_array().is_some_and(|parts| parts.len() == 2),
        "{wish}"
    );

    nothing_is_left(&server)?;
    ensure!(server.remains.templates() == templates);
    Ok(())
}

/// Of every engine.
const TIMES: &[&str] = &[
    "create + first exec",
    "exec of true",
    "wake from standby + exec of true",
    "live snapshot",
    "fork that runs",
    "wake from disk, of 256 MiB",
    "wake from disk, of 4 GiB",
];

const SIZES: &[&str] = &[
    "on disk, hibernated",
    "memory of all its processes (PSS), running",
    "the same, in standby",
];

/// Of what they are made of.
const ALONE: &[&str] = &[
    "criu alone: dump, of 256 MiB",
    "criu alone: restore, of 256 MiB",
    "criu alone: restore, of 4 GiB",
    "runsc alone: run of true",
    "runsc alone: checkpoint, of 256 MiB",
    "runsc alone: restore, of 256 MiB",
    "runsc alone: restore, of 4 GiB",
    "QEMU alone: boot until the guest speaks",
    "QEMU alone: save, of 256 MiB",
    "QEMU alone: restore until the guest answers, of 256 MiB",
    "QEMU alone: restore until the guest answers, of 4 GiB",
];

const RATIOS_OF_MACHINES: &[&str] = &[
    "vm: wake from disk against QEMU alone, 256 MiB",
    "vm: wake from disk against QEMU alone, 4 GiB",
    "vm: wake from disk of 4 GiB against 256 MiB",
];

/// Far beyond what it takes in emulation.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

fn every_engine_is_measured_beside_what_it_is_made_of() -> Result<()> {
    if std::env::var_os("DORM_E2E_ALL").is_none() {
        return Err(Skip("it takes minutes; ./scripts/test --all-engines has it".to_owned()).into());
    }
    for engine in ["gvisor", "vm"] {
        if let Some(reason) = harness::engines::missing_for(engine)? {
            return Err(harness::engines::skipped(engine, reason));
        }
    }
    let server = Server::start()?;
    let bench = server.command(&["bench", "--only", "engines", "--runs", "1", "--json"]);
    let output = harness::run_within(PATIENCE, bench, b"")?;
    let report: Value = serde_json::from_str(&output.text()?).with_context(|| format!("no JSON: {output}"))?;
    for engine in ["container", "gvisor", "vm"] {
        for what in TIMES {
            let row = row(&report, "measurements", &format!("{engine}: {what}"))?;
            ensure!(row["runs"] == 1 && positive(&row, "p50_ms"), "{row}");
        }
        for what in SIZES {
            let row = row(&report, "figures", &format!("{engine}: {what}"))?;
            ensure!(positive(&row, "value") && row["unit"] == "MiB", "{row}");
        }
    }
    for name in ALONE {
        let row = row(&report, "measurements", name)?;
        ensure!(positive(&row, "p50_ms"), "{row}");
    }
    for name in RATIOS_OF_MACHINES {
        let row = row(&report, "ratios", name)?;
        ensure!(positive(&row, "ratio"), "{row}");
    }
    nothing_is_left(&server)
}

fn nothing_is_left(server: &Server) -> Result<()> {
    let (names, remains) = (server.names()?, &server.remains);
    ensure!(names.is_empty(), "agents: {names:?}");
    ensure!(remains.homes().is_empty(), "homes: {:?}", remains.homes());
    ensure!(
        remains.snapshots().is_empty(),
        "snapshots: {:?}",
        remains.snapshots()
    );
    ensure!(remains.images().is_empty(), "images: {:?}", remains.images());
    ensure!(remains.boxes().is_empty(), "boxes: {:?}", remains.boxes());
    Ok(())
}

fn a_benchmark_that_is_interrupted_leaves_nothing() -> Result<()> {
    let server = Server::start()?;
    // Once while the first agent is made, once amid its forks.
    for agents in [1, 3] {
        let mut bench = server
            .command(&["bench", "--only", "forks", "--forks", "20"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        harness::eventually("the benchmark makes agents", || {
            Ok((server.names()?.len() >= agents).then_some(()))
        })?;
        kill_process(Pid::from_raw(bench.id() as i32).context("a pid")?, Signal::INT)?;
        ensure!(bench.wait()?.code() == Some(130));
        nothing_is_left(&server)?;
    }
    Ok(())
}

fn what_cannot_be_measured_is_refused() -> Result<()> {
    let server = Server::shared()?;
    let refused =
        |args: &[&str], code, words: &[&str]| server.dorm(&[&["bench"], args].concat())?.refused(code, words);
    refused(&["--only", "nonsense"], 2, &["nonsense", "standby", "hibernated"])?;
    for number in ["--runs", "--forks", "--hibernated"] {
        refused(&[number, "0"], 2, &[number])?;
    }
    refused(&["--forks", "1001"], 2, &["--forks", "1000"])?;
    refused(&["--home", "nonsense"], 2, &["no size"])?;
    refused(&["--home", "50M"], 2, &["larger"])?;
    refused(&["--template", "nonsense"], 3, &["nonsense"])
}
