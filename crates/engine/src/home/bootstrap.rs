//! A Debian root filesystem from nothing, by mmdebstrap.

use std::io;
use std::path::Path;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::{Debian, EngineError, LogSink, Result};

/// Runs mmdebstrap on an empty directory, in mount and pid namespaces of its own that end with it, and with the
/// daemon: nothing of it stays mounted or running.
pub(super) async fn mmdebstrap(target: &Path, debian: &Debian, log: LogSink) -> Result<()> {
    let mut command = Command::new("setpriv");
    command
        .args([
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "mmdebstrap",
        ])
        .args(["--mode=root", "--variant=minbase", "--format=directory"])
        .args([
            "--aptopt=Acquire::Languages \"none\"",
            "--dpkgopt=path-exclude=/usr/share/man/*",
        ])
        .args([
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        ]);
    if !debian.packages.is_empty() {
        command.arg(format!("--include={}", debian.packages.join(",")));
    }
    command
        .arg(&debian.suite)
        .arg(target)
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .map_err(EngineError::io("cannot start mmdebstrap (package mmdebstrap)"))?;
    let mut last = String::new();
    if let Some(stderr) = child.stderr.take() {
        let mut lines = BufReader::new(stderr).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let line = line.trim_end().to_owned();
            if line.starts_with("E:") || last.is_empty() {
                last.clone_from(&line);
            }
            let _ = log.send(line);
        }
    }
    let status = child
        .wait()
        .await
        .map_err(EngineError::io("cannot wait for mmdebstrap"))?;
    if status.success() {
        return Ok(());
    }
    Err(EngineError::io("mmdebstrap could not make the filesystem")(
        io::Error::other(last),
    ))
}
