//! The `base` template, made once for the whole run: by the daemon itself, in a data directory that all others
//! begin as copies of. Between runs the daemon's own template cache keeps it, and `workloads` and
//! `code-interpreter-v1` too, which only the servers for them have.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

use anyhow::{Result, ensure};

use super::server::{Options, Server};
use super::world::{command, path};

static SEED: OnceLock<Result<PathBuf, String>> = OnceLock::new();

/// Makes the seed, at the first call.
pub(super) fn ready() -> Result<&'static Path> {
    let made = SEED.get_or_init(|| make().map_err(|e| format!("{e:#}")));
    made.as_deref()
        .map_err(|e| anyhow::anyhow!("the base template cannot be made: {e}"))
}

fn make() -> Result<PathBuf> {
    let server = Server::with(
        "seed",
        &Options {
            bare: true,
            ..Options::default()
        },
    )?;
    build(&server, &["base"])?;
    let code = server.sigterm()?;
    ensure!(code == 0, "the seed's daemon left with {code}");
    Ok(server.data.clone())
}

fn build(server: &Server, what: &[&str]) -> Result<()> {
    eprintln!(
        "building the template `{}` (minutes the first time, seconds from the cache)",
        what[0]
    );
    let built = server
        .command(&[&["template", "build"], what].concat())
        .stdin(Stdio::null())
        .stdout(Stdio::from(std::io::stderr()))
        .status()?;
    ensure!(
        built.success(),
        "`dorm template build {}` failed; the daemon's log:\n{}",
        what.join(" "),
        server.log_text()?
    );
    Ok(())
}

/// A server that has the template `workloads` too.
pub(super) fn workloads() -> Result<Server> {
    let server = Server::with(
        "workloads",
        &Options {
            builds: true,
            ..Options::default()
        },
    )?;
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/harness/workloads.toml");
    build(&server, &["workloads", "-f", path(&recipe)])?;
    Ok(server)
}

/// A server that has the template `code-interpreter-v1` too, by the recipe that comes with dorm.
pub(super) fn code_interpreter() -> Result<Server> {
    let server = Server::with(
        "code",
        &Options {
            builds: true,
            ..Options::default()
        },
    )?;
    build(&server, &["code-interpreter-v1"])?;
    Ok(server)
}

/// Makes the new data directory `data` a copy of the seed, in constant time.
pub(super) fn copy_to(data: &Path) -> Result<()> {
    let seed = ready()?;
    for entry in fs::read_dir(seed)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("dorm.db") || name == "api-key" {
            fs::copy(entry.path(), data.join(&*name))?;
        }
    }
    let templates = data.join("pool/templates");
    fs::create_dir_all(&templates)?;
    for entry in fs::read_dir(seed.join("pool/templates"))? {
        let entry = entry?;
        let copy = templates.join(entry.file_name());
        command(
            "btrfs",
            &["subvolume", "snapshot", "-r", path(&entry.path()), path(&copy)],
        )?;
    }
    Ok(())
}
