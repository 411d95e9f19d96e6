//! Agents from their making to their end, as a user of the command line sees them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::harness::{self, Server, Terminal, run};

harness::tests![
    an_agent_is_made_listed_shown_stopped_started_and_deleted,
    a_stopped_agent_keeps_its_files_and_programs,
    a_stopped_agent_starts_when_something_reaches_for_it,
    an_agent_that_is_not_started_is_stopped_until_it_is_used,
    an_ephemeral_agent_goes_away_when_it_is_stopped,
    a_start_of_a_running_agent_and_a_stop_of_a_stopped_one_change_nothing,
    the_environment_of_an_agent_is_that_of_its_runs,
    the_host_name_is_the_agents_name,
    the_limits_of_an_agent_are_shown_as_they_were_asked_for,
    an_agent_is_found_by_its_id_too,
    bad_names_are_refused_with_a_hint,
    bad_sizes_are_refused_and_nothing_is_made,
    a_name_is_given_once,
    an_unknown_template_is_refused_with_a_hint,
    a_deletion_without_a_terminal_needs_yes,
    a_deletion_on_a_terminal_asks,
    several_agents_are_stopped_and_deleted_at_once_and_errors_do_not_stop_the_rest,
    exit_codes_tell_what_went_wrong,
    an_error_is_json_where_json_is_asked_for,
    a_stop_asks_first_and_waits_for_what_was_asked,
    a_stop_ends_what_does_not_listen,
    the_events_of_an_agent_tell_every_transition_with_its_reason,
    a_box_that_dies_leaves_its_agent_with_the_reason,
    deleted_agents_leave_no_descriptor_in_the_daemon,
    completions_are_printed_for_every_shell,
    doctor_says_what_it_found_and_what_was_measured,
];

fn an_agent_is_made_listed_shown_stopped_started_and_deleted() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("whole-life")?;
    let listed = server.json(&["ls"])?;
    let entry = listed.as_array().into_iter().flatten().find(|a| a["name"] == agent.name.as_str());
    let entry = entry.context("a new agent is listed")?;
    for (field, value) in [
        ("id", json!(agent.id)),
        ("state", json!("running")),
        ("template", json!("base")),
        ("lifetime", json!("persistent")),
    ] {
        ensure!(entry[field] == value, "{field}: {entry}");
    }
    for field in ["cpus", "memory", "disk", "pids", "created", "since", "pid"] {
        ensure!(entry[field].is_number(), "{field}: {entry}");
    }
    ensure!(entry["reason"].is_string() && entry["env"].is_object(), "{entry}");
    let table = server.dorm(&["ls"])?.text()?;
    ensure!(table.lines().any(|l| l.starts_with(&agent.name) && l.contains("running")), "{table}");

    agent.stop()?;
    let shown = agent.show()?;
    ensure!(shown["state"] == "stopped" && shown["pid"].is_null() && shown["address"].is_null(), "{shown}");
    let left = server.remains.of_box(&agent.id);
    ensure!(left.is_empty(), "a stopped agent has {left:?}");
    agent.start()?;
    ensure!(agent.state()? == "running", "it did not start again");

    server.dorm(&["rm", "--yes", &agent.name])?.succeeded()?;
    server.dorm(&["show", &agent.name])?.refused(3, &[&agent.name])
}

fn a_stopped_agent_keeps_its_files_and_programs() -> Result<()> {
    let agent = Server::shared()?.agent("keeps")?;
    agent.sh("echo remember > ~/notes.txt && mkdir ~/work && touch ~/work/a")?.succeeded()?;
    agent.root("printf '#!/bin/sh\\necho tool works\\n' > /usr/local/bin/tool && chmod 755 /usr/local/bin/tool")?.succeeded()?;
    agent.root("useradd --create-home other && echo 'x=1' >> /etc/environment")?.succeeded()?;
    agent.stop()?;
    agent.start()?;
    ensure!(agent.sh_text("cat ~/notes.txt; ls ~/work; tool")? == "remember\na\ntool works");
    ensure!(agent.exec_with(&["-u", "other"], &["whoami"])?.text()? == "other");
    ensure!(agent.root_text("stat -c '%U %a' /home/other")?.starts_with("other "));
    Ok(())
}

