//! Exit codes, and the one error type that carries them to the edge.
//!
//! Commands return [`anyhow::Result`]. Where the exit code matters they put a [`Failure`] into the
//! chain; [`report`] prints what happened, its causes and the next step, and says which code to leave with.

use std::fmt;

use serde_json::json;

use crate::output::printable;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Error,
    Usage,
    NotFound,
    Conflict,
    Unauthorized,
    Unreachable,
    /// The daemon is about to end, or the agent to sleep: it may do it when asked again.
    Unavailable,
    /// By a guest that is older than this program.
    Unimplemented,
    Timeout,
    /// Not to this user in the box.
    Denied,
    /// As shells have it: the command in the box is there, but cannot be run.
    NotExecutable,
    /// As shells have it: there is no such command in the box.
    NoCommand,
}

impl Exit {
    pub(crate) fn code(self) -> i32 {
        match self {
            Self::Error | Self::Denied | Self::Unavailable | Self::Unimplemented => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Conflict => 4,
            Self::Unauthorized => 5,
            Self::Unreachable => 6,
            Self::Timeout => 124,
            Self::NotExecutable => 126,
            Self::NoCommand => 127,
        }
    }

    /// From the `code` of an error body, which is a word in dorm's and in Connect's errors alike.
    pub(crate) fn from_code(code: &str) -> Option<Self> {
        Some(match code {
            "not_found" => Self::NotFound,
            "already_exists" | "conflict" | "failed_precondition" | "aborted" => Self::Conflict,
            "unauthorized" => Self::Unauthorized,
            "permission_denied" => Self::Denied,
            "deadline_exceeded" => Self::Timeout,
            "unavailable" => Self::Unavailable,
            "unimplemented" => Self::Unimplemented,
            _ => return None,
        })
    }

    pub(crate) fn from_status(status: http::StatusCode) -> Self {
        match status.as_u16() {
            401 => Self::Unauthorized,
            404 => Self::NotFound,
            409 => Self::Conflict,
            _ => Self::Error,
        }
    }
}

/// Shown below the help of every command.
pub(crate) const REFERENCE: &str = "\
Exit codes:
    0  done
    1  an error
    2  wrong usage
    3  not found
    4  exists already, or does not fit the present state
    5  the API key is missing or wrong
    6  the daemon cannot be reached
  124  timed out
  130  interrupted
exec and shell pass on the command's own exit code, and 128 + N if signal N ended it; they leave with 127
where the box has no such command, and with 126 where it cannot be run.";

/// An error that knows its exit code and, where there is one, the next step.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    message: String,
    hint: Option<String>,
    source: Option<anyhow::Error>,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
            hint: None,
            source: None,
        }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn hint_opt(mut self, hint: Option<String>) -> Self {
        self.hint = hint;
        self
    }

    pub(crate) fn cause(mut self, cause: impl Into<anyhow::Error>) -> Self {
        self.source = Some(cause.into());
        self
    }

    pub(crate) fn with_exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }

    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e.as_ref())
    }
}

/// Leave with this code and print nothing: all there is to say has been said.
#[derive(Debug)]
pub(crate) struct Quiet(pub(crate) i32);

impl fmt::Display for Quiet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit code {}", self.0)
    }
}

impl std::error::Error for Quiet {}

/// As a program that SIGPIPE ends: the reader of the output has gone.
pub(crate) const BROKEN_PIPE: Quiet = Quiet(141);
pub(crate) const INTERRUPTED: i32 = 130;
pub(crate) const TERMINATED: i32 = 143;

/// Prints the error to stderr, once, and returns the exit code.
pub(crate) fn report(error: &anyhow::Error, json: bool) -> i32 {
    let chain: Vec<&(dyn std::error::Error + 'static)> = error.chain().collect();
    if let Some(quiet) = chain.iter().find_map(|e| e.downcast_ref::<Quiet>()) {
        return quiet.0;
    }
    let failure = chain.iter().find_map(|e| e.downcast_ref::<Failure>());
    let code = failure.map_or(Exit::Error, Failure::exit).code();
    let hint = failure.and_then(|f| f.hint.as_deref());
    let mut causes: Vec<String> = Vec::new();
    for cause in chain.iter().skip(1) {
        let text = cause.to_string();
        if causes.last() != Some(&text) && text != error.to_string() {
            causes.push(text);
        }
    }
    if json {
        let body = json!({"error": {
            "exit_code": code, "message": error.to_string(), "causes": causes, "hint": hint,
        }});
        eprintln!("{body}");
    } else {
        eprintln!("error: {}", printable(&error.to_string()));
        for cause in causes {
            eprintln!("cause: {}", printable(&cause));
        }
        if let Some(hint) = hint {
            eprintln!("hint: {}", printable(hint));
        }
    }
    code
}
