use futures_util::StreamExt as _;

use super::*;

#[tokio::test]
async fn an_agent_is_paused_put_to_disk_and_woken() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    for (verb, state) in [
        ("pause", "standby"),
        ("wake", "running"),
        ("hibernate", "hibernated"),
        ("pause", "hibernated"),
        ("wake", "running"),
        ("pause", "standby"),
        ("hibernate", "hibernated"),
        ("stop", "stopped"),
        ("wake", "running"),
    ] {
        let answer = server.post(&format!("/v1/agents/demo/{verb}"), Value::Null).await;
        assert_eq!(answer.0, StatusCode::OK, "{}", answer.1);
        assert_eq!(answer.1["state"], state, "after {verb}: {}", answer.1);
    }
}

#[tokio::test]
async fn whatever_reaches_for_a_sleeping_agent_wakes_it() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    for verb in ["pause", "hibernate"] {
        server.post(&format!("/v1/agents/demo/{verb}"), Value::Null).await;
        assert_eq!(server.get("/v1/agents/demo/guest/health").await.0, StatusCode::OK);
        assert_eq!(server.get("/v1/agents/demo").await.1["state"], "running");
    }
    assert_eq!(
        (
            server.engine.starts(),
            server.engine.restores(),
            server.engine.thaws()
        ),
        (1, 1, 1)
    );
}

#[tokio::test]
async fn a_hundred_requests_to_a_hibernated_agent_cause_one_wake_and_all_succeed() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    server.post("/v1/agents/demo/hibernate", Value::Null).await;
    let all = (0..100).map(|_| server.get("/v1/agents/demo/guest/health"));
    for (status, _) in futures_util::future::join_all(all).await {
        assert_eq!(status, StatusCode::OK);
    }
    assert_eq!(server.engine.restores(), 1);
}

#[tokio::test]
async fn an_open_stream_is_cut_when_the_agent_is_put_to_disk() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let request = server.request(Method::GET, "/v1/agents/demo/guest/endless", Body::empty());
    let mut body = server.send(request).await.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "first");
    let answer = server.post("/v1/agents/demo/hibernate", Value::Null).await;
    assert_eq!(answer.1["state"], "hibernated", "{}", answer.1);
    assert!(
        body.frame().await.unwrap().is_err(),
        "the stream is cut, not ended"
    );
    let agent = server.state.registry.get(&Workspace::default(), "demo").unwrap();
    assert_eq!(agent.links.count(), 0);
}

#[tokio::test]
async fn an_open_stream_stays_open_when_the_agent_is_paused() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let request = server.request(Method::GET, "/v1/agents/demo/guest/endless", Body::empty());
    let mut body = server.send(request).await.into_body();
    body.frame().await.unwrap().unwrap();
    server.post("/v1/agents/demo/pause", Value::Null).await;
    let agent = server.state.registry.get(&Workspace::default(), "demo").unwrap();
    assert_eq!(agent.links.count(), 1);
}

#[tokio::test]
async fn what_cannot_be_saved_is_told_with_its_reason() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    server
        .engine
        .fail_next_checkpoint("process 7 (node) uses io_uring");
    let answer = server.post("/v1/agents/demo/hibernate", Value::Null).await;
    assert_error(&answer, StatusCode::CONFLICT, "conflict");
    assert!(
        answer.1["message"]
            .as_str()
            .unwrap()
            .contains("process 7 (node) uses io_uring")
    );
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert_eq!(why["state"], "running");
    assert!(
        why["setback"]["what"].as_str().unwrap().contains("io_uring"),
        "{why}"
    );
    server.engine.cannot_checkpoint("criu is too old");
    let answer = server.post("/v1/agents/demo/hibernate", Value::Null).await;
    assert_error(&answer, StatusCode::CONFLICT, "conflict");
    assert!(answer.1["message"].as_str().unwrap().contains("criu is too old"));
    server.create(json!({"name": "stopped", "start": false})).await;
    let answer = server.post("/v1/agents/stopped/pause", Value::Null).await;
    assert_error(&answer, StatusCode::CONFLICT, "conflict");
}

