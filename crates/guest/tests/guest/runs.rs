use serde_json::json;

use crate::client::{Guest, alive, base64, eventually, shell, with};

#[test]
fn a_command_gives_its_output_apart_and_its_exit_code() {
    let guest = Guest::start();
    let output = guest.shell("echo out; echo err >&2; exit 3");
    assert_eq!(
        (output.stdout.as_str(), output.stderr.as_str()),
        ("out\n", "err\n")
    );
    assert_eq!(output.end["exitCode"], 3);
    assert_eq!(output.end["exited"], true);
    assert_eq!(output.end["status"], "exit status 3");
    assert_eq!(output.end["error"], "exit status 3");
    assert!(output.pid > 0 && !output.run_id.is_empty());
}

#[test]
fn a_successful_end_has_no_error() {
    let guest = Guest::start();
    let output = guest.shell("true");
    assert_eq!(output.end, json!({"exited": true, "status": "exit status 0"}));
    assert_eq!(output.error, json!(null));
}

#[test]
fn a_large_output_arrives_whole_and_in_order() {
    let guest = Guest::start();
    let output = guest.shell("seq 1 400000");
    let expected: String = (1..=400_000).map(|i| format!("{i}\n")).collect();
    assert_eq!(output.stdout.len(), expected.len());
    assert!(output.stdout == expected);
}

#[test]
fn a_run_has_the_environment_of_its_user_its_box_and_itself() {
    let guest = Guest::start();
    let init = guest.request(
        "POST",
        "/init",
        &[],
        br#"{"envVars": {"BOX": "box", "BOTH": "box"}, "other": 1}"#,
    );
    assert_eq!(init.status, 204);
    assert_eq!(guest.get("/envs").json()["BOX"], "box");
    let request = json!({"process": {
        "cmd": "sh", "args": ["-c", "echo $HOME $USER $BOX $BOTH $OWN; pwd; umask"],
        "envs": {"BOTH": "run", "OWN": "own"}, "cwd": "/usr/lib",
    }});
    let output = guest.start_run(&request).output();
    assert_eq!(output.stdout, "/root root box run own\n/usr/lib\n0022\n");
}

#[test]
fn a_run_belongs_to_the_user_that_is_asked_for() {
    let guest = Guest::start();
    let whoami = shell("id -u; id -g; echo $HOME; grep Groups /proc/self/status");
    let nobody = "Groups:\t65534";
    let by_header = guest
        .stream(
            "process.Process/Start",
            &whoami,
            &[("Authorization", "Basic bm9ib2R5Og==")],
        )
        .output();
    assert!(
        by_header.stdout.starts_with("65534\n65534\n/nonexistent\n"),
        "{}",
        by_header.stdout
    );
    assert!(by_header.stdout.contains(nobody), "{}", by_header.stdout);
    let by_field = guest
        .start_run(&with(whoami.clone(), json!({"user": "nobody"})))
        .output();
    assert_eq!(by_field.stdout, by_header.stdout);
    guest.request(
        "POST",
        "/init",
        &[],
        br#"{"defaultUser": "nobody", "defaultWorkdir": "/usr"}"#,
    );
    assert_eq!(guest.start_run(&whoami).output().stdout, by_header.stdout);
    assert_eq!(guest.shell("pwd").stdout, "/usr\n");
}

#[test]
fn a_users_run_may_do_no_more_than_the_user() {
    let guest = Guest::start();
    let secret = guest.folder().join("secret");
    std::fs::write(&secret, "x").unwrap();
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let request = shell(&format!(
        "cat {}; grep CapEff /proc/self/status",
        secret.display()
    ));
    let output = guest
        .start_run(&with(request, json!({"user": "nobody"})))
        .output();
    assert!(output.stderr.contains("Permission denied"), "{output:?}");
    assert_eq!(output.stdout, "CapEff:\t0000000000000000\n");
}

