//! The local terminal: its size, and raw mode that is undone on every way out.

use std::io::{self, IsTerminal};
use std::sync::Mutex;

use rustix::termios::{self, LocalModes, OptionalActions, Termios};

use crate::client::wire::WindowSize;

/// What the terminal was set to before raw mode. Kept here so that a panic hook can reach it too.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// What keys like Ctrl-C do in raw mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keys {
    /// They are bytes like any other.
    Pass,
    /// They become signals to this program, as ever.
    Signal,
}

/// While it lives, the terminal leaves input and output as they are.
pub(crate) struct RawMode(());

impl RawMode {
    /// `None` where stdin is no terminal.
    pub(crate) fn enter(keys: Keys) -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = termios::tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        if keys == Keys::Signal {
            raw.local_modes |= LocalModes::ISIG;
        }
        *lock() = Some(before);
        // What was typed while the run was being started is for the run.
        termios::tcsetattr(io::stdin(), OptionalActions::Drain, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal back as it was found. Does nothing outside of raw mode.
pub(crate) fn restore() {
    if let Some(before) = lock().take() {
        // There is nobody left to tell: the terminal itself has gone if this fails.
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Drain, &before);
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<Termios>> {
    BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Restores the terminal before a panic is printed, from whatever thread it comes.
pub(crate) fn restore_on_panic() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        restore();
        hook(info);
    }));
}

/// Of the first of stdin, stdout and stderr that is a terminal.
pub(crate) fn size() -> WindowSize {
    let found = termios::tcgetwinsize(io::stdin())
        .or_else(|_| termios::tcgetwinsize(io::stdout()))
        .or_else(|_| termios::tcgetwinsize(io::stderr()));
    match found {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => WindowSize {
            cols: size.ws_col,
            rows: size.ws_row,
        },
        _ => WindowSize { cols: 80, rows: 24 },
    }
}