#[tokio::test]
async fn why_says_what_keeps_it_awake_and_what_comes_next() {
    let server = Server::new().await;
    server.create(json!({"name": "demo", "standby_after": 60})).await;
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert_eq!(why["next"]["state"], "standby", "{why}");
    let left = why["next"]["at"].as_i64().unwrap() - now();
    assert!((50_000..=60_000).contains(&left), "{left}");
    assert!(
        why["because"][0].as_str().unwrap().starts_with("it was used"),
        "{why}"
    );

    let request = server.request(Method::GET, "/v1/agents/demo/guest/endless", Body::empty());
    let open = server.send(request).await;
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert_eq!(why["because"][0], "a request or stream is open");
    assert!(why.get("next").is_none(), "{why}");
    drop(open);

    server.post("/v1/agents/demo/pause", Value::Null).await;
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert_eq!(
        (&why["reason"], &why["next"]["state"]),
        (&json!("asked to pause"), &json!("standby, durable"))
    );
    server.post("/v1/agents/demo/hibernate", Value::Null).await;
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert!(
        why["memory"]
            .as_str()
            .unwrap()
            .starts_with("a memory image on disk"),
        "{why}"
    );

    server.create(json!({"name": "always", "keep_awake": true})).await;
    let (_, why) = server.get("/v1/agents/always/why").await;
    assert_eq!(why["because"][0], "it is to be kept awake");
    assert!(why.get("next").is_none(), "{why}");
}

#[tokio::test]
async fn when_an_agent_goes_to_sleep_is_changed_later_and_told() {
    let server = Server::new().await;
    server.create(json!({"name": "demo", "standby_after": 60})).await;
    let change = async |body: Value| server.call(Method::PATCH, "/v1/agents/demo", body).await;
    let (status, agent) = change(json!({"standby_after": 30, "hibernate_after": 0.5})).await;
    assert_eq!(status, StatusCode::OK, "{agent}");
    assert_eq!(
        (
            &agent["standby_after"],
            &agent["hibernate_after"],
            &agent["keep_awake"]
        ),
        (&json!(30.0), &json!(0.5), &json!(false))
    );
    assert!(agent.get("durable_after").is_none(), "{agent}");
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert_eq!(
        why["sleep"],
        json!({"standby_after": 30.0, "durable_after": 60.0, "hibernate_after": 0.5})
    );
    let left = why["next"]["at"].as_i64().unwrap() - now();
    assert!((20_000..=30_000).contains(&left), "{left}");

    let (_, agent) = change(json!({"standby_after": null, "keep_awake": true})).await;
    assert!(agent.get("standby_after").is_none(), "{agent}");
    assert_eq!(agent["hibernate_after"], 0.5, "what is absent stays");
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert_eq!(
        (&why["because"][0], &why["sleep"]),
        (&json!("it is to be kept awake"), &json!({"durable_after": 60.0}))
    );
    assert_eq!(change(json!({})).await.1["keep_awake"], true);

    server.post("/v1/agents/demo/hibernate", Value::Null).await;
    let (_, agent) = change(json!({"keep_awake": false, "isolation": "gvisor", "durable_after": 5})).await;
    assert_eq!(
        (&agent["keep_awake"], &agent["isolation"], &agent["durable_after"]),
        (&json!(false), &json!("gvisor"), &json!(5.0)),
        "{agent}"
    );
    server.post("/v1/agents/demo/hibernate", Value::Null).await;
    assert_eq!(change(json!({"durable_after": 0})).await.1["state"], "hibernated");
}

