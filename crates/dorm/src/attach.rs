//! A local terminal or script attached to a run: output out, input in, signals and window size along.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};

use crate::client::guest::{Guest, Look};
use crate::client::process::Events;
use crate::client::wire::{Data, End, Event, Selector, Started};
use crate::exit::{BROKEN_PIPE, Exit, Failure, INTERRUPTED, Quiet};
use crate::{output, terminal};

const SIGPIPE: i32 = 13;
const INPUT_CHUNK: usize = 64 << 10;
/// What Ctrl-D sends.
const END_OF_INPUT: &[u8] = &[4];
/// How long a lost connection is tried again. A daemon that puts much memory to disk takes up to nine minutes to end, and the next is back
/// soon after.
const REATTACH_FOR: Duration = Duration::from_secs(600);
/// Between two tries, at first; doubled each time.
const AGAIN: Duration = Duration::from_millis(200);
const AT_LAST: Duration = Duration::from_secs(2);
/// How long nobody needs to be told that.
const SOON: Duration = Duration::from_secs(3);
const TWICE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    None,
    Stdin,
    Pty,
}

/// How the attached side is set up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) input: Input,
    /// The run has a terminal: it gets the window size.
    pub(crate) pty: bool,
    /// Keep the output to print it as JSON at the end.
    pub(crate) json: bool,
}

/// Waits for the run to begin. An error before that means that nothing was started.
pub(crate) async fn begin(events: &mut Events) -> Result<Started> {
    while let Some(event) = events.next().await? {
        if let Event::Start(started) = event {
            return Ok(started);
        }
    }
    anyhow::bail!("the guest did not start the command")
}

/// As [`begin`], for a new command: what the guest did not find or may not run is the command.
pub(crate) async fn begin_command(events: &mut Events) -> Result<Started> {
    begin(events).await.map_err(|e| match e.downcast::<Failure>() {
        Ok(failure) => match failure.exit() {
            Exit::NotFound => failure.with_exit(Exit::NoCommand).into(),
            Exit::Denied => failure.with_exit(Exit::NotExecutable).into(),
            _ => failure.into(),
        },
        Err(e) => e,
    })
}

/// Stays with the run until its end, and returns it. An end of this side alone is an error.
pub(crate) async fn follow(
    guest: &Guest<'_>,
    agent: &str,
    started: Started,
    events: Events,
    options: Options,
) -> Result<End> {
    let run = Selector::RunId(started.run_id.clone());
    let mut sink = Sink::new(options.json);
    let end = {
        let output = pump_output(guest, &run, events, &mut sink);
        let input = pump_input(guest, &run, options.input);
        let signals = pump_signals(guest, &run, options.pty);
        tokio::pin!(output, input, signals);
        let mut input_open = true;
        loop {
            tokio::select! {
                end = &mut output => break end,
                result = &mut input, if input_open => {
                    input_open = false;
                    result?;
                }
                result = &mut signals => {
                    result?;
                    eprintln!("detached; the run goes on: dorm logs {agent} {}", started.run_id);
                    return Err(Quiet(INTERRUPTED).into());
                }
            }
        }
    };
    let end = match end {
        Err(e) if e.downcast_ref::<Quiet>().is_some_and(|q| q.0 == BROKEN_PIPE.0) => {
            // What the command would have met, had it written to the pipe itself.
            let _ = tokio::time::timeout(TWICE, guest.signal(&run, SIGPIPE)).await;
            return Err(e);
        }
        end => end?,
    };
    if options.json {
        sink.print(&started, &end)?;
    }
    Ok(end)
}

/// Takes the run's output until its end, and passes nothing on to it.
pub(crate) async fn watch(guest: &Guest<'_>, started: Started, events: Events, json: bool) -> Result<End> {
    let mut sink = Sink::new(json);
    let end = pump_output(guest, &Selector::RunId(started.run_id.clone()), events, &mut sink).await?;
    if json {
        sink.print(&started, &end)?;
    }
    Ok(end)
}

async fn pump_output(guest: &Guest<'_>, run: &Selector, mut events: Events, sink: &mut Sink) -> Result<End> {
    let mut offset = 0;
    loop {
        match events.next().await {
            Ok(Some(Event::Data(data))) => {
                offset = data.end_offset().max(offset);
                sink.take(data).await?;
            }
            Ok(Some(Event::End(end))) => return Ok(end),
            Ok(Some(_)) => {}
            Ok(None) => anyhow::bail!("the guest did not say how the command ended"),
            Err(e) if lost(&e) => events = reattach(guest, run, offset, e).await?,
            Err(e) => return Err(e),
        }
    }
}