fn a_stopped_agent_starts_when_something_reaches_for_it() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("reached")?;
    agent.stop()?;
    ensure!(agent.sh_text("echo awake")? == "awake");
    agent.stop()?;
    ensure!(server.dorm(&["cp", &agent.at("/etc/hostname"), "-"])?.text()? == agent.name);
    ensure!(agent.state()? == "running");
    Ok(())
}

fn an_agent_that_is_not_started_is_stopped_until_it_is_used() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent_with("lazy", &["--no-start"])?;
    ensure!(agent.state()? == "stopped" && server.remains.of_box(&agent.id).is_empty());
    agent.exec(&["true"])?.succeeded()?;
    ensure!(agent.state()? == "running");
    Ok(())
}

fn an_ephemeral_agent_goes_away_when_it_is_stopped() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent_with("brief", &["--ephemeral"])?;
    ensure!(agent.show()?["lifetime"] == "ephemeral");
    server.dorm(&["stop", &agent.name])?.succeeded()?;
    harness::eventually("the ephemeral agent is gone", || {
        let listed = server.names()?.contains(&agent.name);
        Ok((!listed && server.remains.of_agent(&agent.id).is_empty()).then_some(()))
    })
}

fn a_start_of_a_running_agent_and_a_stop_of_a_stopped_one_change_nothing() -> Result<()> {
    let agent = Server::shared()?.agent("twice")?;
    let pid = agent.pid()?;
    agent.start()?;
    ensure!(agent.pid()? == pid, "the second start replaced the box");
    agent.stop()?;
    agent.stop()?;
    ensure!(agent.state()? == "stopped");
    Ok(())
}

fn the_environment_of_an_agent_is_that_of_its_runs() -> Result<()> {
    let agent = Server::shared()?.agent_with("env", &["-e", "COLOUR=blue and green", "--env", "EMPTY="])?;
    ensure!(agent.sh_text("echo \"$COLOUR|${EMPTY-unset}\"")? == "blue and green|");
    let over = agent.exec_with(&["-e", "COLOUR=red"], &["sh", "-c", "echo $COLOUR"])?.text()?;
    ensure!(over == "red", "a run's own environment comes first: {over}");
    agent.stop()?;
    ensure!(agent.sh_text("echo $COLOUR")? == "blue and green");
    Ok(())
}

fn the_host_name_is_the_agents_name() -> Result<()> {
    let agent = Server::shared()?.agent("host-name")?;
    ensure!(agent.sh_text("hostname; cat /etc/hostname /proc/sys/kernel/hostname")? == [agent.name.as_str(); 3].join("\n"));
    ensure!(agent.root("sudo true && getent hosts $(hostname)")?.text()?.contains(&agent.name), "it knows itself by name");
    Ok(())
}

fn the_limits_of_an_agent_are_shown_as_they_were_asked_for() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent_with("limits", &["--cpus", "0.5", "--memory", "300M", "--disk", "1.5G", "--pids", "77"])?;
    let shown = agent.show()?;
    ensure!(shown["cpus"] == 0.5 && shown["memory"] == 300 << 20 && shown["disk"] == 3u64 << 29 && shown["pids"] == 77, "{shown}");
    let stats = agent.stats()?;
    ensure!(stats["memory_limit"] == 300 << 20 && stats["disk_limit"] == 3u64 << 29 && stats["pids_limit"] == 77, "{stats}");
    Ok(())
}

fn an_agent_is_found_by_its_id_too() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("by-id")?;
    ensure!(server.json(&["show", &agent.id])?["name"] == agent.name.as_str());
    ensure!(server.dorm(&["exec", &agent.id, "--", "echo", "here"])?.text()? == "here");
    Ok(())
}