#[tokio::test]
async fn a_wrong_time_to_sleep_changes_nothing() {
    let server = Server::new().await;
    server
        .create(json!({"name": "demo", "standby_after": 60, "start": false}))
        .await;
    let before = server.get("/v1/agents/demo").await;
    for wrong in [
        json!({"standby_after": -1}),
        json!({"hibernate_after": 1e10}),
        json!({"durable_after": "5m"}),
        json!({"keep_awake": null}),
        json!({"keep_awake": true, "durable_after": -1, "isolation": "gvisor"}),
        json!({"sleep": 5}),
    ] {
        let answer = server.call(Method::PATCH, "/v1/agents/demo", wrong).await;
        assert_error(&answer, StatusCode::BAD_REQUEST, "invalid_argument");
    }
    assert_eq!(server.get("/v1/agents/demo").await, before);
    let answer = server.call(Method::PATCH, "/v1/agents/nobody", json!({"keep_awake": true}));
    assert_error(&answer.await, StatusCode::NOT_FOUND, "not_found");
    let (_, document) = server.get("/openapi.json").await;
    let known = &document["components"]["schemas"]["AgentChange"];
    assert_eq!(
        known["properties"]["standby_after"]["type"],
        json!(["number", "null"])
    );
    assert_eq!(known["properties"]["keep_awake"]["type"], "boolean");
    assert!(known.get("required").is_none(), "{known}");
}

#[tokio::test]
async fn holds_are_made_listed_and_released() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let (status, hold) = server
        .post(
            "/v1/agents/demo/holds",
            json!({"seconds": 3600, "reason": "a demonstration"}),
        )
        .await;
    assert_eq!(status, StatusCode::CREATED, "{hold}");
    assert_eq!(server.get("/v1/agents/demo/holds").await.1, json!([hold]));
    assert_eq!(server.get("/v1/holds").await.1, json!([hold]));
    let (_, why) = server.get("/v1/agents/demo/why").await;
    assert!(
        why["because"][0].as_str().unwrap().ends_with("a demonstration"),
        "{why}"
    );
    let one = format!("/v1/agents/demo/holds/{}", hold["id"].as_str().unwrap());
    assert_eq!(server.delete(&one).await.0, StatusCode::NO_CONTENT);
    assert_error(&server.delete(&one).await, StatusCode::NOT_FOUND, "not_found");
    let refused = server.post("/v1/agents/demo/holds", json!({"seconds": -1})).await;
    assert_error(&refused, StatusCode::BAD_REQUEST, "invalid_argument");
    server.post("/v1/agents/demo/holds", json!({"seconds": 5})).await;
    assert_eq!(
        server.delete("/v1/agents/demo/holds").await.0,
        StatusCode::NO_CONTENT
    );
    assert_eq!(server.get("/v1/holds").await.1, json!([]));
}

#[tokio::test]
async fn events_are_followed_as_they_happen() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let request = server.request(Method::GET, "/v1/events?follow=true", Body::empty());
    let response = server.send(request).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut stream = response.into_body().into_data_stream();
    let mut seen = String::new();
    let mut step = 0;
    while !seen.contains(r#""to":"hibernated""#) {
        if seen.contains(r#""to":"running""#) && step == 0 {
            step = 1;
            server.post("/v1/agents/demo/hibernate", Value::Null).await;
        }
        let piece = stream.next().await.unwrap().unwrap();
        seen.push_str(std::str::from_utf8(&piece).unwrap());
    }
    let events: Vec<Value> = seen
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|json| serde_json::from_str(json).unwrap())
        .collect();
    let states: Vec<_> = events.iter().map(|event| event["to"].as_str().unwrap()).collect();
    assert_eq!(states, ["starting", "running", "hibernating", "hibernated"]);
    assert!(events.iter().all(|event| event["name"] == "demo"));
    assert_eq!(events[3]["reason"], "asked to hibernate");
    assert!(events[3]["millis"].is_i64());

    let after = events[1]["seq"].as_i64().unwrap();
    let path = format!("/v1/agents/demo/events?follow=true&after={after}");
    let response = server
        .send(server.request(Method::GET, &path, Body::empty()))
        .await;
    let piece = response
        .into_body()
        .into_data_stream()
        .next()
        .await
        .unwrap()
        .unwrap();
    assert!(piece.starts_with(format!("id: {}", after + 1).as_bytes()));
}