fn lost(error: &anyhow::Error) -> bool {
    has_exit(error, &[Exit::Unreachable])
}

fn has_exit(error: &anyhow::Error, exits: &[Exit]) -> bool {
    let failure = error.downcast_ref::<Failure>();
    failure.is_some_and(|failure| exits.contains(&failure.exit()))
}

/// The run outlives the connection; a daemon that comes back leads to it again.
/// An agent that was put to sleep on purpose is not woken for that: the run goes on when it is. One that was stopped is not started.
async fn reattach(guest: &Guest<'_>, run: &Selector, offset: u64, error: anyhow::Error) -> Result<Events> {
    let (mut since, mut pause) = (Instant::now(), AGAIN);
    let (mut told_asleep, mut told_lost) = (false, false);
    loop {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(AT_LAST);
        let again = match guest.look().await {
            Ok(Look::Up) => attach(guest, run, offset).await,
            Ok(Look::Waiting(agent)) => {
                if agent.asleep && !std::mem::replace(&mut told_asleep, true) {
                    eprintln!("the agent is {}; the run goes on when it wakes", agent.state);
                }
                agent.changes().await;
                (since, pause) = (Instant::now(), AGAIN);
                continue;
            }
            Ok(Look::Lost(how)) => {
                eprintln!("the agent is {}", output::printable(&how));
                return Err(error);
            }
            Err(e) => Err(e),
        };
        match again {
            Ok(events) => return Ok(events),
            Err(e)
                if has_exit(&e, &[Exit::Unreachable, Exit::Unavailable])
                    && since.elapsed() < REATTACH_FOR =>
            {
                if since.elapsed() > SOON && !std::mem::replace(&mut told_lost, true) {
                    let why = match lost(&e) {
                        true => "the daemon cannot be reached".to_owned(),
                        false => output::printable(&e.to_string()).into_owned(),
                    };
                    eprintln!("{why}; waiting until it is back, with the run");
                }
            }
            // The first error says what happened; a run that is not found any more went with its box.
            Err(_) => return Err(error),
        }
    }
}

/// The run's events from there on. That there is no such run is told within the stream.
async fn attach(guest: &Guest<'_>, run: &Selector, offset: u64) -> Result<Events> {
    let mut events = guest.attach(run, offset).await?;
    begin(&mut events).await?;
    Ok(events)
}

async fn pump_input(guest: &Guest<'_>, run: &Selector, input: Input) -> Result<()> {
    if input == Input::None {
        return Ok(());
    }
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; INPUT_CHUNK];
    let mut feed = Feed {
        guest,
        run,
        input,
        offset: Some(0),
    };
    loop {
        let read = stdin.read(&mut buffer).await?;
        match feed.pass_on(&buffer[..read]).await {
            Ok(()) if read == 0 => return Ok(()),
            Ok(()) => {}
            // The command has ended or closed its input; the output side knows more.
            Err(e) if has_exit(&e, &[Exit::NotFound, Exit::Conflict]) => return Ok(()),
            Err(e) => return Err(e.context("the command's input was cut off")),
        }
    }
}

/// Input on its way to a run, none of which is lost or sent twice when a connection is.
struct Feed<'a> {
    guest: &'a Guest<'a>,
    run: &'a Selector,
    input: Input,
    /// Bytes that were sent; absent where the guest is too old to be told.
    offset: Option<u64>,
}

