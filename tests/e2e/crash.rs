//! The daemon dies, the machine restarts: what was acknowledged is still there, and nothing else is.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::harness::{self, Options, Server};

harness::tests![
    boxes_outlive_a_killed_daemon_and_are_adopted,
    a_detached_runs_output_is_complete_across_a_killed_daemon,
    a_client_that_waits_for_its_run_survives_a_restart_of_the_daemon,
    a_run_that_ends_while_no_daemon_runs_is_told_to_the_client_that_waits,
    a_client_hears_that_its_stubborn_run_was_killed_by_a_stop,
    limits_hold_in_an_adopted_box,
    a_box_that_ends_while_no_daemon_runs_is_noticed,
    an_adopted_box_is_stopped_and_deleted_like_any_other,
    agents_survive_a_reboot_with_their_files,
    a_pool_in_a_file_is_mounted_again_after_a_reboot,
    an_orderly_end_leaves_boxes_alone_if_so_configured,
    an_orderly_end_stops_boxes_if_so_configured,
    a_second_daemon_on_the_same_data_is_refused_with_the_pid_of_the_first,
    strays_on_the_host_are_swept_at_the_start,
    the_first_key_is_private_and_survives_restarts,
    a_wrong_configuration_is_refused_before_anything_is_touched,
];

fn boxes_outlive_a_killed_daemon_and_are_adopted() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("outlives")?;
    agent.exec_with(&["-d"], &["sleep", "6161"])?.succeeded()?;
    let pid = agent.pid()?;
    server.kill9()?;
    ensure!(fs::exists(format!("/proc/{pid}/exe"))?, "the box went with the daemon");
    server.launch(&[])?;
    ensure!(agent.state()? == "running" && agent.pid()? == pid, "{}", agent.show()?);
    ensure!(agent.sh_text("pgrep -f 'sleep 6161' | wc -l")? != "0", "its processes are gone");
    ensure!(agent.stats()?["pids"].as_u64() >= Some(2));
    Ok(())
}

fn a_detached_runs_output_is_complete_across_a_killed_daemon() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("complete")?;
    let script = "for i in $(seq 0 1999); do printf '%099d\\n' $i; [ $((i % 100)) = 0 ] && sleep 0.05; done; exit 4";
    let run = agent.exec_with(&["-d"], &["bash", "-c", script])?.text()?;
    server.kill9()?;
    server.launch(&[])?;
    let followed = server.dorm(&["logs", "-f", &agent.name, &run])?;
    ensure!(followed.code == 4, "{followed}");
    let right = followed.stdout().lines().enumerate().all(|(i, line)| line == format!("{i:099}"));
    ensure!(right && followed.bytes.len() == 200_000, "{} bytes came", followed.bytes.len());
    Ok(())
}

fn a_client_that_waits_for_its_run_survives_a_restart_of_the_daemon() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("waits")?;
    let script = "say=before; until [ -e /tmp/go ]; do [ -e /tmp/after ] && say=after; echo $say; sleep 0.05; done; exit 3";
    let mut child = server
        .command(&["exec", &agent.name, "--", "sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("piped")?).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("before"));
    server.kill9()?;
    server.launch(&[])?;
    agent.sh("touch /tmp/after")?.succeeded()?;
    let reattached = lines.find(|line| line.as_ref().is_ok_and(|line| line == "after"));
    ensure!(reattached.is_some(), "the client gave up");
    agent.sh("touch /tmp/go")?.succeeded()?;
    ensure!(lines.all(|line| line.is_ok_and(|line| line == "after")), "the output is not in order");
    ensure!(child.wait()?.code() == Some(3));
    Ok(())
}

fn a_run_that_ends_while_no_daemon_runs_is_told_to_the_client_that_waits() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("ends-unheard")?;
    let pause = Duration::from_secs(5) * harness::slowness();
    let script = format!("echo before; sleep {}; echo last words; exit 7", pause.as_secs());
    let mut client = server
        .command(&["exec", &agent.name, "--", "sh", "-c", &script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("piped")?).lines();
    let mut told = BufReader::new(client.stderr.take().context("piped")?).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("before"));
    let ends = Instant::now() + pause;
    server.kill9()?;
    let told = told.next().transpose()?.unwrap_or_default();
    ensure!(told.contains("the daemon cannot be reached; waiting"), "the client says: {told}");
    std::thread::sleep(ends.saturating_duration_since(Instant::now()));
    server.launch(&[])?;
    ensure!(lines.next().transpose()?.as_deref() == Some("last words"));
    ensure!(client.wait()?.code() == Some(7));
    Ok(())
}