fn bad_names_are_refused_with_a_hint() -> Result<()> {
    let server = Server::start()?;
    let too_long = "a".repeat(64);
    for name in ["Upper", "-dash", "dash-", "1digit", "under_score", "a.b", "a b", "", "ünï", "../x", &too_long] {
        let output = server.dorm(&["new", "--no-start", "--", name])?;
        ensure!(matches!(output.code, 1 | 2) && output.stderr.contains("hint:"), "{name}: {output}");
    }
    ensure!(server.names()?.is_empty() && server.remains.homes().is_empty(), "something was made");
    Ok(())
}

fn bad_sizes_are_refused_and_nothing_is_made() -> Result<()> {
    let server = Server::shared()?;
    for flags in [
        ["--memory", "0"],
        ["--memory", "12"],
        ["--memory", "lots"],
        ["--memory", "-1G"],
        ["--disk", "0"],
        ["--disk", "9999999T"],
        ["--cpus", "0"],
        ["--cpus", "-1"],
        ["--cpus", "NaN"],
        ["--cpus", "1e9"],
        ["--pids", "0"],
        ["--pids", "-4"],
    ] {
        let flag = format!("{}={}", flags[0], flags[1]);
        let output = server.dorm(&["new", "--no-start", &flag, "bad-size"])?;
        ensure!(matches!(output.code, 1 | 2) && !output.stderr.is_empty(), "{output}");
        ensure!(!server.names()?.contains(&"bad-size".to_owned()), "{flag} was taken");
    }
    Ok(())
}

fn a_name_is_given_once() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("once")?;
    server.dorm(&["new", &agent.name])?.refused(4, &[&agent.name])?;
    ensure!(agent.sh_text("echo unharmed")? == "unharmed");
    Ok(())
}

fn an_unknown_template_is_refused_with_a_hint() -> Result<()> {
    let server = Server::shared()?;
    server.dorm(&["new", "no-template", "--template", "nowhere"])?.refused(3, &["nowhere", "hint:"])?;
    ensure!(!server.names()?.contains(&"no-template".to_owned()));
    Ok(())
}

fn a_deletion_without_a_terminal_needs_yes() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("asked")?;
    server.dorm_with_input(&["rm", &agent.name], b"y\n")?.refused(2, &["--yes"])?;
    ensure!(agent.state()? == "running");
    Ok(())
}

fn a_deletion_on_a_terminal_asks() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("answered")?;
    let mut terminal = Terminal::start(&server.command(&["rm", &agent.name]), 24, 80)?;
    terminal.sees("[y/N]")?;
    terminal.press("n\r")?;
    ensure!(terminal.end()? != 0 && agent.state()? == "running");
    let mut terminal = Terminal::start(&server.command(&["rm", &agent.name]), 24, 80)?;
    terminal.sees("[y/N]")?;
    terminal.press("y\r")?;
    ensure!(terminal.end()? == 0 && !server.names()?.contains(&agent.name));
    Ok(())
}

fn several_agents_are_stopped_and_deleted_at_once_and_errors_do_not_stop_the_rest() -> Result<()> {
    let server = Server::shared()?;
    let (a, b) = (server.agent("several")?, server.agent("several")?);
    server.dorm(&["stop", &a.name, "nobody-there", &b.name])?.refused(3, &["nobody-there"])?;
    ensure!(a.state()? == "stopped" && b.state()? == "stopped");
    server.dorm(&["rm", "-y", &a.name, &b.name])?.succeeded()?;
    let names = server.names()?;
    ensure!(!names.contains(&a.name) && !names.contains(&b.name));
    Ok(())
}

fn exit_codes_tell_what_went_wrong() -> Result<()> {
    let server = Server::shared()?;
    server.dorm(&["show", "nobody-there"])?.refused(3, &["nobody-there"])?;
    server.dorm(&["exec", "nobody-there", "--", "true"])?.refused(3, &["nobody-there"])?;
    server.dorm(&["no-such-verb"])?.refused(2, &[])?;
    server.dorm(&["new"])?.refused(2, &[])?;
    let mut wrong_key = server.command(&["ls"]);
    wrong_key.env("DORM_API_KEY", format!("e2b_{}", "0".repeat(40)));
    run(wrong_key, b"")?.refused(5, &["key"])?;
    let mut nobody = server.command(&["ls", "--url", "http://127.0.0.1:9"]);
    nobody.env_remove("DORM_DATA");
    run(nobody, b"")?.refused(6, &["hint:"])
}

