//! The unmodified E2B SDKs against a real server. What they are to do is in `sdk/`, in their own languages.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Server};

harness::tests![
    the_python_sdk_creates_finds_pauses_and_kills_sandboxes,
    the_python_sdk_runs_commands_and_terminals,
    the_python_sdk_reads_writes_watches_and_signs_files,
    the_python_sdk_works_with_git,
    the_python_sdk_takes_snapshots_and_forks,
    the_python_sdk_keeps_volumes_and_mounts_them,
    the_asynchronous_python_sdk_does_all_of_it,
    the_javascript_sdk_creates_finds_pauses_and_kills_sandboxes,
    the_javascript_sdk_runs_commands_and_works_with_files,
    sandboxes_their_time_and_their_snapshots_survive_the_daemon,
    the_python_sdk_builds_templates,
    the_asynchronous_python_sdk_builds_templates,
    the_javascript_sdk_builds_templates,
    a_template_is_built_from_an_imported_image,
    a_build_whose_daemon_is_killed_leaves_no_template_and_says_so,
];

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/sdk")
}

/// Where `scripts/setup-sdks` has put the SDKs.
fn sdks() -> Result<PathBuf> {
    let set_up = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup-sdks");
    let output = Command::new(set_up).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

/// Which SDK a script is for.
pub(crate) enum Sdk {
    Python,
    OldPython,
    Node,
}

pub(crate) fn command(sdk: &Sdk, script: &str) -> Result<Command> {
    let sdks = sdks()?;
    let script = scripts().join(script);
    Ok(match sdk {
        Sdk::Python | Sdk::OldPython => {
            let venv = if matches!(sdk, Sdk::Python) { "python" } else { "python-old" };
            let mut command = Command::new(sdks.join(venv).join("bin/python"));
            command.arg("-B").arg(script);
            command
        }
        Sdk::Node => {
            // A module is looked for beside the script that imports it: it lies where the SDK is.
            let copy = sdks.join("node").join(format!("run-{}", std::process::id()));
            std::fs::create_dir_all(&copy)?;
            for entry in std::fs::read_dir(scripts())? {
                let path = entry?.path();
                if path.extension().is_some_and(|extension| extension == "mjs") {
                    std::fs::copy(&path, copy.join(path.file_name().context("a script has a name")?))?;
                }
            }
            let mut command = Command::new(sdks.join("node/program"));
            command.arg(copy.join(script.file_name().context("a script has a name")?));
            command
        }
    })
}

/// Runs a script against the server, which must succeed; gives what it printed.
fn run(server: &Server, sdk: &Sdk, script: &str, args: &[&str]) -> Result<String> {
    let key = std::fs::read_to_string(server.data.join("api-key"))?;
    let mut command = command(sdk, script)?;
    command
        .args(args)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("PYTHONFAULTHANDLER", "1")
        .env("E2B_API_URL", &server.url)
        .env("E2B_SANDBOX_URL", &server.url)
        .env("E2B_VOLUME_API_URL", &server.url)
        .env("E2B_API_KEY", key.trim());
    harness::run(command, b"")?.text()
}

fn python(script: &str) -> Result<()> {
    let server = Server::shared()?;
    run(&server, &Sdk::Python, script, &[]).map(drop)
}

fn node(script: &str) -> Result<()> {
    let server = Server::shared()?;
    run(&server, &Sdk::Node, script, &[]).map(drop)
}

fn the_python_sdk_creates_finds_pauses_and_kills_sandboxes() -> Result<()> {
    python("sandboxes.py")
}

fn the_python_sdk_runs_commands_and_terminals() -> Result<()> {
    python("commands.py")
}

fn the_python_sdk_reads_writes_watches_and_signs_files() -> Result<()> {
    python("files.py")
}

fn the_python_sdk_works_with_git() -> Result<()> {
    python("git.py")
}

fn the_python_sdk_takes_snapshots_and_forks() -> Result<()> {
    python("snapshots.py")
}

fn the_python_sdk_keeps_volumes_and_mounts_them() -> Result<()> {
    python("volumes.py")
}

fn the_asynchronous_python_sdk_does_all_of_it() -> Result<()> {
    python("asynchronous.py")
}

fn the_javascript_sdk_creates_finds_pauses_and_kills_sandboxes() -> Result<()> {
    node("sandboxes.mjs")
}

fn the_javascript_sdk_runs_commands_and_works_with_files() -> Result<()> {
    node("inside.mjs")
}

fn sandboxes_their_time_and_their_snapshots_survive_the_daemon() -> Result<()> {
    let server = Server::start()?;
    let kept = run(&server, &Sdk::Python, "restart.py", &["begin"])?;
    server.kill9()?;
    server.launch(&[])?;
    let kept = run(&server, &Sdk::Python, "restart.py", &["after", kept.trim()])?;
    server.simulate_reboot()?;
    server.launch(&[])?;
    run(&server, &Sdk::Python, "restart.py", &["end", kept.trim()]).map(drop)
}

/// Templates have names that all tests of a server share: these have servers of their own.
fn the_python_sdk_builds_templates() -> Result<()> {
    let server = Server::start()?;
    run(&server, &Sdk::Python, "templates.py", &[]).map(drop)
}

fn the_asynchronous_python_sdk_builds_templates() -> Result<()> {
    let server = Server::start()?;
    run(&server, &Sdk::Python, "templates_async.py", &[]).map(drop)
}

fn the_javascript_sdk_builds_templates() -> Result<()> {
    let server = Server::start()?;
    run(&server, &Sdk::Node, "templates.mjs", &[]).map(drop)
}

fn a_template_is_built_from_an_imported_image() -> Result<()> {
    let server = Server::start()?;
    let programs = ["bash", "chmod", "chown", "cp", "cut", "dirname", "find", "grep", "gzip", "id", "mkdir", "rm", "tar"];
    let image = harness::tar(&harness::rootfs_with(&programs)?)?;
    server.dorm_with_input(&["template", "import", "alpine:3.24", "-"], &image)?.succeeded()?;
    run(&server, &Sdk::Python, "templates_image.py", &[]).map(drop)
}

fn a_build_whose_daemon_is_killed_leaves_no_template_and_says_so() -> Result<()> {
    let server = Server::start()?;
    let builds = run(&server, &Sdk::Python, "templates_restart.py", &["begin"])?;
    server.kill9()?;
    server.launch(&[])?;
    run(&server, &Sdk::Python, "templates_restart.py", &["after", builds.trim()]).map(drop)
}
