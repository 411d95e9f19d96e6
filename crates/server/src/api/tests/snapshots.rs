use super::*;

#[tokio::test]
async fn snapshots_are_taken_listed_and_deleted() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let (status, full) = server
        .post("/v1/agents/demo/snapshots", json!({"label": "before"}))
        .await;
    assert_eq!(status, StatusCode::CREATED, "{full}");
    assert_eq!(
        (&full["kind"], &full["label"]),
        (&json!("full"), &json!("before"))
    );
    let (_, files) = server
        .post("/v1/agents/demo/snapshots", json!({"files_only": true}))
        .await;
    assert_eq!((&files["kind"], &files["parent"]), (&json!("files"), &full["id"]));
    // A list says what each holds of files, too.
    let listed = async || {
        let (_, mut listed) = server.get("/v1/agents/demo/snapshots").await;
        for snapshot in listed.as_array_mut().unwrap() {
            let held = snapshot.as_object_mut().unwrap().remove("files");
            assert!(held.is_some_and(|held| held.is_u64()));
        }
        listed
    };
    assert_eq!(listed().await, json!([full, files]));
    assert_eq!(
        server.delete("/v1/agents/demo/snapshots/before").await.0,
        StatusCode::NO_CONTENT
    );
    let gone = server.delete("/v1/agents/demo/snapshots/before").await;
    assert_error(&gone, StatusCode::NOT_FOUND, "not_found");
    let mut first = files.clone();
    first.as_object_mut().unwrap().remove("parent");
    assert_eq!(listed().await, json!([first]));
    assert_eq!(server.homes.snapshot_count(), 1);
}

#[tokio::test]
async fn an_agent_is_rolled_back_and_what_it_was_is_kept() {
    let server = Server::new().await;
    let id: Id = server.create(json!({"name": "demo"})).await["id"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    server.engine.remember(&id, "old");
    server
        .post("/v1/agents/demo/snapshots", json!({"label": "old"}))
        .await;
    server.engine.remember(&id, "new");
    let (status, back) = server
        .post("/v1/agents/demo/rollback", json!({"snapshot": "old"}))
        .await;
    assert_eq!(status, StatusCode::OK, "{back}");
    assert_eq!(
        (&back["agent"]["state"], &back["before"]["kind"]),
        (&json!("running"), &json!("full"))
    );
    assert_eq!(server.engine.memory(&id).as_deref(), Some("old"));
    let missing = server
        .post("/v1/agents/demo/rollback", json!({"snapshot": "none"}))
        .await;
    assert_error(&missing, StatusCode::NOT_FOUND, "not_found");
}

#[tokio::test]
async fn forks_are_running_copies_with_names_of_their_own() {
    let server = Server::new().await;
    let id: Id = server.create(json!({"name": "demo"})).await["id"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    server.engine.remember(&id, "a secret");
    let (status, forks) = server
        .post("/v1/agents/demo/fork", json!({"name": "copy", "count": 3}))
        .await;
    assert_eq!(status, StatusCode::CREATED, "{forks}");
    for (n, fork) in (1..).zip(forks.as_array().unwrap()) {
        assert_eq!(fork["name"], format!("copy-{n}"));
        assert_eq!(fork["state"], "running");
        let id: Id = fork["id"].as_str().unwrap().parse().unwrap();
        assert_eq!(server.engine.memory(&id).as_deref(), Some("a secret"));
    }
    let taken = server
        .post("/v1/agents/demo/fork", json!({"name": "copy-1"}))
        .await;
    assert_error(&taken, StatusCode::CONFLICT, "already_exists");
    for wrong in [json!({"name": "Copy"}), json!({"name": "x", "count": 0})] {
        let refused = server.post("/v1/agents/demo/fork", wrong).await;
        assert_error(&refused, StatusCode::BAD_REQUEST, "invalid_argument");
    }
    assert_eq!(server.get("/v1/agents").await.1.as_array().unwrap().len(), 4);
}