fn an_error_is_json_where_json_is_asked_for() -> Result<()> {
    let output = Server::shared()?.dorm(&["show", "nobody-there", "--json"])?;
    let error: Value = serde_json::from_str(output.stderr.trim()).context("stderr is JSON")?;
    ensure!(error["error"]["exit_code"] == 3 && error["error"]["message"].is_string(), "{error}");
    Ok(())
}

fn a_stop_asks_first_and_waits_for_what_was_asked() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("polite")?;
    let script = "trap 'sleep 0.3; echo asked > ~/asked; exit' TERM; echo ready; while :; do sleep 0.05; done";
    let run = agent.exec_with(&["-d"], &["bash", "-c", script])?.text()?;
    harness::eventually("the run waits", || {
        Ok(server.dorm(&["logs", &agent.name, &run])?.stdout().contains("ready").then_some(()))
    })?;
    server.dorm(&["stop", &agent.name, "--grace", "60"])?.succeeded()?;
    ensure!(agent.sh_text("cat ~/asked")? == "asked", "its process was not asked to end, or not waited for");
    Ok(())
}

fn a_stop_ends_what_does_not_listen() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("deaf")?;
    let script = "trap '' TERM HUP INT; echo ready; while :; do sleep 0.05; done";
    let run = agent.exec_with(&["-d"], &["bash", "-c", script])?.text()?;
    harness::eventually("the run waits", || {
        Ok(server.dorm(&["logs", &agent.name, &run])?.stdout().contains("ready").then_some(()))
    })?;
    server.dorm(&["stop", "--grace", "0.2", &agent.name])?.succeeded()?;
    let left = server.remains.of_box(&agent.id);
    ensure!(left.is_empty() && agent.state()? == "stopped", "{left:?}");
    Ok(())
}

fn the_events_of_an_agent_tell_every_transition_with_its_reason() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("events")?;
    agent.stop()?;
    let events = server.json(&["events", &agent.name])?;
    let mut events = events.as_array().context("a list")?.clone();
    events.sort_by_key(|e| e["seq"].as_i64());
    let states: Vec<&str> = events.iter().filter_map(|e| e["to"].as_str()).collect();
    let order = ["starting", "running", "stopping", "stopped"];
    let mut rest = states.iter();
    ensure!(order.iter().all(|state| rest.any(|s| s == state)), "{states:?}");
    ensure!(events.iter().all(|e| e["reason"].as_str().is_some_and(|r| !r.is_empty())), "{events:?}");
    Ok(())
}

fn a_box_that_dies_leaves_its_agent_with_the_reason() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("dies")?;
    agent.sh("echo kept > ~/kept; sync")?.succeeded()?;
    let pid = rustix::process::Pid::from_raw(agent.pid()?).context("a pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    let shown = harness::eventually("the end of the box is noticed", || {
        let shown = agent.show()?;
        Ok((shown["state"] == "failed" || shown["state"] == "stopped").then_some(shown))
    })?;
    ensure!(shown["reason"].as_str().is_some_and(|r| r.contains("ended")), "{shown}");
    harness::eventually("nothing of the box is left", || Ok(server.remains.of_box(&agent.id).is_empty().then_some(())))?;
    ensure!(agent.sh_text("cat ~/kept")? == "kept");
    Ok(())
}

