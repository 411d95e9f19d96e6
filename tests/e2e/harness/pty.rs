//! A terminal for the CLI: what a person at a keyboard would type, see and resize.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use super::cli;
use super::wait::eventually;

pub(crate) struct Terminal {
    keyboard: File,
    child: Child,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts a command on a terminal of `rows` and `columns`, as the leader of a session that has it.
    pub(crate) fn start(command: &Command, rows: u16, columns: u16) -> Result<Self> {
        let controller = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        rustix::pty::grantpt(&controller)?;
        rustix::pty::unlockpt(&controller)?;
        let name = rustix::pty::ptsname(&controller, Vec::new())?;
        let user = rustix::fs::open(
            name,
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        set_size(&controller, rows, columns)?;
        let mut session = Command::new("setsid");
        session
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args())
            .env_clear();
        session
            .envs(
                command
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .env("TERM", "xterm");
        let child = session
            .stdin(Stdio::from(user.try_clone()?))
            .stdout(Stdio::from(user.try_clone()?))
            .stderr(Stdio::from(user))
            .spawn()
            .context("cannot start a command on a terminal")?;
        let keyboard = File::from(controller);
        let mut screen = keyboard.try_clone()?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Reading fails once nobody has the other side open any more.
            while let Ok(length @ 1..) = screen.read(&mut buffer) {
                kept.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .extend_from_slice(&buffer[..length]);
            }
        });
        Ok(Self {
            keyboard,
            child,
            seen,
        })
    }

    pub(crate) fn press(&mut self, keys: &str) -> Result<()> {
        Ok(self.keyboard.write_all(keys.as_bytes())?)
    }

    pub(crate) fn screen(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    /// Waits until `text` has appeared.
    pub(crate) fn sees(&self, text: &str) -> Result<()> {
        let shown = || Ok(self.screen().contains(text).then_some(()));
        eventually("a text on the terminal", shown)
            .with_context(|| format!("{text:?} is not in {:?}", self.screen()))
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        set_size(&self.keyboard, rows, columns)
    }

    /// Waits for the command's end and returns its exit code.
    pub(crate) fn end(&mut self) -> Result<i32> {
        cli::wait(&mut self.child, Duration::from_secs(60))
            .with_context(|| format!("seen: {:?}", self.screen()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has ended by itself in every test that passes.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn set_size(terminal: &impl AsFd, rows: u16, columns: u16) -> Result<()> {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}
