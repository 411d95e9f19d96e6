//! Running scripts against a server with E2B's SDKs, which `scripts/setup-sdks` has installed.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::cli;
use super::engines::behind_gvisor;
use super::server::Server;
use super::wait::slowness;
use super::world::World;

/// An example may have ten sessions, in each of which an agent is put to disk, woken, and at work.
const LONGEST: Duration = Duration::from_secs(360);

/// Which SDK a script is for.
pub(crate) enum Sdk {
    Python,
    OldPython,
    Node,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Where the SDKs are.
fn sdks() -> Result<PathBuf> {
    let output = Command::new(repository().join("scripts/setup-sdks")).output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

/// Copies of all scripts for Node, with the SDK beside them: a module is looked for where the script lies that imports it.
fn node_scripts(sdks: &Path) -> Result<&'static Path> {
    static COPIES: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let copy = || {
        let to = World::get().root.join("node");
        std::fs::create_dir(&to)?;
        symlink(sdks.join("node/node_modules"), to.join("node_modules"))?;
        symlink(repository().join("examples/project"), to.join("project"))?;
        for folder in FOLDERS {
            for entry in std::fs::read_dir(repository().join(folder))? {
                let path = entry?.path();
                if path.extension().is_some_and(|kind| kind == "mjs" || kind == "ts") {
                    std::fs::copy(&path, to.join(path.file_name().context("a script has a name")?))?;
                }
            }
        }
        Ok(to)
    };
    let copies = COPIES.get_or_init(|| copy().map_err(|e: anyhow::Error| format!("{e:#}")));
    copies.as_deref().map_err(|e| anyhow::anyhow!("{e}"))
}

/// Where scripts are.
const FOLDERS: [&str; 2] = ["tests/e2e/sdk", "examples"];

/// A program with a script as its first argument, ready to be started.
pub(crate) fn script_command(sdk: &Sdk, script: &str) -> Result<Command> {
    let sdks = sdks()?;
    Ok(match sdk {
        Sdk::Python | Sdk::OldPython => {
            let venv = if matches!(sdk, Sdk::Python) {
                "python"
            } else {
                "python-old"
            };
            let folders = FOLDERS.map(|folder| repository().join(folder).join(script));
            let script = folders.iter().find(|path| path.exists());
            let mut command = Command::new(sdks.join(venv).join("bin/python"));
            command
                .arg("-B")
                .arg(repository().join(FOLDERS[0]).join("run.py"));
            command.arg(script.context("there is no such script")?);
            command
        }
        Sdk::Node => {
            let mut command = Command::new(sdks.join("node/program"));
            command.arg(node_scripts(&sdks)?.join(script));
            command
        }
    })
}

/// Runs a script against the server, which must succeed; gives what it printed.
pub(crate) fn run_script(server: &Server, sdk: &Sdk, script: &str, args: &[&str]) -> Result<String> {
    let key = std::fs::read_to_string(server.data.join("api-key"))?;
    let mut command = script_command(sdk, script)?;
    command
        .args(args)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("PYTHONFAULTHANDLER", "1")
        .env("DORM_E2E_SLOWNESS", slowness().to_string())
        .env("DORM_E2E_SUDO", if behind_gvisor() { "no" } else { "yes" })
        .env("E2B_API_URL", &server.url)
        .env("E2B_SANDBOX_URL", &server.url)
        .env("E2B_VOLUME_API_URL", &server.url)
        .env("E2B_API_KEY", key.trim());
    cli::run_within(LONGEST, command, b"")?.text()
}