fn deleted_agents_leave_no_descriptor_in_the_daemon() -> Result<()> {
    let server = Server::start()?;
    // All that are open, and those of them that are network namespaces.
    let descriptors = || -> Result<[usize; 2]> {
        let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid()?))?.flatten();
        let open: Vec<_> = open.filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok()).collect();
        let namespaces = open.iter().filter(|what| what.to_string_lossy().starts_with("net:["));
        Ok([open.len(), namespaces.count()])
    };
    let cycle = || -> Result<()> {
        let agent = server.agent("cycle")?;
        agent.exec(&["true"])?.succeeded()?;
        agent.stop()?;
        agent.start()?;
        agent.pause()?;
        agent.wake()?;
        agent.hibernate()?;
        agent.wake()?;
        server.dorm(&["snapshot", &agent.name, "--label", "kept"])?.succeeded()?;
        server.dorm(&["rollback", &agent.name, "kept"])?.succeeded()?;
        let fork = format!("{}-fork", agent.name);
        server.dorm(&["fork", &agent.name, &fork])?.succeeded()?;
        let fork = server.adopt(&fork)?;
        fork.exec(&["true"])?.succeeded()?;
        server.dorm(&["rm", "--yes", &fork.name])?.succeeded().map(drop)
    };
    cycle()?;
    let before = descriptors()?;
    (0..4).try_for_each(|_| cycle())?;
    harness::eventually("as few descriptors are open as before", || {
        let [all, namespaces] = descriptors()?;
        Ok((all <= before[0] + 2 && namespaces <= before[1]).then_some(()))
    })
    .with_context(|| format!("{before:?} were open, and {:?} are", descriptors()))
}

fn completions_are_printed_for_every_shell() -> Result<()> {
    let server = Server::shared()?;
    for shell in ["bash", "zsh", "fish"] {
        ensure!(server.dorm(&["completions", shell])?.text()?.contains("dorm"), "{shell}");
    }
    server.dorm(&["completions", "tcsh"])?.refused(2, &["possible values"])
}

/// Far beyond what all engines take, in emulation, too.
const MEASURED_WITHIN: Duration = Duration::from_secs(20 * 60);

fn doctor_says_what_it_found_and_what_was_measured() -> Result<()> {
    let server = Server::shared()?;
    let found = || -> Result<Vec<Value>> { Ok(serde_json::from_str(&server.dorm(&["doctor", "--json"])?.text()?)?) };
    let of = |name: &str, found: &[Value]| -> Result<Value> {
        let of = found.iter().find(|one| one["name"] == name);
        of.cloned().with_context(|| format!("nothing of {name}: {found:?}"))
    };
    let at_first = found()?;
    for name in ["btrfs", "container", "records"] {
        let one = of(name, &at_first)?;
        ensure!(one["status"] == "ok", "{one}");
    }
    // What each of the others runs by, where there is any.
    for (name, version, by) in [("gvisor", "version ", ["systrap", "kvm"]), ("vm", "QEMU ", ["(tcg)", "(kvm)"])] {
        let one = of(name, &at_first)?;
        let said = one["found"].as_str().context("it found something, or not")?;
        let versioned = said.strip_prefix(version).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_alphanumeric()));
        let told = match one["status"] == "ok" {
            true => versioned && by.iter().any(|by| said.contains(by)),
            false => one["fix"].is_string(),
        };
        ensure!(told, "{one}");
    }
    ensure!(of("gvisor", &at_first)?["measured"].is_null(), "{at_first:?}");
    // A machine takes minutes in emulation.
    let all = std::env::var_os("DORM_E2E_ALL").is_some();
    let mut kinds = vec!["container"];
    for kind in ["gvisor", "vm"] {
        if all && of(kind, &at_first)?["status"] == "ok" {
            kinds.push(kind);
        }
    }
    let doctor = server.command(&[&["doctor", "--measure"][..], &kinds].concat());
    let said = harness::run_within(MEASURED_WITHIN, doctor, b"")?.text()?;
    ensure!(said.contains("FROM DISK"), "{said}");
    // It is kept, with what it is true of.
    let kept = found()?;
    for kind in kinds {
        let measured = of(kind, &kept)?["measured"].clone();
        for what in ["boot", "exec", "wake_from_standby", "wake_from_disk"] {
            ensure!(measured[what].as_f64().is_some_and(|ms| ms > 0.0), "{kind}: {what}: {measured}");
        }
    }
    server.dorm(&["doctor", "--measure", "podman"])?.refused(2, &["no isolation"])
}