#[test]
fn a_run_inherits_no_descriptors_and_no_blocked_or_ignored_signals() {
    let guest = Guest::start();
    let run = |cmd: &str, args: &[&str]| {
        guest
            .start_run(&json!({"process": {"cmd": cmd, "args": args}}))
            .output()
            .stdout
    };
    // The fourth is the listing's own.
    assert_eq!(run("ls", &["/proc/self/fd"]), "0\n1\n2\n3\n");
    let signals = run("grep", &["-E", "Sig(Blk|Ign)", "/proc/self/status"]);
    assert_eq!(signals, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n");
    let stat = run("cat", &["/proc/self/stat"]);
    let fields: Vec<_> = stat.split(' ').collect();
    assert_eq!(
        (fields[0], fields[0]),
        (fields[4], fields[5]),
        "it leads its own group and session"
    );
}

#[test]
fn a_client_that_goes_away_does_not_end_the_run() {
    let guest = Guest::start();
    let mut events = guest.start_run(&shell("echo on; sleep 60"));
    let (pid, _) = events.started();
    events.until("on");
    drop(events);
    let list = guest.call("process.Process/List", &json!({}));
    assert_eq!(list["processes"][0]["pid"], pid);
    assert!(alive(pid));
    guest.call(
        "process.Process/SendSignal",
        &json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}),
    );
    eventually("the run ends", || !alive(pid));
    eventually("and is not listed any more", || {
        guest.call("process.Process/List", &json!({}))["processes"]
            .as_array()
            .is_none_or(Vec::is_empty)
    });
}

#[test]
fn the_list_tells_what_runs() {
    let guest = Guest::start();
    let mut events = guest.start_run(&with(shell("echo ready; sleep 60"), json!({"tag": "mine"})));
    let (pid, run_id) = events.started();
    events.until("ready");
    let list = guest.call("process.Process/List", &json!({}));
    let run = &list["processes"][0];
    assert_eq!(
        (run["pid"].as_u64(), run["tag"].as_str()),
        (Some(pid), Some("mine"))
    );
    assert_eq!(
        (run["runId"].as_str(), run["user"].as_str()),
        (Some(run_id.as_str()), Some("root"))
    );
    assert_eq!(run["config"]["args"][1], "echo ready; sleep 60");
    assert_eq!(run["outputBytes"], "6");
    assert!(run["startedMs"].as_str().unwrap().parse::<i64>().unwrap() > 1_700_000_000_000);
}

#[test]
fn signals_reach_the_process_by_name_by_number_and_by_group() {
    let guest = Guest::start();
    let trap = "trap 'echo got' USR1; trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.05; done";
    let mut events = guest.start_run(&with(shell(trap), json!({"tag": "t"})));
    events.until("ready");
    guest.call(
        "process.Process/SendSignal",
        &json!({"process": {"tag": "t"}, "number": 10}),
    );
    events.until("got");
    guest.call(
        "process.Process/SendSignal",
        &json!({"process": {"tag": "t"}, "signal": 15}),
    );
    let output = events.output();
    assert_eq!((output.stdout.as_str(), output.code()), ("bye\n", 7));

    let mut events = guest.start_run(&shell("sleep 61 & echo $!; wait"));
    let (pid, _) = events.started();
    let child: u64 = events.until("\n").trim().parse().unwrap();
    guest.call(
        "process.Process/SendSignal",
        &json!({"process": {"pid": pid}, "number": 9, "group": true}),
    );
    let output = events.output();
    assert_eq!(
        (output.end["status"].as_str(), output.end["signal"].as_u64()),
        (Some("signal: killed"), Some(9))
    );
    assert_eq!(output.end["exitCode"], -1);
    eventually("the child is killed with its group", || !alive(child));
}

#[test]
fn a_run_is_killed_with_its_group_at_its_timeout() {
    let guest = Guest::start();
    let script = shell("sleep 62 & echo $!; wait");
    let output = guest
        .start_run(&with(script.clone(), json!({"timeoutMs": "300"})))
        .output();
    assert_eq!(output.end["timedOut"], true);
    assert_eq!(output.end["status"], "signal: killed");
    let child: u64 = output.stdout.trim().parse().unwrap();
    eventually("the child goes too", || !alive(child));

    let output = guest
        .stream("process.Process/Start", &script, &[("Connect-Timeout-Ms", "300")])
        .output();
    assert_eq!(output.error["code"], "deadline_exceeded");
    let child: u64 = output.stdout.trim().parse().unwrap();
    eventually("the process is killed, not only the call ended", || {
        !alive(child) && !alive(output.pid)
    });
}