impl Feed<'_> {
    /// Nothing stands for the end.
    async fn pass_on(&mut self, data: &[u8]) -> Result<()> {
        loop {
            let Err(error) = self.send(data).await else {
                return Ok(());
            };
            if has_exit(&error, &[Exit::Unimplemented]) && self.offset.take().is_some() {
                continue;
            }
            let again = has_exit(&error, &[Exit::Unreachable, Exit::Unavailable]);
            if !again || (self.offset.is_none() && !data.is_empty()) {
                return Err(error);
            }
            tokio::time::sleep(TWICE).await;
            loop {
                match self.guest.look().await {
                    // What is typed wakes an agent that was put to sleep; what merely flows does not.
                    Ok(Look::Waiting(agent)) if self.input != Input::Pty || !agent.asleep => {
                        agent.changes().await;
                    }
                    Ok(Look::Lost(_)) => return Err(Failure::new(Exit::NotFound, "the box is gone").into()),
                    Ok(Look::Up | Look::Waiting(_)) | Err(_) => break,
                }
            }
        }
    }

    async fn send(&mut self, data: &[u8]) -> Result<()> {
        let pty = self.input == Input::Pty;
        let data = match (data.is_empty(), pty) {
            (true, false) => return self.guest.close_stdin(self.run).await,
            (true, true) => END_OF_INPUT,
            (false, _) => data,
        };
        let Some(offset) = self.offset else {
            return self.guest.send_input(self.run, data, pty).await;
        };
        self.guest.feed_input(self.run, data, pty, offset).await?;
        self.offset = Some(offset + data.len() as u64);
        Ok(())
    }
}

/// Returns when the user wants to go without the run: at a second Ctrl-C within a second.
async fn pump_signals(guest: &Guest<'_>, run: &Selector, pty: bool) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut quit = signal(SignalKind::quit())?;
    let mut user1 = signal(SignalKind::user_defined1())?;
    let mut user2 = signal(SignalKind::user_defined2())?;
    let mut window = signal(SignalKind::window_change())?;
    let mut last_interrupt: Option<Instant> = None;
    loop {
        let number = tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = hangup.recv() => SignalKind::hangup(),
            _ = quit.recv() => SignalKind::quit(),
            _ = user1.recv() => SignalKind::user_defined1(),
            _ = user2.recv() => SignalKind::user_defined2(),
            _ = window.recv() => SignalKind::window_change(),
        };
        if number == SignalKind::interrupt() {
            if last_interrupt.is_some_and(|last| last.elapsed() < TWICE) {
                return Ok(());
            }
            last_interrupt = Some(Instant::now());
        }
        // A run that has just ended cannot be told; its end is on the way.
        let told = async {
            if !guest.may_hear().await {
                return;
            }
            if number != SignalKind::window_change() {
                let _ = guest.signal(run, number.as_raw_value()).await;
            } else if pty {
                let _ = guest.resize(run, terminal::size()).await;
            }
        };
        tokio::select! {
            () = told => {}
            _ = interrupt.recv(), if last_interrupt.is_some_and(|last| last.elapsed() < TWICE) => return Ok(()),
        }
    }
}

/// Where output goes: to this program's own streams, or kept for JSON.
struct Sink {
    kept: Option<(Vec<u8>, Vec<u8>)>,
    stdout: tokio::io::Stdout,
    stderr: tokio::io::Stderr,
}

impl Sink {
    fn new(keep: bool) -> Self {
        Self {
            kept: keep.then(Default::default),
            stdout: tokio::io::stdout(),
            stderr: tokio::io::stderr(),
        }
    }

    async fn take(&mut self, data: Data) -> Result<()> {
        let stdout = data.stdout.or(data.pty).unwrap_or_default().0;
        let stderr = data.stderr.unwrap_or_default().0;
        if let Some((out, err)) = &mut self.kept {
            out.extend(stdout);
            err.extend(stderr);
            return Ok(());
        }
        let write = async {
            if !stdout.is_empty() {
                self.stdout.write_all(&stdout).await?;
                self.stdout.flush().await?;
            }
            if !stderr.is_empty() {
                self.stderr.write_all(&stderr).await?;
                self.stderr.flush().await?;
            }
            Ok(())
        };
        write.await.map_err(output::stdout_error)
    }

    fn print(self, started: &Started, end: &End) -> Result<()> {
        let (stdout, stderr) = self.kept.unwrap_or_default();
        let mut value = json!({
            "run": started.run_id, "exit_code": end.code(), "status": end.status,
            "signal": (end.signal > 0).then_some(end.signal), "timed_out": end.timed_out,
        });
        for (name, data) in [("stdout", stdout), ("stderr", stderr)] {
            match String::from_utf8(data) {
                Ok(text) => value[name] = text.into(),
                Err(e) => {
                    value[format!("{name}_base64")] = json!(crate::client::wire::Base64(e.into_bytes()))
                }
            }
        }
        output::json(&value)
    }
}
