//! `dorm ps`: the processes of a box, or the runs that its guest knows.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::json;

use crate::cli::Global;
use crate::client::guest::Guest;
use crate::client::wire::{Run, StartRequest};
use crate::output::{self, Table, age, short_duration};
use crate::size::Size;

/// Prints /proc in a form that is read below. Needs no more than a shell, so it works in any template. The
/// shell itself is left out by its pid.
const LIST: &str = r#"
read -r up _ < /proc/uptime; echo "U $up"
while IFS=: read -r name _ uid _; do echo "N $uid $name"; done < /etc/passwd
for p in /proc/[0-9]*; do
  [ "$p" = "/proc/$$" ] && continue
  { read -r stat < $p/stat; } 2>/dev/null || continue
  uid=; threads=
  while read -r key value _; do
    case $key in Uid:) uid=$value;; Threads:) threads=$value;; esac
  done 2>/dev/null < $p/status
  echo "P $uid $threads $stat"
  tr '\0\n' '  ' < $p/cmdline
  echo
done"#;

/// The kernel counts process times in these, whatever its own clock.
const TICKS: f64 = 100.0;
const PAGE: u64 = 4096;

/// Show an agent's processes
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm ps demo --runs")]
pub(crate) struct Args {
    /// Name or id
    name: String,
    /// The commands that were started from outside, ended ones whose output is kept included
    #[arg(long)]
    runs: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let guest = client.guest(&args.name, Some("root"));
    if args.runs {
        runs(global, &guest).await
    } else {
        processes(global, &guest).await
    }
}

async fn runs(global: &Global, guest: &Guest<'_>) -> Result<()> {
    let runs = guest.runs(true).await?;
    if global.json {
        let runs: Vec<_> = runs.iter().map(run_json).collect();
        return output::json(&runs);
    }
    let mut table = Table::new(["RUN", ">PID", "USER", "STATE", ">AGE", ">OUTPUT", "COMMAND"]);
    for run in runs {
        table.row([
            run.run_id.clone(),
            run.pid.to_string(),
            run.user.clone(),
            state(&run),
            age(run.started_ms),
            Size(run.output_bytes as u64).to_string(),
            command(&run),
        ]);
    }
    table.print()
}

fn command(run: &Run) -> String {
    let mut words = vec![run.config.cmd.as_str()];
    words.extend(run.config.args.iter().map(String::as_str));
    words.join(" ").replace('\n', " ")
}

fn state(run: &Run) -> String {
    match (run.ended, run.timed_out, run.signal, run.exit_code) {
        (false, ..) if run.keeps_awake == Some(false) => "running, a service".to_owned(),
        (false, ..) => "running".to_owned(),
        (true, true, ..) => "timed out".to_owned(),
        (true, false, 0, code) => format!("exit {}", code.unwrap_or_default()),
        (true, false, signal, _) => format!("signal {signal}"),
    }
}

fn run_json(run: &Run) -> serde_json::Value {
    json!({
        "run": run.run_id, "pid": run.pid, "user": run.user, "command": run.config.cmd, "args": run.config.args,
        "started": run.started_ms, "ended": run.ended, "exit_code": run.exit_code, "timed_out": run.timed_out,
        "signal": (run.signal > 0).then_some(run.signal), "output_bytes": run.output_bytes,
        "keeps_awake": run.keeps_awake,
    })
}

async fn processes(global: &Global, guest: &Guest<'_>) -> Result<()> {
    let (stdout, stderr, end) = guest.run(&StartRequest::command("/bin/sh", ["-c", LIST])).await?;
    ensure!(
        end.code() == 0,
        "the box's processes cannot be listed: {}",
        String::from_utf8_lossy(&stderr).trim()
    );
    let found = parse(&String::from_utf8_lossy(&stdout));
    if global.json {
        return output::json(&found);
    }
    let mut table = Table::new([
        "USER", ">PID", ">PPID", "S", ">THREADS", ">CPU", ">RSS", ">AGE", "COMMAND",
    ]);
    for process in found {
        table.row([
            process.user,
            process.pid.to_string(),
            process.ppid.to_string(),
            process.state,
            process.threads.to_string(),
            format!("{:.1}s", process.cpu_seconds),
            Size(process.rss).to_string(),
            short_duration(process.age_seconds as i64),
            process.command,
        ]);
    }
    table.print()
}

#[derive(Debug, PartialEq, Serialize)]
struct Process {
    user: String,
    pid: u32,
    ppid: u32,
    state: String,
    threads: u32,
    cpu_seconds: f64,
    rss: u64,
    age_seconds: f64,
    command: String,
}

/// Reads what [`LIST`] printed. A process that ended in between is left out.
fn parse(text: &str) -> Vec<Process> {
    let mut uptime = 0.0;
    let mut users: HashMap<&str, &str> = HashMap::new();
    let mut processes = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        match line.split_once(' ') {
            Some(("U", rest)) => uptime = rest.parse().unwrap_or(0.0),
            Some(("N", rest)) => users.extend(rest.split_once(' ')),
            Some(("P", rest)) => {
                let command = lines.next().unwrap_or_default().trim();
                processes.extend(process(rest, command, uptime, &users));
            }
            _ => {}
        }
    }
    processes.sort_by_key(|p: &Process| p.pid);
    processes
}

fn process(line: &str, command: &str, uptime: f64, users: &HashMap<&str, &str>) -> Option<Process> {
    let (head, rest) = line.split_once('(')?;
    // The program's name may hold anything, parentheses too; the last one closes it.
    let (name, rest) = rest.rsplit_once(") ")?;
    let mut head = head.split_whitespace();
    let (uid, threads, pid) = (head.next()?, head.next()?, head.next()?);
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // Numbered as in proc(5), where the state is field 3.
    let field = |n: usize| fields.get(n - 3).and_then(|f| f.parse::<u64>().ok());
    Some(Process {
        user: users.get(uid).map_or(uid, |name| name).to_owned(),
        pid: pid.parse().ok()?,
        ppid: field(4)? as u32,
        state: fields.first()?.to_string(),
        threads: threads.parse().ok()?,
        cpu_seconds: (field(14)? + field(15)?) as f64 / TICKS,
        rss: field(24)? * PAGE,
        age_seconds: (uptime - field(22)? as f64 / TICKS).max(0.0),
        command: if command.is_empty() {
            format!("[{name}]")
        } else {
            command.to_owned()
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listing_script_lists_this_very_process() {
        let script = std::process::Command::new("/bin/sh")
            .args(["-c", LIST])
            .output()
            .unwrap();
        let found = parse(&String::from_utf8_lossy(&script.stdout));
        let own = found
            .iter()
            .find(|p| p.pid == std::process::id())
            .expect("this process is listed");
        assert!(own.rss > 0 && own.threads > 0 && own.ppid > 0 && !own.command.is_empty());
    }

    #[test]
    fn a_program_may_be_called_what_it_likes() {
        let stat = "7 (a) R (b) S 1 7 7 0 -1 4194304 0 0 0 0 150 50 0 0 20 0 1 0 1000 0 25 0";
        let found = parse(&format!("U 20.0\nN 1000 user\nP 1000 3 {stat}\n\n"));
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].user.as_str(), found[0].command.as_str()),
            ("user", "[a) R (b]")
        );
        assert_eq!(
            (found[0].cpu_seconds, found[0].age_seconds, found[0].rss),
            (2.0, 10.0, 25 * PAGE)
        );
    }
}