#[test]
fn limits_hold_for_the_run() {
    let guest = Guest::start();
    let request = shell("ulimit -n; ulimit -t; ulimit -v; ulimit -f; ulimit -u");
    let limits = json!({"limits": {
        "openFiles": "77", "cpuSeconds": "5", "memoryBytes": "1073741824", "fileBytes": "4096", "processes": "999",
    }});
    assert_eq!(
        guest.start_run(&with(request, limits)).output().stdout,
        "77\n5\n1048576\n4\n999\n"
    );
    let spin = with(
        shell("while :; do :; done"),
        json!({"limits": {"cpuSeconds": "1"}}),
    );
    let output = guest.start_run(&spin).output();
    assert_eq!(output.end["signal"], 9, "{:?}", output.end);
}

#[test]
fn a_background_process_neither_holds_up_the_end_nor_dies_of_it() {
    let guest = Guest::start();
    let output = guest.shell("(while :; do echo tick; sleep 0.05; done) & echo $!");
    assert_eq!(output.code(), 0);
    let pid: u64 = output
        .stdout
        .lines()
        .find(|l| *l != "tick")
        .unwrap()
        .parse()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(alive(pid), "a process left behind can still write");
    guest.shell(&format!("kill {pid}"));
}

#[test]
fn output_of_helpers_that_end_a_moment_later_is_not_lost() {
    let guest = Guest::start();
    let output = guest.shell("echo direct; (sleep 0.03; echo late) &");
    assert_eq!(output.stdout, "direct\nlate\n");
}

#[test]
fn many_short_runs_at_once_each_get_their_own_status() {
    let guest = Guest::start();
    std::thread::scope(|scope| {
        for code in 0..40 {
            let guest = &guest;
            scope.spawn(move || {
                let output = guest.shell(&format!("echo {code}; exit {code}"));
                assert_eq!(output.end["exitCode"].as_i64().unwrap_or(0), code);
                assert_eq!(output.stdout, format!("{code}\n"));
            });
        }
    });
}

#[test]
fn keepalives_come_while_a_run_is_silent() {
    let guest = Guest::start();
    let mut events = guest.stream(
        "process.Process/Start",
        &shell("sleep 60"),
        &[("Keepalive-Ping-Interval", "1")],
    );
    events.started();
    assert!(events.event().unwrap().get("keepalive").is_some());
}

#[test]
fn a_stop_ends_every_run_in_order() {
    let mut guest = Guest::start();
    let mut polite = guest.start_run(&shell(
        "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done",
    ));
    polite.until("ready");
    let mut terminal = guest.start_run(&json!({
        "process": {"cmd": "/bin/bash", "args": ["--norc", "-i"]}, "pty": {"size": {"cols": 80, "rows": 24}},
    }));
    let (pid, _) = terminal.started();
    terminal.until("#");
    let killed = std::process::Command::new("kill")
        .arg(guest.pid().to_string())
        .status()
        .unwrap();
    assert!(killed.success());
    polite.until("bye");
    assert!(guest.wait().success());
    assert!(!alive(pid), "an interactive shell ends too");
}

#[test]
fn input_is_written_to_a_process_and_closed() {
    let guest = Guest::start();
    let mut events = guest.start_run(&json!({"process": {"cmd": "cat"}}));
    let (pid, _) = events.started();
    let input = json!({"process": {"pid": pid}, "input": {"stdin": base64(b"hello\n")}});
    guest.call("process.Process/SendInput", &input);
    assert_eq!(events.until("\n"), "hello\n");
    guest.call("process.Process/CloseStdin", &json!({"process": {"pid": pid}}));
    assert_eq!(events.output().code(), 0);
}