async fn follow(server: &Server, path: &str) -> axum::body::BodyDataStream {
    let request = server.request(Method::GET, path, Body::empty());
    server.send(request).await.into_body().into_data_stream()
}

/// What a stream tells until it ends, or has told this.
async fn told_until(stream: &mut axum::body::BodyDataStream, last: &str) -> Vec<Value> {
    let mut seen = String::new();
    while !seen.contains(last)
        && let Some(piece) = stream.next().await
    {
        seen.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
    }
    let data = seen.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|json| serde_json::from_str(json).unwrap()).collect()
}

#[tokio::test]
async fn whoever_follows_events_hears_of_a_deletion_however_slowly_he_reads() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let (mut all, mut one) = (
        follow(&server, "/v1/events?follow=true&limit=0").await,
        follow(&server, "/v1/agents/demo/events?follow=true&limit=0").await,
    );
    let (_, past) = server.get("/v1/events?limit=1").await;
    server.post("/v1/agents/demo/stop", Value::Null).await;
    server.delete("/v1/agents/demo").await;
    server.create(json!({"name": "later"})).await;
    let told = |events: &[Value]| -> Vec<String> {
        let words = |event: &Value| {
            let word = |key: &str| event[key].as_str().unwrap().to_owned();
            format!("{} {}", word("name"), word("to"))
        };
        events.iter().map(words).collect()
    };
    let last = ["demo stopping", "demo stopped", "demo deleting"];
    let events = told_until(&mut one, "nothing").await;
    assert_eq!(told(&events), last, "and the stream has ended");
    let events = told_until(&mut all, r#""name":"later","time""#).await;
    assert_eq!(told(&events)[..3], last);
    assert!(told(&events)[3..].iter().all(|event| event.starts_with("later")));
    let numbers: Vec<_> = events
        .iter()
        .map(|event| event["seq"].as_i64().unwrap())
        .collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");

    let mut begun_now = follow(&server, "/v1/events?follow=true").await;
    let events = told_until(&mut begun_now, "later").await;
    assert!(
        told(&events).iter().all(|event| event.starts_with("later")),
        "{events:?}"
    );
    let goes_on = format!("/v1/events?follow=true&after={}", past[0]["seq"]);
    let events = told_until(&mut follow(&server, &goes_on).await, "deleting").await;
    assert_eq!(told(&events)[..3], last, "whoever was cut off misses nothing");
}

#[tokio::test]
async fn a_list_with_usage_says_what_agents_hold() {
    let server = Server::new().await;
    server.create(json!({"name": "a"})).await;
    server.create(json!({"name": "b"})).await;
    server.post("/v1/agents/b/hibernate", Value::Null).await;
    let (_, list) = server.get("/v1/agents?usage=true").await;
    assert_eq!(list[0]["memory_used"], 4 << 20, "{list}");
    assert!(list[0]["idle"].is_f64());
    assert_eq!(
        (&list[1]["memory_used"], &list[1]["durable"]),
        (&json!(0), &json!(true))
    );
    assert!(list[1]["disk_used"].as_u64().unwrap() >= 4096);
}

#[tokio::test]
async fn a_request_that_meets_a_pause_is_answered() {
    let server = Server::new().await;
    let id: Id = server.create(json!({"name": "demo"})).await["id"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    // The box is frozen when the request comes, and the state says so only then.
    dorm_engine::Engine::freeze(&*server.engine, &id).await.unwrap();
    let agent = server.state.registry.get(&Workspace::default(), "demo").unwrap();
    let pause = async {
        while agent.links.count() == 0 {
            tokio::task::yield_now().await;
        }
        agent.pause().await.unwrap();
    };
    let (answer, ()) = tokio::join!(server.get("/v1/agents/demo/guest/health"), pause);
    assert_eq!(answer.0, StatusCode::OK, "{}", answer.1);
    assert_eq!(agent.state(), crate::records::State::Running);
}
