//! The unmodified E2B SDKs against a real server. What they are to do is in `sdk/`, in their own languages.

use anyhow::{Result, ensure};

use crate::harness::{self, Outside, Sdk, Server, run_script as run};

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
    a_daemon_that_is_killed_fails_the_calls_under_way_and_loses_nothing,
    the_asynchronous_python_sdk_keeps_volumes_and_works_with_git,
    the_javascript_sdk_keeps_volumes_and_secrets,
    secrets_reach_the_sandboxes_whose_environment_names_them,
    the_network_of_a_sandbox_is_what_e2b_means_by_it,
    many_clients_at_once_leave_nothing_behind,
    every_public_method_of_the_sdks_is_exercised_or_named,
    the_python_sdk_builds_templates,
    the_asynchronous_python_sdk_builds_templates,
    the_javascript_sdk_builds_templates,
    a_template_is_built_from_an_imported_image,
    a_build_whose_daemon_is_killed_leaves_no_template_and_says_so,
];

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

fn a_daemon_that_is_killed_fails_the_calls_under_way_and_loses_nothing() -> Result<()> {
    let server = Server::start()?;
    let streaming = server.data.join("streaming");
    let calls = {
        let (server, told) = (server.clone(), streaming.display().to_string());
        std::thread::spawn(move || run(&server, &Sdk::Python, "killed.py", &[&told]))
    };
    harness::eventually("calls are under way", || {
        Ok((streaming.exists() || calls.is_finished()).then_some(()))
    })?;
    server.kill9()?;
    server.launch(&[])?;
    calls.join().map_err(|_| anyhow::anyhow!("the calls panicked"))?.map(drop)
}

fn the_asynchronous_python_sdk_keeps_volumes_and_works_with_git() -> Result<()> {
    python("volumes_async.py")?;
    python("git_async.py")
}

fn the_javascript_sdk_keeps_volumes_and_secrets() -> Result<()> {
    node("resources.mjs")
}

fn secrets_reach_the_sandboxes_whose_environment_names_them() -> Result<()> {
    let server = Server::start()?;
    run(&server, &Sdk::Python, "workspace_secrets.py", &[])?;
    let log = server.log_text()?;
    ensure!(!log.contains("hush") && log.contains("KEY"), "{log}");
    Ok(())
}

fn the_network_of_a_sandbox_is_what_e2b_means_by_it() -> Result<()> {
    let outside = Outside::get()?;
    let (there, other) = (outside.listen(outside.public)?, outside.listen(outside.other)?);
    let server = Server::start()?;
    run(&server, &Sdk::Python, "network.py", &[&there.to_string(), &other.to_string()]).map(drop)
}

/// Two hundred are tried by hand: see docs/performance.md.
fn many_clients_at_once_leave_nothing_behind() -> Result<()> {
    let server = Server::start()?;
    let many = if harness::engines::in_machines() { "4" } else { "20" };
    run(&server, &Sdk::Python, "parallel.py", &[many, "2"])?;
    ensure!(server.json(&["ls"])?.as_array().is_some_and(Vec::is_empty), "{}", server.json(&["ls"])?);
    Ok(())
}

fn every_public_method_of_the_sdks_is_exercised_or_named() -> Result<()> {
    python("coverage.py")
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
