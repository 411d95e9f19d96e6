use super::*;

#[tokio::test]
async fn an_agent_is_created_listed_shown_stopped_started_and_deleted() {
    let server = Server::new().await;
    let agent = server
        .create(json!({"name": "demo", "cpus": 0.5, "env": {"A": "b"}}))
        .await;
    assert_eq!(agent["state"], "running");
    assert_eq!(
        (&agent["cpus"], &agent["env"]["A"], &agent["template"]),
        (&json!(0.5), &json!("b"), &json!("base"))
    );
    assert_eq!(
        (&agent["memory"], &agent["pids"]),
        (&json!(1u64 << 30), &json!(512))
    );
    assert_eq!(agent["address"], "10.99.0.1");
    assert!(agent["pid"].as_i64().unwrap() > 0);

    assert_eq!(server.get("/v1/agents").await.1.as_array().unwrap().len(), 1);
    let id = agent["id"].as_str().unwrap();
    for name in ["demo", id] {
        assert_eq!(server.get(&format!("/v1/agents/{name}")).await.1["id"], id);
    }

    let (status, stopped) = server.post("/v1/agents/demo/stop", json!({"grace": 0.5})).await;
    assert_eq!((status, &stopped["state"]), (StatusCode::OK, &json!("stopped")));
    assert_eq!(
        (&stopped["address"], &stopped["pid"]),
        (&Value::Null, &Value::Null)
    );
    let (status, started) = server.post("/v1/agents/demo/start", Value::Null).await;
    assert_eq!((status, &started["state"]), (StatusCode::OK, &json!("running")));

    let (status, body) = server.call(Method::DELETE, "/v1/agents/demo", Value::Null).await;
    assert_eq!((status, body), (StatusCode::NO_CONTENT, json!("")));
    assert_error(
        &server.get("/v1/agents/demo").await,
        StatusCode::NOT_FOUND,
        "not_found",
    );
    assert_eq!(server.homes.count(), 0);
}

#[tokio::test]
async fn an_agent_has_the_isolation_that_was_asked_for_or_is_refused_with_the_reason() {
    let server = Server::new().await;
    for (asked, given) in [
        (Value::Null, "container"),
        (json!("gvisor"), "gvisor"),
        (json!("auto"), "gvisor"),
    ] {
        let name = format!("demo-{}", asked.as_str().unwrap_or("none"));
        let agent = server.create(json!({"name": name, "isolation": asked})).await;
        assert_eq!(agent["isolation"], given);
        assert_eq!(agent["runs_on"]["engine"], format!("a fake {given}"));
    }
    let refused = server
        .post("/v1/agents", json!({"name": "virtual", "isolation": "vm"}))
        .await;
    assert_error(&refused, StatusCode::SERVICE_UNAVAILABLE, "unavailable");
    let message = refused.1["message"].as_str().unwrap();
    assert_eq!(message, "vm boxes cannot be run here: the fake has none");
    let unknown = json!({"name": "strange", "isolation": "chroot"});
    let refused = server.post("/v1/agents", unknown).await;
    assert_error(&refused, StatusCode::BAD_REQUEST, "invalid_argument");
}

#[tokio::test]
async fn events_tell_the_story_newest_first() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    server.post("/v1/agents/demo/stop", Value::Null).await;
    let (_, events) = server.get("/v1/agents/demo/events").await;
    let story: Vec<_> = events
        .as_array()
        .unwrap()
        .iter()
        .map(|event| event["to"].as_str().unwrap())
        .collect();
    assert_eq!(story, ["stopped", "stopping", "running", "starting"]);
    assert!(events[0]["millis"].is_i64());
    assert_eq!(events[3]["from"], Value::Null);
    let (_, newest) = server.get("/v1/agents/demo/events?limit=1").await;
    assert_eq!(newest.as_array().unwrap().len(), 1);
    let unknown = server.get("/v1/agents/demo/events?first=1").await;
    assert_error(&unknown, StatusCode::BAD_REQUEST, "invalid_argument");
}

#[tokio::test]
async fn stats_are_those_of_the_box_while_there_is_one() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let (_, stats) = server.get("/v1/agents/demo/stats").await;
    assert_eq!(
        (&stats["cpu_seconds"], &stats["pids"], &stats["disk_used"]),
        (&json!(1.5), &json!(1), &json!(4096))
    );
    server.post("/v1/agents/demo/stop", Value::Null).await;
    let (_, stats) = server.get("/v1/agents/demo/stats").await;
    assert_eq!(
        (&stats["pids"], &stats["memory_limit"]),
        (&json!(0), &json!(1u64 << 30))
    );
}

