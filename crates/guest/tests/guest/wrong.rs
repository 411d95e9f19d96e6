use serde_json::json;

use crate::client::{Guest, shell, with};

#[test]
fn what_cannot_be_started_is_an_error_and_no_exit_code() {
    let guest = Guest::start();
    let script = guest.folder().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let plain = guest.folder().join("plain");
    std::fs::write(&plain, "just text").unwrap();
    for (request, code, text) in [
        (
            json!({"process": {"cmd": "no-such-command"}}),
            "not_found",
            "command not found: no-such-command",
        ),
        (
            json!({"process": {"cmd": "/no/such/file"}}),
            "not_found",
            "/no/such/file",
        ),
        (
            json!({"process": {"cmd": "/etc/passwd"}}),
            "permission_denied",
            "/etc/passwd",
        ),
        (json!({"process": {"cmd": "/etc"}}), "permission_denied", "/etc"),
        (
            json!({"process": {"cmd": script}}),
            "failed_precondition",
            "interpreter",
        ),
        (
            json!({"process": {"cmd": "true", "cwd": "/no/such/folder"}}),
            "invalid_argument",
            "does not exist",
        ),
        (
            json!({"process": {"cmd": "true", "cwd": "/etc/passwd"}}),
            "invalid_argument",
            "not a folder",
        ),
        (json!({"process": {"cmd": ""}}), "invalid_argument", "empty"),
        (json!({}), "invalid_argument", "no process"),
        (json!({"process": {"cmd": "a\u{0}b"}}), "invalid_argument", "NUL"),
        (
            json!({"process": {"cmd": "true", "envs": {"A=B": "c"}}}),
            "invalid_argument",
            "A=B",
        ),
        (
            with(shell("true"), json!({"user": "no-such-user"})),
            "invalid_argument",
            "no-such-user",
        ),
        (
            with(
                shell("true"),
                json!({"pty": {"size": {"cols": 70000, "rows": 1}}}),
            ),
            "invalid_argument",
            "65535",
        ),
    ] {
        let output = guest.start_run(&request).output();
        assert_eq!(output.error["code"], code, "{request}: {}", output.error);
        assert!(
            output.error["message"].as_str().unwrap().contains(text),
            "{}",
            output.error
        );
        assert!(output.end.is_null(), "{request} has no end");
    }
    assert_eq!(
        guest.call("process.Process/List", &json!({"ended": true})),
        json!({})
    );
}

#[test]
fn a_default_folder_that_is_missing_is_no_reason_to_fail() {
    let guest = Guest::start();
    let output = guest
        .start_run(&with(shell("pwd"), json!({"user": "nobody"})))
        .output();
    assert_eq!(output.stdout, "/\n");
}

#[test]
fn selectors_that_select_nothing_are_told_so() {
    let guest = Guest::start();
    for method in ["SendSignal", "CloseStdin", "SendInput", "Update", "Forget"] {
        let method = format!("process.Process/{method}");
        assert_eq!(
            guest.refused(&method, &json!({"process": {"pid": 4_000_000}})).0,
            "not_found"
        );
        assert_eq!(
            guest.refused(&method, &json!({"process": {"tag": "none"}})).0,
            "not_found"
        );
        assert_eq!(guest.refused(&method, &json!({})).0, "invalid_argument");
    }
}

#[test]
fn a_signal_that_does_not_exist_is_refused() {
    let guest = Guest::start();
    let mut events = guest.start_run(&shell("sleep 60"));
    let (pid, _) = events.started();
    for bad in [
        json!({"number": 99}),
        json!({"number": 4_294_967_295u32}),
        json!({}),
    ] {
        let request = with(json!({"process": {"pid": pid}}), bad);
        assert_eq!(
            guest.refused("process.Process/SendSignal", &request).0,
            "invalid_argument"
        );
    }
}

#[test]
fn malformed_requests_are_refused_and_the_guest_goes_on() {
    let guest = Guest::start();
    let json_type = [("Content-Type", "application/json")];
    assert_eq!(
        guest
            .request("POST", "/process.Process/List", &json_type, b"{not json")
            .status,
        400
    );
    assert_eq!(
        guest
            .request("POST", "/process.Process/NoSuch", &json_type, b"{}")
            .status,
        404
    );
    assert_eq!(
        guest
            .request(
                "POST",
                "/process.Process/List",
                &[("Content-Type", "text/html")],
                b""
            )
            .status,
        415
    );
    assert_eq!(guest.request("POST", "/init", &[], b"[1]").status, 400);
    assert_eq!(guest.get("/nowhere").status, 404);
    assert_eq!(guest.request("DELETE", "/files", &[], b"").status, 405);
    let huge = vec![b' '; 9 << 20];
    assert_ne!(
        guest
            .request("POST", "/process.Process/List", &json_type, &huge)
            .status,
        200
    );
    let bad_user = [("Authorization", "Basic !!!")];
    assert_eq!(
        guest
            .unary("filesystem.Filesystem/Stat", &json!({"path": "/"}), &bad_user)
            .status,
        401
    );
    assert_eq!(guest.get("/health").status, 204);
}

#[test]
fn fields_of_a_newer_client_are_ignored() {
    let guest = Guest::start();
    let answer = guest.call("process.Process/List", &json!({"fieldOfTomorrow": {"a": [1, 2]}}));
    assert_eq!(answer, json!({}));
    let output = guest
        .start_run(&with(shell("echo ok"), json!({"fieldOfTomorrow": true})))
        .output();
    assert_eq!(output.stdout, "ok\n");
}
