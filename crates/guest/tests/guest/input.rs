use serde_json::{Value, json};

use crate::client::{Events, Guest, base64, envelope, shell};

fn terminal(guest: &Guest, script: &str) -> Events {
    guest.start_run(&json!({
        "process": {"cmd": "/bin/bash", "args": ["--norc", "-c", script]},
        "pty": {"size": {"cols": 91, "rows": 33}}, "tag": "tty",
    }))
}

fn type_in(guest: &Guest, text: &str) {
    let request = json!({"process": {"tag": "tty"}, "input": {"pty": base64(text.as_bytes())}});
    guest.call("process.Process/SendInput", &request);
}

#[test]
fn a_terminal_has_its_size_and_changes_it() {
    let guest = Guest::start();
    let mut events = terminal(
        &guest,
        "stty size; trap 'stty size' WINCH; tty; echo up; while :; do sleep 0.05; done",
    );
    let first = events.until("up");
    assert!(first.contains("33 91"), "{first}");
    assert!(first.contains("/dev/pts/"), "{first}");
    let update = json!({"process": {"tag": "tty"}, "pty": {"size": {"cols": 120, "rows": 50}}});
    guest.call("process.Process/Update", &update);
    events.until("50 120");
}

#[test]
fn what_is_typed_reaches_the_terminals_process() {
    let guest = Guest::start();
    let mut events = terminal(
        &guest,
        "echo $TERM; read -r line; echo \"got $line\"; cat; echo done",
    );
    events.until("xterm-256color");
    type_in(&guest, "héllo\n");
    events.until("got héllo");
    type_in(&guest, "\u{4}");
    let output = events.output();
    assert!(output.pty.contains("done"), "{output:?}");
    assert_eq!(output.code(), 0);
}

#[test]
fn ctrl_c_and_group_signals_reach_the_foreground_process() {
    let guest = Guest::start();
    let mut events = guest.start_run(&json!({
        "process": {"cmd": "/bin/bash", "args": ["--norc", "-i"], "envs": {"PS1": "@"}},
        "pty": {"size": {"cols": 80, "rows": 24}}, "tag": "tty",
    }));
    events.until("@");
    type_in(&guest, "stty -echo; sh -c 'echo up; exec sleep 63'\n");
    events.until("up\r\n");
    type_in(&guest, "\u{3}");
    events.until("@");
    type_in(&guest, "echo code $?\n");
    events.until("code 130");
    type_in(&guest, "sh -c 'echo again; exec sleep 64'; echo code $?\n");
    events.until("again\r\n");
    let signal = json!({"process": {"tag": "tty"}, "number": 15, "group": true});
    guest.call("process.Process/SendSignal", &signal);
    events.until("code 143");
    type_in(&guest, "exit 9\n");
    assert_eq!(events.output().code(), 9);
}

#[test]
fn a_terminal_belongs_to_its_user() {
    let guest = Guest::start();
    let mut request = json!({
        "process": {"cmd": "sh", "args": ["-c", "id -un; echo reopened > /dev/tty; stat -c %U $(tty)"]},
        "pty": {"size": {"cols": 80, "rows": 24}}, "user": "nobody",
    });
    request["process"]["cwd"] = Value::from("/");
    let output = guest.start_run(&request).output();
    assert_eq!(output.pty, "nobody\r\nreopened\r\nnobody\r\n");
}

#[test]
fn input_can_be_streamed() {
    let guest = Guest::start();
    let mut events = guest.start_run(&json!({"process": {"cmd": "cat"}, "tag": "cat"}));
    let (pid, _) = events.started();
    let mut body = envelope(json!({"start": {"process": {"pid": pid}}}).to_string().as_bytes());
    for part in ["one ", "two ", "three"] {
        let message = json!({"data": {"input": {"stdin": base64(part.as_bytes())}}});
        body.extend(envelope(message.to_string().as_bytes()));
        body.extend(envelope(br#"{"keepalive": {}}"#));
    }
    let headers = [("Content-Type", "application/connect+json")];
    let answer = guest.request("POST", "/process.Process/StreamInput", &headers, &body);
    assert_eq!(answer.status, 200);
    assert_eq!(events.until("three"), "one two three");
}

#[test]
fn input_that_is_sent_again_is_taken_once() {
    let guest = Guest::start();
    let mut events = guest.start_run(&json!({"process": {"cmd": "cat"}, "tag": "pipe"}));
    events.started();
    let at = |offset: u64, text: &str| {
        let input = json!({"stdin": base64(text.as_bytes())});
        json!({"process": {"tag": "pipe"}, "input": input, "offset": offset.to_string()})
    };
    for (offset, text) in [(0, "one"), (0, "one two"), (3, " two"), (1, ""), (7, " three")] {
        guest.call("process.Process/FeedInput", &at(offset, text));
    }
    let missing = guest.refused("process.Process/FeedInput", &at(14, "five"));
    assert_eq!(missing.0, "invalid_argument");
    guest.call("process.Process/CloseStdin", &json!({"process": {"tag": "pipe"}}));
    assert_eq!(events.output().stdout, "one two three");
}

#[test]
fn input_of_the_wrong_kind_is_refused() {
    let guest = Guest::start();
    let mut events = guest.start_run(&json!({"process": {"cmd": "cat"}, "tag": "pipe"}));
    events.started();
    let pty = json!({"process": {"tag": "pipe"}, "input": {"pty": base64(b"x")}});
    assert_eq!(
        guest.refused("process.Process/SendInput", &pty).0,
        "invalid_argument"
    );
    let resize = json!({"process": {"tag": "pipe"}, "pty": {"size": {"cols": 1, "rows": 1}}});
    assert_eq!(
        guest.refused("process.Process/Update", &resize).0,
        "failed_precondition"
    );
    let empty = json!({"process": {"tag": "pipe"}});
    assert_eq!(
        guest.refused("process.Process/SendInput", &empty).0,
        "invalid_argument"
    );

    let mut events = terminal(&guest, "echo up; sleep 60");
    events.until("up");
    let close = json!({"process": {"tag": "tty"}});
    assert_eq!(
        guest.refused("process.Process/CloseStdin", &close).0,
        "failed_precondition"
    );

    let mut events = guest.start_run(&shell("echo up; sleep 60"));
    let (pid, _) = events.started();
    let closed = json!({"process": {"pid": pid}, "input": {"stdin": base64(b"x")}});
    assert_eq!(
        guest.refused("process.Process/SendInput", &closed).0,
        "failed_precondition"
    );
}