#[tokio::test]
async fn what_is_wrong_with_a_new_agent_is_said_and_nothing_is_made() {
    let server = Server::new().await;
    let long = "a".repeat(64);
    let big = "x".repeat(70_000);
    let bad = [
        json!({}),
        json!({"name": ""}),
        json!({"name": "Demo"}),
        json!({"name": "1demo"}),
        json!({"name": "demo-"}),
        json!({"name": "-demo"}),
        json!({"name": "../demo"}),
        json!({"name": "dé"}),
        json!({"name": long}),
        json!({"name": 7}),
        json!({"name": "demo", "colour": "red"}),
        json!({"name": "demo", "cpus": 0}),
        json!({"name": "demo", "cpus": -1}),
        json!({"name": "demo", "cpus": 1e9}),
        json!({"name": "demo", "cpus": "two"}),
        json!({"name": "demo", "memory": 1 << 20}),
        json!({"name": "demo", "memory": -5}),
        json!({"name": "demo", "disk": 1}),
        json!({"name": "demo", "disk": u64::MAX}),
        json!({"name": "demo", "pids": 1}),
        json!({"name": "demo", "pids": u64::MAX}),
        json!({"name": "demo", "env": {"": "x"}}),
        json!({"name": "demo", "env": {"A=B": "x"}}),
        json!({"name": "demo", "env": {"1A": "x"}}),
        json!({"name": "demo", "env": {"A": "x\u{0}y"}}),
        json!({"name": "demo", "env": {"A": 1}}),
        json!({"name": "demo", "lifetime": "forever"}),
        json!({"name": "demo", "start": "yes"}),
        json!([1, 2]),
    ];
    for body in bad {
        let answer = server.post("/v1/agents", body.clone()).await;
        assert_error(&answer, StatusCode::BAD_REQUEST, "invalid_argument");
        assert!(
            answer.1["hint"].is_string() || body["env"]["A"].is_string(),
            "{body}: {}",
            answer.1
        );
    }
    let answer = server
        .post("/v1/agents", json!({"name": "demo", "env": {"A": big}}))
        .await;
    assert_error(&answer, StatusCode::PAYLOAD_TOO_LARGE, "too_large");
    let missing = server
        .post("/v1/agents", json!({"name": "demo", "template": "none"}))
        .await;
    assert_error(&missing, StatusCode::NOT_FOUND, "not_found");
    assert_eq!(server.homes.count(), 0);
    assert!(server.state.registry.all().is_empty());
}

#[tokio::test]
async fn bytes_that_are_no_json_get_a_clear_answer() {
    let server = Server::new().await;
    for body in [
        &b"{"[..],
        b"\xff\xfe",
        b"{\"name\": \"\xff\"}",
        b"null",
        b"\"name\"",
    ] {
        let request = server.request(Method::POST, "/v1/agents", body.to_vec());
        assert_error(
            &read(server.send(request).await).await,
            StatusCode::BAD_REQUEST,
            "invalid_argument",
        );
    }
}

#[tokio::test]
async fn an_environment_that_would_not_fit_the_boot_message_is_refused() {
    let env = [("A".to_owned(), "\u{1}".repeat(20_000))].into();
    let refused = crate::api::validate::env(&env).unwrap_err();
    assert!(refused.body.message.contains("more than 65536"), "{refused:?}");
}

#[tokio::test]
async fn a_taken_name_a_full_pool_and_a_failed_start_are_told_apart() {
    let server = Server::new().await;
    server.create(json!({"name": "demo", "start": false})).await;
    let taken = server.post("/v1/agents", json!({"name": "demo"})).await;
    assert_error(&taken, StatusCode::CONFLICT, "already_exists");
    server.homes.fill(true);
    let full = server.post("/v1/agents", json!({"name": "two"})).await;
    assert_error(&full, StatusCode::INSUFFICIENT_STORAGE, "no_space");
    server.homes.fill(false);
    server.engine.fail_next_start("the moon was in the wrong house");
    let failed = server.post("/v1/agents/demo/start", Value::Null).await;
    assert_error(&failed, StatusCode::INTERNAL_SERVER_ERROR, "internal");
    assert!(
        failed.1["message"]
            .as_str()
            .unwrap()
            .contains("the moon was in the wrong house"),
        "{}",
        failed.1
    );
    let (_, agent) = server.get("/v1/agents/demo").await;
    assert_eq!(agent["state"], "failed");
    assert!(agent["reason"].as_str().unwrap().contains("moon"));
}

#[tokio::test]
async fn a_grace_that_is_no_time_is_refused() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    for grace in [json!(-1), json!(1e300), json!("soon")] {
        let answer = server.post("/v1/agents/demo/stop", json!({"grace": grace})).await;
        assert_error(&answer, StatusCode::BAD_REQUEST, "invalid_argument");
    }
    assert_eq!(server.get("/v1/agents/demo").await.1["state"], "running");
}

#[tokio::test]
async fn an_ephemeral_agent_is_gone_once_stopped() {
    let server = Server::new().await;
    server
        .create(json!({"name": "brief", "lifetime": "ephemeral"}))
        .await;
    assert_eq!(
        server.post("/v1/agents/brief/stop", Value::Null).await.0,
        StatusCode::OK
    );
    assert_eq!(server.get("/v1/agents").await.1, json!([]));
}
