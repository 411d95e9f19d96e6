//! The `base` template, made once for the whole run: by the daemon itself, in a data directory that all others
//! begin as copies of. Between runs the daemon's own template cache keeps it.

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
    eprintln!("building the template `base` (minutes the first time, seconds from the cache)");
    let built = server
        .command(&["template", "build", "base"])
        .stdin(Stdio::null())
        .stdout(Stdio::from(std::io::stderr()))
        .status()?;
    ensure!(
        built.success(),
        "`dorm template build base` failed; the daemon's log:\n{}",
        server.log_text()?
    );
    let code = server.sigterm()?;
    ensure!(code == 0, "the seed's daemon left with {code}");
    Ok(server.data.clone())
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
