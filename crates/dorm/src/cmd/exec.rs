//! `dorm exec`: runs a command in an agent's box.

use anyhow::Result;
use serde_json::json;

use super::{env_map, parse_env, parse_seconds, stats};
use crate::attach::{self, Input, Options};
use crate::cli::Global;
use crate::client::Client;
use crate::client::wire::{Config, End, Pty, Run, StartRequest};
use crate::exit::Quiet;
use crate::output;
use crate::size::Size;
use crate::terminal::{self, Keys, RawMode};

const SIGKILL: i32 = 9;

/// Run a command in an agent; a stopped agent is started first
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm exec demo -- python3 -c 'print(1 + 1)'
         tar c . | dorm exec -i demo -- tar x -C /srv
         run=$(dorm exec -d demo -- make all); dorm logs demo \"$run\" -f
         dorm exec -d --service demo -- npm run dev")]
pub(crate) struct Args {
    /// Name or id
    name: String,
    /// Pass stdin on
    #[arg(long, short)]
    interactive: bool,
    /// Give the command a terminal
    #[arg(long, short, conflicts_with = "detach")]
    tty: bool,
    /// Do not wait; print the run's id
    #[arg(long, short, conflicts_with = "interactive")]
    detach: bool,
    /// It is a service: the agent may go to sleep while it runs, and it goes on at the next wake
    #[arg(long, requires = "detach")]
    service: bool,
    #[command(flatten)]
    place: Place,
    /// End it after so many seconds, with exit code 124
    #[arg(long, value_name = "S", value_parser = parse_seconds)]
    timeout: Option<f64>,
    /// The command and its arguments; no shell comes between
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Who runs it, and where.
#[derive(Debug, clap::Args)]
pub(crate) struct Place {
    /// As whom [default: the template's user]
    #[arg(long, short, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// In which folder [default: the template's]
    #[arg(long, short, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Environment of this run; a bare NAME takes the value from here
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = parse_env)]
    pub(crate) env: Vec<(String, String)>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let mut command = args.command.into_iter();
    let request = StartRequest {
        process: Config {
            cmd: command.next().unwrap_or_default(),
            args: command.collect(),
            envs: env_map(args.place.env),
            cwd: args.place.workdir,
        },
        pty: args.tty.then(|| Pty {
            size: terminal::size(),
        }),
        stdin: args.interactive,
        keep: args.detach,
        keeps_awake: !args.service,
        timeout_ms: args.timeout.map_or(0, |s| ((s * 1000.0) as u64).max(1)),
    };
    let user = args.place.user.as_deref();
    if args.detach {
        return detach(global, &client, &args.name, user, &request).await;
    }
    let input = match (args.interactive, args.tty) {
        (false, _) => Input::None,
        (true, false) => Input::Stdin,
        (true, true) => Input::Pty,
    };
    attached(global, &client, &args.name, user, request, input).await
}

async fn detach(
    global: &Global,
    client: &Client,
    name: &str,
    user: Option<&str>,
    request: &StartRequest,
) -> Result<()> {
    let guest = client.guest(name, user);
    let mut events = guest.start(request).await?;
    let started = attach::begin_command(&mut events).await?;
    if !request.keeps_awake {
        // Whether it is told or not, the service runs.
        let runs = guest.runs(false).await.unwrap_or_default();
        let unknown = |run: &Run| run.run_id == started.run_id && run.keeps_awake.is_none();
        if runs.iter().any(unknown) {
            eprintln!(
                "warning: {name} runs a guest of an earlier version, which knows no services: this one keeps it awake until \
                 `dorm stop {name}` and a start bring the newer guest"
            );
        }
    }
    if global.json {
        output::json(&json!({"run": started.run_id, "pid": started.pid}))
    } else {
        output::line(started.run_id)
    }
}

/// Starts the run, stays with it, and leaves with its exit code.
pub(crate) async fn attached(
    global: &Global,
    client: &Client,
    name: &str,
    user: Option<&str>,
    mut request: StartRequest,
    input: Input,
) -> Result<()> {
    let guest = client.guest(name, user);
    let pty = request.pty.is_some();
    if pty && let Ok(term) = std::env::var("TERM") {
        request.process.envs.entry("TERM".to_owned()).or_insert(term);
    }
    let mut events = guest.start(&request).await?;
    let started = attach::begin_command(&mut events).await?;
    let options = Options {
        input,
        pty,
        json: global.json,
    };
    let raw = match (pty, input) {
        (false, _) => None,
        (true, Input::Pty) => RawMode::enter(Keys::Pass)?,
        (true, _) => RawMode::enter(Keys::Signal)?,
    };
    let end = attach::follow(&guest, name, started, events, options).await;
    drop(raw);
    let end = end?;
    explain(client, name, &request, &end).await;
    match end.code() {
        0 => Ok(()),
        code => Err(Quiet(code).into()),
    }
}

/// Says on stderr what an exit code alone does not.
async fn explain(client: &Client, name: &str, request: &StartRequest, end: &End) {
    if end.timed_out {
        eprintln!("error: timed out after {} s", request.timeout_ms as f64 / 1000.0);
        return;
    }
    if end.signal != SIGKILL && end.code() != 128 + SIGKILL && !end.oom {
        if let Some(error) = end
            .error
            .as_deref()
            .filter(|_| end.signal == 0 && end.exit_code < 0)
        {
            eprintln!("error: {error}");
        }
        return;
    }
    let Ok(stats) = stats::of(client, name).await else {
        return;
    };
    let count = match stats.oom_kills {
        // Whom a machine's own kernel kills, nobody else counts.
        0 if end.oom => "the process was killed".to_owned(),
        0 => return,
        1 => "1 process was killed since it started".to_owned(),
        n => format!("{n} processes were killed since it started"),
    };
    eprintln!(
        "out of memory: the box has a limit of {}; {count}",
        Size(stats.memory_limit)
    );
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{Cli, Verb};

    fn parse(line: &str) -> super::Args {
        match Cli::try_parse_from(line.split(' ')).unwrap().verb {
            Verb::Exec(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flags_after_the_command_are_the_commands() {
        for line in [
            "dorm exec -i demo -u root -- ls -u --json",
            "dorm exec -u root demo -i ls -u --json",
        ] {
            let args = parse(line);
            assert_eq!(args.command, ["ls", "-u", "--json"], "{line}");
            assert_eq!(
                (args.name.as_str(), args.place.user.as_deref(), args.interactive),
                ("demo", Some("root"), true)
            );
        }
    }

    #[test]
    fn a_detached_run_has_neither_input_nor_terminal() {
        for line in [
            "dorm exec -d -i demo ls",
            "dorm exec -d -t demo ls",
            "dorm exec demo",
            "dorm exec --service demo ls",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
