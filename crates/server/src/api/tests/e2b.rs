//! The E2B API on engines that exist only in memory.

use std::time::Duration;

use super::*;
use crate::e2b;
use crate::records::{PauseMode, State};

impl Server {
    async fn sandbox(&self, body: Value) -> Value {
        let mut new = json!({ "templateID": "base" });
        for (key, value) in body.as_object().unwrap() {
            new[key] = value.clone();
        }
        let (status, made) = self.post("/v2/sandboxes", new).await;
        assert_eq!(status, StatusCode::CREATED, "{made}");
        made
    }

    fn agent_of(&self, sandbox: &Value) -> Arc<crate::lifecycle::Agent> {
        let id = sandbox["sandboxID"].as_str().unwrap().parse().unwrap();
        self.state.registry.by_id(&id).unwrap()
    }

    async fn state_of(&self, sandbox: &Value) -> Value {
        let (status, detail) = self.get(&path_of(sandbox, "")).await;
        assert_eq!(status, StatusCode::OK, "{detail}");
        detail["state"].clone()
    }
}

fn path_of(sandbox: &Value, verb: &str) -> String {
    format!("/sandboxes/{}{verb}", sandbox["sandboxID"].as_str().unwrap())
}

#[tokio::test]
async fn a_sandbox_is_an_agent_and_says_what_an_sdk_needs() {
    let server = Server::new().await;
    let made = server
        .sandbox(
            json!({ "metadata": { "a": "b" }, "envVars": { "K": "v" }, "autoPause": true,
            "autoResume": { "enabled": true }, "futureField": 1 }),
        )
        .await;
    assert_eq!(made["envdVersion"], "0.6.13");
    assert!(made["envdAccessToken"].as_str().unwrap().len() > 20 && made["clientID"].is_string());
    let agent = server.agent_of(&made);
    assert_eq!(agent.state(), State::Running);
    assert_eq!(agent.profile.spec.env["K"], "v");
    let (_, detail) = server.get(&path_of(&made, "")).await;
    assert_eq!(detail["state"], "running");
    assert_eq!(detail["metadata"], json!({ "a": "b" }));
    assert_eq!(
        detail["lifecycle"],
        json!({ "autoResume": true, "onTimeout": "pause" })
    );
    assert_eq!(detail["alias"], "base");
    assert!(detail["endAt"].as_str() > detail["startedAt"].as_str());
    let (_, agents) = server.get("/v1/agents").await;
    assert_eq!(agents[0]["id"], made["sandboxID"]);
}

#[tokio::test]
async fn the_same_idempotency_key_makes_one_sandbox() {
    let server = Server::new().await;
    let create = || async {
        let body = json!({ "templateID": "base" }).to_string();
        let mut request = server.request(Method::POST, "/v2/sandboxes", body);
        request
            .headers_mut()
            .insert("idempotency-key", "k-1".parse().unwrap());
        read(server.send(request).await).await
    };
    let (first, second) = tokio::join!(create(), create());
    assert_eq!((first.0, second.0), (StatusCode::CREATED, StatusCode::CREATED));
    assert_eq!(first.1["sandboxID"], second.1["sandboxID"]);
    assert_eq!(server.state.registry.all().len(), 1);
    server.delete(&path_of(&first.1, "")).await;
    let (_, third) = create().await;
    assert_ne!(third["sandboxID"], first.1["sandboxID"]);
}

#[tokio::test]
async fn a_pause_lasts_until_connect_which_keeps_id_and_token() {
    let server = Server::new().await;
    let made = server.sandbox(json!({ "timeout": 100 })).await;
    let pause = async || server.post(&path_of(&made, "/pause"), json!({})).await;
    assert_eq!(pause().await.0, StatusCode::NO_CONTENT);
    assert_eq!(server.agent_of(&made).state(), State::Hibernated);
    assert_eq!(server.state_of(&made).await, "paused");
    let (status, error) = pause().await;
    assert_eq!((status, &error["code"]), (StatusCode::CONFLICT, &json!(409)));
    // Old SDKs try to set the timeout, and resume when that fails.
    let (status, _) = server
        .post(&path_of(&made, "/timeout"), json!({ "timeout": 9 }))
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let connect = async || {
        let path = format!("/v2{}", path_of(&made, "/connect"));
        server.post(&path, json!({ "timeout": 1000 })).await
    };
    let (status, back) = connect().await;
    assert_eq!(status, StatusCode::CREATED, "{back}");
    assert_eq!(back["sandboxID"], made["sandboxID"]);
    assert_eq!(back["envdAccessToken"], made["envdAccessToken"]);
    assert_eq!(connect().await.0, StatusCode::OK);
    assert_eq!(server.state_of(&made).await, "running");
    let (status, _) = server.post(&path_of(&made, "/resume"), json!({})).await;
    assert_eq!(status, StatusCode::CONFLICT);
}