fn a_client_hears_that_its_stubborn_run_was_killed_by_a_stop() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("stubborn")?;
    let mut client = server
        .command(&["exec", &agent.name, "--", "sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("piped")?).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("deaf"));
    server.dorm(&["stop", &agent.name, "--grace", "0.5"])?.succeeded()?;
    let status = client.wait()?;
    ensure!(status.code() == Some(137), "the client ended with {status}");
    Ok(())
}

fn limits_hold_in_an_adopted_box() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent_with_room("bounded", 64, &["--memory", "128M"])?;
    server.kill9()?;
    server.launch(&[])?;
    let output = agent.exec(&["python3", "-c", "x = [bytearray(1 << 20) for _ in range(1024)]"])?;
    ensure!(output.code == 137, "{output}");
    let counted = agent.stats()?["oom_kills"].as_u64() >= Some(1);
    // Whom a machine's own kernel kills, nobody else counts.
    ensure!(counted || harness::engines::in_machines(), "{}", agent.stats()?);
    let full = agent.root("head -c 200M /dev/urandom > /root/fill && sync")?;
    ensure!(full.code != 0, "the disk has no limit any more: {full}");
    Ok(())
}

fn a_box_that_ends_while_no_daemon_runs_is_noticed() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("alone")?;
    agent.sh("echo kept > ~/kept; sync")?.succeeded()?;
    let pid = rustix::process::Pid::from_raw(agent.pid()?).context("a pid")?;
    server.kill9()?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    server.launch(&[])?;
    // It may be on its way out when the daemon looks, and is taken for living until it is gone.
    harness::eventually("its end is noticed, and nothing is left of it", || {
        let rests = ["stopped", "failed"].contains(&agent.state()?.as_str());
        Ok((rests && server.remains.of_box(&agent.id).is_empty()).then_some(()))
    })?;
    ensure!(agent.sh_text("cat ~/kept")? == "kept");
    Ok(())
}

fn an_adopted_box_is_stopped_and_deleted_like_any_other() -> Result<()> {
    let server = Server::start()?;
    let (a, b) = (server.agent("adopted-a")?, server.agent("adopted-b")?);
    server.kill9()?;
    server.launch(&[])?;
    a.stop()?;
    let left = server.remains.of_box(&a.id);
    ensure!(left.is_empty(), "{left:?}");
    a.start()?;
    server.dorm(&["rm", "--yes", &b.name])?.succeeded()?;
    let left = server.remains.of_agent(&b.id);
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

fn agents_survive_a_reboot_with_their_files() -> Result<()> {
    let server = Server::start()?;
    let agents = (0..3).map(|_| server.agent("reboot")).collect::<Result<Vec<_>>>()?;
    for agent in &agents {
        agent.sh("echo $(hostname) > ~/who")?.succeeded()?;
        agent.root("printf '#!/bin/sh\\necho tool\\n' > /usr/local/bin/tool && chmod +x /usr/local/bin/tool && sync")?.succeeded()?;
    }
    agents[2].stop()?;
    server.simulate_reboot()?;
    server.launch(&[])?;
    ensure!(server.names()?.len() == 3);
    for agent in &agents {
        ensure!(agent.state()? == "stopped", "{}", agent.show()?);
        ensure!(agent.sh_text("cat ~/who; tool")? == format!("{}\ntool", agent.name));
    }
    Ok(())
}

fn a_pool_in_a_file_is_mounted_again_after_a_reboot() -> Result<()> {
    let server = Server::start_with(&Options { beside_pool: true, ..Options::default() })?;
    ensure!(server.remains.loops().len() == 1, "the pool is no file: {:?}", server.remains.loops());
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    let agent = server.agent("pooled")?;
    agent.sh("echo kept > ~/kept; sync")?.succeeded()?;
    server.simulate_reboot()?;
    ensure!(server.remains.lasting_loops().is_empty() && server.remains.homes().is_empty(), "the pool is still there");
    server.launch(&[])?;
    ensure!(agent.state()? == "stopped");
    ensure!(agent.sh_text("cat ~/kept")? == "kept");
    Ok(())
}

fn an_orderly_end_leaves_boxes_alone_if_so_configured() -> Result<()> {
    // Where the pool is a file, the boxes that are left hold its filesystem.
    for beside_pool in [false, true] {
        let server = Server::start_with(&Options { leave_boxes: true, beside_pool, ..Options::default() })?;
        if beside_pool {
            server.dorm(&["template", "build", "base"])?.succeeded()?;
        }
        let agent = server.agent("left")?;
        let pid = agent.pid()?;
        for _ in 0..2 {
            ensure!(server.sigterm()? == 0);
            ensure!(fs::exists(format!("/proc/{pid}/exe"))?, "the box was ended");
            server.launch(&[])?;
            ensure!(agent.pid()? == pid && agent.sh_text("echo on")? == "on");
        }
        ensure!(server.remains.loops().len() <= 1, "the pool is mounted twice: {:?}", server.remains.loops());
    }
    Ok(())
}

fn an_orderly_end_stops_boxes_if_so_configured() -> Result<()> {
    orderly_end(&Server::start()?)?;
    // And where its pool is a file, that is let go as well.
    let server = Server::start_with(&Options { beside_pool: true, ..Options::default() })?;
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    orderly_end(&server)
}

fn orderly_end(server: &Arc<Server>) -> Result<()> {
    let agent = server.agent("stopped")?;
    let run = "trap 'echo asked > ~/asked; sync; exit' TERM; echo ready; while :; do sleep 0.05; done";
    let run = agent.exec_with(&["-d"], &["bash", "-c", run])?.text()?;
    harness::eventually("the run waits", || {
        Ok(server.dorm(&["logs", &agent.name, &run])?.stdout().contains("ready").then_some(()))
    })?;
    ensure!(server.sigterm()? == 0);
    let left = server.remains.of_daemon()?;
    ensure!(left.is_empty(), "{left:?}");
    server.launch(&[])?;
    ensure!(agent.state()? == "stopped");
    ensure!(agent.sh_text("cat ~/asked")? == "asked", "its processes were not asked to end");
    Ok(())
}

fn a_second_daemon_on_the_same_data_is_refused_with_the_pid_of_the_first() -> Result<()> {
    let server = Server::start()?;
    let second = server.dorm(&["serve", "--listen", "127.0.0.1:0"])?;
    second.refused(4, &["in use", &server.pid()?.to_string()])?;
    ensure!(server.get("/healthz")?.status == 200);
    Ok(())
}

fn strays_on_the_host_are_swept_at_the_start() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("stray")?;
    server.kill9()?;
    // A temporary file, and a home of which there is no record.
    let stray = "straystraystraystray";
    let homes = server.data.join("pool/homes");
    let made =
        std::process::Command::new("btrfs").args(["subvolume", "create"]).arg(homes.join(stray)).output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    fs::write(server.data.join("tmp/upload"), "half")?;
    server.launch(&[])?;
    ensure!(server.remains.homes() == BTreeSet::from([agent.id.clone()]), "{:?}", server.remains.homes());
    ensure!(fs::read_dir(server.data.join("tmp"))?.next().is_none(), "the temporary file is still there");
    Ok(())
}

