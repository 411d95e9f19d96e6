//! Running the command line as a user would, with a bound on how long it may take.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::server::Server;
use super::wait;

pub(super) const LONGEST: Duration = Duration::from_secs(180);

pub(crate) fn binary() -> PathBuf {
    match std::env::var_os("DORM_BIN") {
        Some(path) => path.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/debug/dorm"),
    }
}

/// What a command printed and how it ended.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    pub(crate) what: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) stderr: String,
    /// As a shell reports it: 128 + N for signal N.
    pub(crate) code: i32,
}

impl Output {
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The output without the newline at its end, of a command that must have succeeded.
    pub(crate) fn text(&self) -> Result<String> {
        self.succeeded()
            .map(|output| output.stdout().trim_end().to_owned())
    }

    pub(crate) fn succeeded(&self) -> Result<&Self> {
        ensure!(self.code == 0, "{self}");
        Ok(self)
    }

    /// Refused with exit code `code` and a message, on stderr, that holds every one of `words`.
    pub(crate) fn refused(&self, code: i32, words: &[&str]) -> Result<()> {
        ensure!(self.code == code, "expected exit code {code}: {self}");
        for word in words {
            ensure!(
                self.stderr.contains(word),
                "`{word}` is missing in the message: {self}"
            );
        }
        Ok(())
    }
}

impl std::fmt::Display for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stdout = self.stdout();
        let start: String = stdout.chars().take(2000).collect();
        write!(
            f,
            "`{}` left with {}\nstdout: {start}\nstderr: {}",
            self.what, self.code, self.stderr
        )
    }
}

impl Server {
    /// A command of the CLI that speaks to this server, ready to be started.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command
            .args(args)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DORM_DATA", &self.data);
        command
    }

    pub(crate) fn dorm(&self, args: &[&str]) -> Result<Output> {
        run(self.command(args), b"")
    }

    pub(crate) fn dorm_with_input(&self, args: &[&str], input: &[u8]) -> Result<Output> {
        run(self.command(args), input)
    }

    /// The answer of a command that must succeed, as JSON.
    pub(crate) fn json(&self, args: &[&str]) -> Result<Value> {
        let output = self.dorm(&[args, &["--json"]].concat())?;
        let text = output.text()?;
        serde_json::from_str(&text).with_context(|| format!("no JSON: {output}"))
    }
}

/// Runs a command to its end, with `input` as its stdin.
pub(crate) fn run(command: Command, input: &[u8]) -> Result<Output> {
    run_within(LONGEST, command, input)
}

/// The same, of one that takes long.
pub(crate) fn run_within(longest: Duration, mut command: Command, input: &[u8]) -> Result<Output> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let what = words.map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {what}"))?;
    let mut stdin = child.stdin.take().context("stdin is piped")?;
    let stdout = child.stdout.take().context("stdout is piped")?;
    let stderr = child.stderr.take().context("stderr is piped")?;
    std::thread::scope(|scope| {
        // A command that does not read its stdin to the end is in its right.
        scope.spawn(move || stdin.write_all(input).ok());
        let stdout = scope.spawn(move || read(stdout));
        let stderr = scope.spawn(move || read(stderr));
        let code = wait(&mut child, longest).with_context(|| format!("{what} did not end"))?;
        let bytes = stdout.join().expect("reading does not panic")?;
        let stderr = String::from_utf8_lossy(&stderr.join().expect("reading does not panic")?).into_owned();
        Ok(Output {
            what,
            bytes,
            stderr,
            code,
        })
    })
}

fn read(mut from: impl Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Waits for the end of a process, and ends it if that takes too long.
pub(crate) fn wait(child: &mut Child, longest: Duration) -> Result<i32> {
    use std::os::unix::process::ExitStatusExt;
    let longest = longest * wait::slowness();
    let until = Instant::now() + longest;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or_default()));
        }
        if Instant::now() > until {
            child.kill()?;
            child.wait()?;
            bail!("it ran for more than {} s", longest.as_secs());
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}