#[tokio::test]
async fn connect_never_shortens_a_running_time() {
    let server = Server::new().await;
    let made = server.sandbox(json!({ "timeout": 1000 })).await;
    let end = || async { server.get(&path_of(&made, "")).await.1["endAt"].clone() };
    let before = end().await;
    let (status, _) = server.post(&path_of(&made, "/connect"), Value::Null).await;
    assert_eq!((status, end().await), (StatusCode::OK, before.clone()));
    server
        .post(&path_of(&made, "/refreshes"), json!({ "duration": 1 }))
        .await;
    assert_eq!(end().await, before);
    let (status, _) = server
        .post(&path_of(&made, "/timeout"), json!({ "timeout": 1 }))
        .await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    assert!(end().await.as_str() < before.as_str());
}

#[tokio::test]
async fn a_pause_without_memory_leaves_the_files_alone() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    let (status, _) = server
        .post(&path_of(&made, "/pause"), json!({ "memory": false }))
        .await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    assert_eq!(server.agent_of(&made).state(), State::Stopped);
    let (_, detail) = server.get(&path_of(&made, "")).await;
    assert_eq!(
        (&detail["state"], &detail["pauseMode"]),
        (&json!("paused"), &json!("filesystem"))
    );
}

#[tokio::test]
async fn a_timeout_of_zero_ends_or_pauses_at_once() {
    let server = Server::new().await;
    let zero = |made: Value| {
        let server = &server;
        async move {
            server
                .post(&path_of(&made, "/timeout"), json!({ "timeout": 0 }))
                .await
                .0
        }
    };
    let killed = server.sandbox(json!({})).await;
    assert_eq!(zero(killed.clone()).await, StatusCode::NO_CONTENT);
    assert_eq!(server.get(&path_of(&killed, "")).await.0, StatusCode::NOT_FOUND);
    let paused = server.sandbox(json!({ "autoPause": true })).await;
    assert_eq!(zero(paused.clone()).await, StatusCode::NO_CONTENT);
    assert_eq!(server.state_of(&paused).await, "paused");
    let files = server
        .sandbox(json!({ "autoPause": true, "autoPauseMemory": false }))
        .await;
    assert_eq!(zero(files.clone()).await, StatusCode::NO_CONTENT);
    assert_eq!(server.agent_of(&files).state(), State::Stopped);
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    for _ in 0..400 {
        if is_so().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn what_is_over_ends_by_itself() {
    let server = Server::new().await;
    let short = server.sandbox(json!({ "timeout": 1 })).await;
    let long = server.sandbox(json!({ "timeout": 1000 })).await;
    e2b::watch(&server.state);
    until("the short one ends", async || {
        server.get(&path_of(&short, "")).await.0 == StatusCode::NOT_FOUND
    })
    .await;
    assert_eq!(server.state_of(&long).await, "running");
    server
        .post(&path_of(&long, "/timeout"), json!({ "timeout": 1 }))
        .await;
    until("the other ends when its time is cut", async || {
        server.get(&path_of(&long, "")).await.0 == StatusCode::NOT_FOUND
    })
    .await;
}

#[tokio::test]
async fn what_is_woken_by_other_means_is_no_longer_paused() {
    let server = Server::new().await;
    e2b::watch(&server.state);
    let made = server.sandbox(json!({})).await;
    server.post(&path_of(&made, "/pause"), json!({})).await;
    server.agent_of(&made).start().await.unwrap();
    until("it counts as running", async || {
        server.state_of(&made).await == "running"
    })
    .await;
}

#[tokio::test]
async fn lists_are_filtered_sorted_and_cut_into_pages() {
    let server = Server::new().await;
    let mut ids = Vec::new();
    for n in 0..5 {
        let made = server
            .sandbox(json!({ "metadata": { "n": n.to_string(), "all": "a b" } }))
            .await;
        ids.push(made["sandboxID"].clone());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    server.create(json!({ "name": "own" })).await;
    server
        .post(
            &format!("/sandboxes/{}/pause", ids[1].as_str().unwrap()),
            json!({}),
        )
        .await;
    let list = |query: &str| {
        let path = format!("/v2/sandboxes?{query}");
        let server = &server;
        async move {
            let response = server.send(server.request(Method::GET, &path, "")).await;
            let next = response.headers().get("x-next-token").cloned();
            let (status, body) = read(response).await;
            assert_eq!(status, StatusCode::OK, "{body}");
            let ids: Vec<Value> = body
                .as_array()
                .unwrap()
                .iter()
                .map(|one| one["sandboxID"].clone())
                .collect();
            (ids, next.map(|next| next.to_str().unwrap().to_owned()))
        }
    };
    let mut newest_first = ids.clone();
    newest_first.reverse();
    assert_eq!(list("").await, (newest_first.clone(), None));
    assert_eq!(list("order=asc").await.0, ids);
    assert_eq!(list("state=paused").await.0, [ids[1].clone()]);
    assert_eq!(list("state=paused,running").await.0.len(), 5);
    assert_eq!(list("metadata=n%3D3%26all%3Da%252520b").await.0, [ids[3].clone()]);
    assert_eq!(list("template=base").await.0.len(), 5);
    assert_eq!(list("template=other").await.0.len(), 0);
    assert_eq!(list("startedAfter=2999-01-01T00:00:00Z").await.0.len(), 0);
    let (first, next) = list("limit=3").await;
    let (second, end) = list(&format!("limit=3&nextToken={}", next.unwrap())).await;
    assert_eq!(
        (first.as_slice(), second.as_slice(), end),
        (&newest_first[..3], &newest_first[3..], None)
    );
    let (status, error) = server.get("/v2/sandboxes?state=dead").await;
    assert_eq!((status, &error["code"]), (StatusCode::BAD_REQUEST, &json!(400)));
}

#[tokio::test]
async fn a_snapshot_outlives_its_sandbox_and_is_a_template() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    let (status, snapshot) = server
        .post(&path_of(&made, "/snapshots"), json!({ "name": "team/gold:v1" }))
        .await;
    assert_eq!(status, StatusCode::CREATED, "{snapshot}");
    assert_eq!(snapshot["names"], json!(["gold"]));
    assert_eq!(server.delete(&path_of(&made, "")).await.0, StatusCode::NO_CONTENT);
    let (_, listed) = server.get("/snapshots?limit=10").await;
    assert_eq!(listed, json!([snapshot]));
    for template in [&snapshot["snapshotID"], &json!("gold"), &json!("gold:default")] {
        let copy = server
            .sandbox(json!({ "templateID": template, "envVars": { "NEW": "1" } }))
            .await;
        assert_eq!(copy["templateID"], snapshot["snapshotID"]);
        assert_eq!(server.agent_of(&copy).profile.spec.env["NEW"], "1");
    }
    let path = format!("/templates/{}", snapshot["snapshotID"].as_str().unwrap());
    assert_eq!(server.delete(&path).await.0, StatusCode::NO_CONTENT);
    assert_eq!(server.delete(&path).await.0, StatusCode::NOT_FOUND);
    assert_eq!(server.get("/snapshots").await.1, json!([]));
}

#[tokio::test]
async fn forks_are_answered_one_by_one() {
    let server = Server::new().await;
    let made = server.sandbox(json!({ "metadata": { "of": "it" } })).await;
    let (status, forks) = server
        .post(&path_of(&made, "/fork"), json!({ "count": 3, "timeout": 50 }))
        .await;
    assert_eq!(status, StatusCode::CREATED);
    let forks = forks.as_array().unwrap();
    assert_eq!(forks.len(), 3);
    for fork in forks {
        assert_ne!(fork["sandbox"]["sandboxID"], made["sandboxID"]);
        assert_ne!(fork["sandbox"]["envdAccessToken"], made["envdAccessToken"]);
        assert_eq!(server.agent_of(&fork["sandbox"]).state(), State::Running);
    }
    assert_eq!(
        server
            .post(&path_of(&made, "/fork"), json!({ "count": 0 }))
            .await
            .0,
        StatusCode::BAD_REQUEST
    );
}

#[tokio::test]
async fn memory_that_cannot_be_saved_is_refused_and_the_sandbox_goes_on() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    server.engine.cannot_checkpoint("an inconvenient socket");
    let response = server
        .send(server.request(Method::POST, &path_of(&made, "/pause"), "{}"))
        .await;
    assert_eq!(response.headers()["should-retry"], "false");
    let (status, error) = read(response).await;
    assert_eq!(
        (status, &error["code"]),
        (StatusCode::SERVICE_UNAVAILABLE, &json!(503))
    );
    assert_eq!(server.state_of(&made).await, "running");
}

#[tokio::test]
async fn errors_are_in_the_form_that_the_sdks_read() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    let mut request = server.request(Method::GET, &path_of(&made, ""), "");
    request.headers_mut().insert(
        "x-api-key",
        "e2b_0000000000000000000000000000000000000000".parse().unwrap(),
    );
    let (status, error) = read(server.send(request).await).await;
    assert_eq!((status, &error["code"]), (StatusCode::UNAUTHORIZED, &json!(401)));
    let other = Workspace::new("other");
    let (_, key) = server.state.keys.create(&other, "theirs").await.unwrap();
    let mut request = server.request(Method::GET, &path_of(&made, ""), "");
    request.headers_mut().insert("x-api-key", key.parse().unwrap());
    assert_eq!(read(server.send(request).await).await.0, StatusCode::NOT_FOUND);
    for (method, path, body, expected) in [
        (Method::POST, "/v2/sandboxes", "{}", 400),
        (Method::POST, "/v2/sandboxes", "nonsense", 400),
        (Method::POST, "/v2/sandboxes", r#"{"templateID":"none"}"#, 404),
        (
            Method::POST,
            "/v2/sandboxes",
            r#"{"templateID":"base","timeout":-1}"#,
            400,
        ),
        (Method::POST, "/v9/sandboxes", "{}", 404),
        (Method::PATCH, "/sandboxes", "{}", 404),
        (Method::GET, "/sandboxes/aaaaaaaaaaaaaaaaaaaa", "", 404),
        (Method::DELETE, "/sandboxes/no-such", "", 404),
    ] {
        let (status, error) = read(server.send(server.request(method, path, body)).await).await;
        assert_eq!(
            (status.as_u16(), &error["code"]),
            (expected, &json!(expected)),
            "{path} {body}: {error}"
        );
        assert!(error["message"].is_string());
    }
}

#[tokio::test]
async fn when_there_is_no_room_the_client_is_told_when_to_come_again() {
    let server = Server::new().await;
    let max = server.state.config.max_slots;
    for n in 0..max {
        server
            .create(json!({ "name": format!("own-{n}"), "start": false }))
            .await;
    }
    let body = json!({ "templateID": "base" }).to_string();
    let response = server
        .send(server.request(Method::POST, "/v2/sandboxes", body))
        .await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.headers().contains_key("retry-after"));
}

