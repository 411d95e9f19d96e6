use serde_json::json;

use crate::client::{Guest, eventually, shell, with};

fn ended(guest: &Guest, run_id: &str) -> bool {
    let list = guest.call("process.Process/List", &json!({"ended": true}));
    let runs = list["processes"].as_array().cloned().unwrap_or_default();
    runs.iter().any(|r| r["runId"] == run_id && r["ended"] == true)
}

#[test]
fn a_kept_runs_output_is_there_for_whoever_comes_later() {
    let guest = Guest::start();
    // Two pipes: what is written to the second must not be read before the end of the first.
    let script = "seq 1 200000; sleep 0.5; echo oops >&2; exit 4";
    let mut events = guest.start_run(&with(shell(script), json!({"keep": true})));
    let (pid, run_id) = events.started();
    drop(events);
    eventually("the run ends without anyone reading", || ended(&guest, &run_id));

    let expected: String = (1..=200_000).map(|i| format!("{i}\n")).collect();
    for _ in 0..2 {
        let connect = json!({"process": {"runId": run_id}});
        let output = guest.stream("process.Process/Connect", &connect, &[]).output();
        assert!(
            output.stdout == expected,
            "{} of {} bytes",
            output.stdout.len(),
            expected.len()
        );
        assert_eq!((output.stderr.as_str(), output.code()), ("oops\n", 4));
    }
    let from = expected.len() - 7;
    let connect = json!({"process": {"pid": pid}, "replayFrom": from.to_string()});
    let mut events = guest.stream("process.Process/Connect", &connect, &[]);
    events.started();
    let event = events.event().unwrap();
    assert_eq!(event["data"]["offset"], from.to_string());
    assert_eq!(events.output().stderr, "oops\n");

    let list = guest.call("process.Process/List", &json!({"ended": true}));
    let run = &list["processes"][0];
    assert_eq!(
        (run["exitCode"].as_i64(), run["keep"].as_bool()),
        (Some(4), Some(true))
    );
    assert_eq!(run["outputBytes"], (expected.len() + 5).to_string());
    let running = guest.call("process.Process/List", &json!({}));
    assert_eq!(
        running,
        json!({}),
        "only what runs is listed unless the rest is asked for"
    );
}

#[test]
fn a_run_is_work_unless_it_says_that_it_is_a_service() {
    let guest = Guest::start();
    for (asked, said) in [
        (json!({}), true),
        (json!({"tag": "start"}), true),
        (json!({"keepsAwake": true}), true),
        (json!({"keepsAwake": false}), false),
    ] {
        let (_, run_id) = guest.start_run(&with(shell("sleep 60"), asked.clone())).started();
        let list = guest.call("process.Process/List", &json!({}));
        let runs = list["processes"].as_array().unwrap();
        let run = runs.iter().find(|run| run["runId"] == *run_id).unwrap();
        assert_eq!(run["keepsAwake"], said, "{asked}");
    }
}

#[test]
fn a_kept_run_is_joined_in_the_middle() {
    let guest = Guest::start();
    let script = "echo first; read -r line; echo second";
    let request = json!({"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "keep": true, "tag": "k"});
    let mut events = guest.start_run(&request);
    events.until("first");
    drop(events);
    let mut newcomer = guest.stream("process.Process/Connect", &json!({"process": {"tag": "k"}}), &[]);
    newcomer.started();
    let replay = json!({"process": {"tag": "k"}, "replayFrom": "0"});
    let mut replayed = guest.stream("process.Process/Connect", &replay, &[]);
    replayed.until("first");
    guest.call("process.Process/CloseStdin", &json!({"process": {"tag": "k"}}));
    assert_eq!(newcomer.output().stdout, "second\n");
    assert_eq!(replayed.output().stdout, "second\n");
}

#[test]
fn what_is_kept_is_private_and_gone_when_it_is_forgotten() {
    let guest = Guest::start();
    let mut events = guest.start_run(&with(shell("head -c 1000000 /dev/zero"), json!({"keep": true})));
    let (_, run_id) = events.started();
    drop(events);
    eventually("the run ends", || ended(&guest, &run_id));
    let file = guest.state().join("runs").join(&run_id);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).unwrap());
    assert_eq!(mode & 0o777, 0o600);
    guest.call("process.Process/Forget", &json!({"process": {"runId": run_id}}));
    assert!(!file.exists());
    let connect = json!({"process": {"runId": run_id}});
    assert_eq!(
        guest
            .stream("process.Process/Connect", &connect, &[])
            .output()
            .error["code"],
        "not_found"
    );
}

#[test]
fn a_run_that_goes_on_cannot_be_forgotten() {
    let guest = Guest::start();
    let mut events = guest.start_run(&with(shell("sleep 60"), json!({"keep": true})));
    let (_, run_id) = events.started();
    let (code, message) = guest.refused("process.Process/Forget", &json!({"process": {"runId": run_id}}));
    assert_eq!(code, "failed_precondition", "{message}");
}

#[test]
fn an_attached_run_whose_client_left_keeps_what_nobody_has_had() {
    let guest = Guest::start();
    let script = "echo start; read -r line; seq 1 100000; read -r line; echo end";
    let request = json!({"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "tag": "a"});
    let mut events = guest.start_run(&request);
    events.until("start");
    drop(events);
    let newline = crate::client::base64(b"\n");
    let input = json!({"process": {"tag": "a"}, "input": {"stdin": newline}});
    guest.call("process.Process/SendInput", &input);
    let bytes = 6 + (1..=100_000).map(|i: u32| i.to_string().len() + 1).sum::<usize>();
    eventually("all is written although nobody reads", || {
        let list = guest.call("process.Process/List", &json!({}));
        list["processes"][0]["outputBytes"].as_str() == Some(bytes.to_string().as_str())
    });
    let replay = json!({"process": {"tag": "a"}, "replayFrom": "6"});
    let mut events = guest.stream("process.Process/Connect", &replay, &[]);
    let seen = events.until("100000\n");
    assert_eq!(seen.len(), bytes - 6);
    guest.call("process.Process/SendInput", &input);
    assert_eq!(events.output().stdout, "end\n");
}

#[test]
fn a_reader_that_stalls_holds_an_attached_process_back() {
    let guest = Guest::start();
    let mut events = guest.start_run(&shell("exec head -c 100000000 /dev/zero"));
    events.started();
    let written = || {
        let list = guest.call("process.Process/List", &json!({}));
        list["processes"][0]["outputBytes"]
            .as_str()
            .unwrap_or("0")
            .parse::<u64>()
            .unwrap()
    };
    let mut last = 0;
    eventually("the output comes to a stand", || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        std::mem::replace(&mut last, written()) == last && last > 0
    });
    assert!(last < 10_000_000, "{last} bytes were taken without a reader");
    assert_eq!(events.output().bytes, 100_000_000);
}