fn the_first_key_is_private_and_survives_restarts() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let server = Server::start_with(&Options { bare: true, ..Options::default() })?;
    let key = server.key()?;
    let digits = key.strip_prefix("e2b_").context("the key begins with e2b_")?;
    ensure!(digits.len() == 40 && digits.bytes().all(|b| b.is_ascii_hexdigit()), "{key}");
    let mode = fs::metadata(server.data.join("api-key"))?.permissions().mode();
    ensure!(mode & 0o777 == 0o600, "{mode:o}");
    let others = fs::metadata(&server.data)?.permissions().mode() & 0o055;
    ensure!(others != 0, "it is to be seen that others stay out although they may enter the data directory");
    for folder in ["images", "logs", "tmp", "pool/homes", "pool/snapshots", "pool/templates", "pool/volumes"] {
        let mode = fs::metadata(server.data.join(folder))?.permissions().mode();
        ensure!(mode & 0o077 == 0, "{folder}: {mode:o}");
    }
    for entry in fs::read_dir(&server.data)? {
        let path = entry?.path();
        let holds = fs::read(&path).is_ok_and(|bytes| bytes.windows(40).any(|w| w == digits.as_bytes()));
        ensure!(!holds || path.ends_with("api-key"), "{} holds the key itself", path.display());
    }
    server.sigterm()?;
    server.launch(&[])?;
    ensure!(server.key()? == key && server.http("GET", "/v1/agents", b"")?.status == 200);
    Ok(())
}

fn a_wrong_configuration_is_refused_before_anything_is_touched() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let config = folder.path().join("config.toml");
    let server = Server::shared()?;
    for (text, word) in [
        ("listen = \"nowhere\"", "listen"),
        ("colour = \"blue\"", "colour"),
        ("[defaults]\nmemory = \"lots\"", "memory"),
        ("[network]\nrange = \"10.1.2.3/16\"", "range"),
        ("max_agents = 10000\n[network]\nrange = \"10.1.0.0/24\"", "range"),
        ("first_uid = 4294967295", "uid"),
        ("on_shutdown = \"explode\"", "on_shutdown"),
    ] {
        fs::write(&config, text)?;
        let (data, config) = (data.display().to_string(), config.display().to_string());
        let output = server.dorm(&["serve", "--data", &data, "--config", &config])?;
        if output.code == 0 || !output.stderr.contains(word) {
            bail!("{text}: {output}");
        }
        ensure!(!fs::exists(&data)?, "{text} made the data directory");
    }
    Ok(())
}