#[tokio::test]
async fn an_agent_of_dorm_is_reached_by_its_id_and_has_no_timeout() {
    let server = Server::new().await;
    let own = server.create(json!({ "name": "own" })).await;
    let made = json!({ "sandboxID": own["id"] });
    assert_eq!(server.state_of(&made).await, "running");
    let (status, back) = server
        .post(&path_of(&made, "/connect"), json!({ "timeout": 0 }))
        .await;
    assert_eq!((status, &back["sandboxID"]), (StatusCode::OK, &own["id"]));
    let (status, _) = server
        .post(&path_of(&made, "/timeout"), json!({ "timeout": 0 }))
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(server.get("/v2/sandboxes").await.1, json!([]));
}

#[tokio::test]
async fn only_what_may_is_woken_from_its_pause_by_a_request() {
    let server = Server::new().await;
    for auto in [false, true] {
        let made = server.sandbox(json!({ "autoResume": { "enabled": auto } })).await;
        let agent = server.agent_of(&made);
        assert!(server.state.sandboxes.admit(&agent).await.is_ok());
        server.post(&path_of(&made, "/pause"), json!({})).await;
        assert_eq!(server.state.sandboxes.admit(&agent).await.is_ok(), auto);
        assert_eq!(agent.state() == State::Running, auto);
    }
}

