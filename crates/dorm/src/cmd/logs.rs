//! `dorm logs`: what the guest of a box logged, or what a detached run printed.

use anyhow::Result;
use futures_util::StreamExt;

use super::exec;
use crate::attach::{self, Input};
use crate::cli::Global;
use crate::client::guest::{Guest, chunks};
use crate::client::wire::{Event, Selector, StartRequest};
use crate::exit::{Exit, Failure, Quiet};
use crate::output;

const GUEST_LOG: &str = "/var/log/dorm/guest.log";

/// Show a detached run's output, or the log of the agent's guest
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm logs demo            the guest's log
         dorm logs demo RUN -f     a run of `dorm exec -d`, to its end")]
pub(crate) struct Args {
    /// Name or id
    name: String,
    /// As `dorm exec -d` printed it, or a pid of `dorm ps --runs`
    run: Option<String>,
    /// Go on with what comes
    #[arg(long, short)]
    follow: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let guest = client.guest(&args.name, Some("root"));
    match (args.run, args.follow) {
        (None, false) => {
            let mut body = Box::pin(chunks(guest.download(GUEST_LOG).await?.into_body()));
            while let Some(chunk) = body.next().await {
                output::bytes(&chunk?)?;
            }
            Ok(())
        }
        (None, true) => {
            let tail = StartRequest::command("tail", ["-n", "+1", "-F", GUEST_LOG]);
            exec::attached(global, &client, &args.name, Some("root"), tail, Input::None).await
        }
        (Some(run), true) => attached(global, &guest, &args.name, &run).await,
        (Some(run), false) => kept(&guest, &run).await,
    }
}

/// Follows the run to its end and leaves with its exit code. Ctrl-C ends the following, not the run.
async fn attached(global: &Global, guest: &Guest<'_>, name: &str, run: &str) -> Result<()> {
    let mut events = guest.attach(&Selector::from(run), 0).await?;
    let started = attach::begin(&mut events).await?;
    let end = tokio::select! {
        end = attach::watch(guest, started, events, global.json) => end?,
        _ = tokio::signal::ctrl_c() => {
            eprintln!("the run goes on: dorm logs {name} {run} -f");
            return Err(Quiet(crate::exit::INTERRUPTED).into());
        }
    };
    match end.code() {
        0 => Ok(()),
        code => Err(Quiet(code).into()),
    }
}

/// What the run has printed until now.
async fn kept(guest: &Guest<'_>, run: &str) -> Result<()> {
    let known = guest
        .runs(true)
        .await?
        .into_iter()
        .find(|r| r.run_id == run || r.pid.to_string() == run);
    let known = known.ok_or_else(|| {
        Failure::new(Exit::NotFound, format!("there is no run {run}")).hint("see `dorm ps NAME --runs`")
    })?;
    let until = known.output_bytes as u64;
    let mut events = guest.attach(&Selector::RunId(known.run_id), 0).await?;
    let mut offset = 0;
    while offset < until || known.ended {
        match events.next().await? {
            Some(Event::Data(data)) => {
                offset = data.end_offset();
                let stderr = data.stderr.unwrap_or_default().0;
                output::bytes(&data.stdout.or(data.pty).unwrap_or_default().0)?;
                if !stderr.is_empty() {
                    std::io::Write::write_all(&mut std::io::stderr(), &stderr)?;
                }
            }
            Some(Event::End(_)) | None => break,
            Some(_) => {}
        }
    }
    Ok(())
}
