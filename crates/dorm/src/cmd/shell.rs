//! `dorm shell`: a login shell in an agent's box.

use std::io::IsTerminal;

use anyhow::Result;

use super::env_map;
use super::exec::{Place, attached};
use crate::attach::Input;
use crate::cli::Global;
use crate::client::wire::{Pty, StartRequest};
use crate::terminal;

/// The user's own shell if the box has it, else the best there is.
const LOGIN: &str =
    r#"for shell in "$SHELL" /bin/bash /bin/sh; do [ -x "$shell" ] && exec "$shell" -l; done"#;

/// Open a shell in an agent; a stopped agent is started first
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm shell demo -u root")]
pub(crate) struct Args {
    /// Name or id
    name: String,
    #[command(flatten)]
    place: Place,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let tty = std::io::stdin().is_terminal();
    let mut request = StartRequest::command("/bin/sh", ["-c", LOGIN]);
    request.process.envs = env_map(args.place.env);
    request.process.cwd = args.place.workdir;
    request.stdin = true;
    request.pty = tty.then(|| Pty {
        size: terminal::size(),
    });
    let input = if tty { Input::Pty } else { Input::Stdin };
    attached(
        global,
        &global.client()?,
        &args.name,
        args.place.user.as_deref(),
        request,
        input,
    )
    .await
}