#[tokio::test]
async fn a_pause_comes_to_its_end_when_whoever_asked_goes_away() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    let agent = server.agent_of(&made);
    let sandbox = server.state.sandboxes.get(&agent.profile.id).unwrap();
    server.engine.hold_stops(true);
    let path = path_of(&made, "/pause");
    let half_done = async {
        let mut published = agent.subscribe();
        let putting_away = |now: &crate::lifecycle::Published| now.status.state == State::Hibernating;
        published.wait_for(putting_away).await.unwrap();
    };
    tokio::select! {
        answered = server.post(&path, json!({})) => panic!("{answered:?}"),
        () = half_done => {}
    }
    server.engine.hold_stops(false);
    let paused = async {
        while !sandbox.is_paused() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let paused = tokio::time::timeout(Duration::from_secs(30), paused).await;
    paused.expect("half of it was done");
    server
        .post(&path_of(&made, "/connect"), json!({ "timeout": 60 }))
        .await;
    assert!(
        server.state.sandboxes.admit(&agent).await.is_ok(),
        "it is not paused any more"
    );
}

#[tokio::test]
async fn of_two_changes_of_a_sandbox_none_is_lost() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    let sandboxes = &server.state.sandboxes;
    let sandbox = sandboxes.get(&server.agent_of(&made).profile.id).unwrap();
    let (paused, connected) = tokio::join!(
        sandboxes.change(&sandbox, |record| record.paused = Some(PauseMode::Full)),
        sandboxes.change(&sandbox, |record| record.allow_internet = Some(false)),
    );
    paused.unwrap();
    connected.unwrap();
    let record = sandbox.record();
    assert_eq!(
        (record.paused, record.allow_internet),
        (Some(PauseMode::Full), Some(false))
    );
}

#[tokio::test]
async fn what_is_used_is_measured_over_time() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    let (status, metrics) = server.get(&path_of(&made, "/metrics")).await;
    assert_eq!((status, metrics.as_array().unwrap().len()), (StatusCode::OK, 1));
    assert!(metrics[0]["memTotal"].as_u64().unwrap() > 0 && metrics[0]["timestampUnix"].is_i64());
    let (_, none) = server.get(&path_of(&made, "/metrics?start=1&end=2")).await;
    assert_eq!(none, json!([]));
    let id = made["sandboxID"].as_str().unwrap();
    let (_, several) = server
        .get(&format!("/sandboxes/metrics?sandbox_ids={id},none"))
        .await;
    assert_eq!(several["sandboxes"].as_object().unwrap().len(), 1);
}

#[tokio::test]
async fn network_settings_are_replaced_as_a_whole() {
    let server = Server::new().await;
    let network = json!({ "allowOut": ["1.1.1.1"], "denyOut": ["0.0.0.0/0"], "allowPublicTraffic": false });
    let made = server.sandbox(json!({ "network": network })).await;
    assert!(made["trafficAccessToken"].is_string());
    assert!(!server.agent_of(&made).reach().public);
    let path = path_of(&made, "/network");
    let (status, _) = server
        .call(Method::PUT, &path, json!({ "denyOut": ["10.0.0.0/8"] }))
        .await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let (_, detail) = server.get(&path_of(&made, "")).await;
    assert_eq!(
        detail["network"],
        json!({ "denyOut": ["10.0.0.0/8"], "allowPublicTraffic": false })
    );
    let open = server.sandbox(json!({})).await;
    assert!(open["trafficAccessToken"].is_null());
}

#[tokio::test]
async fn network_settings_are_replaced_to_the_end_when_whoever_asked_goes_away() {
    let server = Server::new().await;
    let made = server.sandbox(json!({})).await;
    let agent = server.agent_of(&made);
    server.engine.hold_networks(true);
    let settings = json!({ "denyOut": ["1.1.1.1/32"] });
    let path = path_of(&made, "/network");
    let half_done = async {
        while agent.network().deny.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        answered = server.call(Method::PUT, &path, settings.clone()) => panic!("{answered:?}"),
        () = half_done => {}
    }
    server.engine.hold_networks(false);
    let replaced = async {
        while server.get(&path_of(&made, "")).await.1["network"] != settings {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let replaced = tokio::time::timeout(Duration::from_secs(30), replaced).await;
    replaced.expect("half of it was done");
}

#[tokio::test]
async fn a_secret_goes_in_and_never_out() {
    let server = Server::new().await;
    let (status, made) = server
        .post(
            "/secrets",
            json!({ "name": "token", "value": "hush", "metadata": { "a": "b" } }),
        )
        .await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    assert_eq!(
        (&made["currentVersion"], &made["metadata"]),
        (&json!(1), &json!({ "a": "b" }))
    );
    let (status, _) = server
        .post("/secrets", json!({ "name": "token", "value": "x" }))
        .await;
    assert_eq!(status, StatusCode::CONFLICT);
    let (_, changed) = server.post("/secrets/token", json!({ "value": "new" })).await;
    assert_eq!(changed["currentVersion"], 2);
    let path = format!("/secrets/{}", made["secretID"].as_str().unwrap());
    assert_eq!(server.get(&path).await.1, changed);
    let (_, listed) = server.get("/secrets?limit=5").await;
    assert_eq!(listed, json!([changed]));
    assert!(!listed.to_string().contains("hush"));
    assert_eq!(server.delete(&path).await.0, StatusCode::NO_CONTENT);
    assert_eq!(server.delete(&path).await.0, StatusCode::NOT_FOUND);
}
