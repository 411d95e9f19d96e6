use super::*;

type Answer = http_body_util::combinators::BoxBody<Bytes, Infallible>;

/// A guest: echoes bodies, shows what reached it, and streams without end.
pub(super) async fn answer(request: Request<Incoming>) -> Result<Response<Answer>, Infallible> {
    let path = request.uri().path().to_owned();
    let body: Answer = match path.as_str() {
        "/echo" => {
            let echoed = request.into_body().map_frame(|frame| frame);
            let echoed = echoed.map_err(|_| -> Infallible { unreachable!("tests send whole bodies") });
            return Ok(Response::new(echoed.boxed()));
        }
        "/endless" => {
            let first = futures_util::stream::iter([Ok(Frame::data(Bytes::from("first")))]);
            let endless = futures_util::StreamExt::chain(first, futures_util::stream::pending());
            StreamBody::new(endless).boxed()
        }
        _ => {
            let headers: serde_json::Map<String, Value> = request
                .headers()
                .iter()
                .map(|(name, value)| (name.to_string(), json!(value.to_str().unwrap())))
                .collect();
            let seen = json!({
                "method": request.method().as_str(),
                "uri": request.uri().to_string(),
                "headers": headers,
            });
            Full::from(seen.to_string()).boxed()
        }
    };
    let response = Response::builder()
        .header("x-guest", "yes")
        .header("connection", "x-hop")
        .header("x-hop", "1");
    Ok(response.body(body).unwrap())
}

#[tokio::test]
async fn a_request_reaches_the_guest_as_it_was_sent_but_for_the_key() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let request = Request::builder()
        .method(Method::PATCH)
        .uri("/v1/agents/demo/guest/a%2Fb/c%20d?path=%2Fx&q=1/2")
        .header("x-api-key", &server.key)
        .header("authorization", "Basic dXNlcjo=")
        .header("x-custom", "kept")
        .header("connection", "keep-alive, x-secret-hop")
        .header("x-secret-hop", "dropped")
        .body(Body::empty())
        .unwrap();
    let response = server.send(request).await;
    assert_eq!(response.headers()["x-guest"], "yes");
    assert!(!response.headers().contains_key("x-hop"));
    let (_, seen) = read(response).await;
    assert_eq!(seen["method"], "PATCH");
    assert_eq!(seen["uri"], "/a%2Fb/c%20d?path=%2Fx&q=1/2");
    assert_eq!(seen["headers"]["authorization"], "Basic dXNlcjo=");
    assert_eq!(seen["headers"]["x-custom"], "kept");
    for dropped in ["x-api-key", "x-secret-hop", "connection"] {
        assert!(seen["headers"].get(dropped).is_none(), "{seen}");
    }
}

#[tokio::test]
async fn a_bearer_token_is_the_daemon_s_and_does_not_reach_the_guest() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let request = Request::builder()
        .uri("/v1/agents/demo/guest/health")
        .header("authorization", format!("Bearer {}", server.key))
        .body(Body::empty())
        .unwrap();
    let (status, seen) = read(server.send(request).await).await;
    assert_eq!(status, StatusCode::OK);
    assert!(seen["headers"].get("authorization").is_none(), "{seen}");
}

#[tokio::test]
async fn a_request_to_a_stopped_agent_starts_it() {
    let server = Server::new().await;
    server.create(json!({"name": "demo", "start": false})).await;
    assert_eq!(server.get("/v1/agents/demo/guest/health").await.0, StatusCode::OK);
    assert_eq!(server.get("/v1/agents/demo").await.1["state"], "running");
}

#[tokio::test]
async fn bodies_larger_than_the_limit_for_json_stream_through() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let big = vec![b'x'; 3 << 20];
    let request = server.request(Method::POST, "/v1/agents/demo/guest/echo", big.clone());
    let echoed = server
        .send(request)
        .await
        .into_body()
        .collect()
        .await
        .unwrap()
        .to_bytes();
    assert!(echoed == big, "{} bytes came back", echoed.len());
}

#[tokio::test]
async fn a_stream_is_open_until_its_reader_lets_go() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    let agent = server.state.registry.get(&Workspace::default(), "demo").unwrap();
    let request = server.request(Method::GET, "/v1/agents/demo/guest/endless", Body::empty());
    let mut body = server.send(request).await.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "first");
    assert_eq!(agent.open_requests(), 1);
    drop(body);
    assert_eq!(agent.open_requests(), 0);
}

#[tokio::test]
async fn connections_are_kept_for_one_box_and_never_used_for_the_next() {
    let server = Server::new().await;
    server.create(json!({"name": "demo"})).await;
    for _ in 0..5 {
        assert_eq!(server.get("/v1/agents/demo/guest/health").await.0, StatusCode::OK);
        // The connection goes back once its task has seen the end of the answer.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.engine.connects(), 1);
    server.post("/v1/agents/demo/stop", Value::Null).await;
    assert_eq!(server.get("/v1/agents/demo/guest/health").await.0, StatusCode::OK);
    assert_eq!(server.engine.connects(), 2);
}

#[tokio::test]
async fn a_guest_that_is_gone_is_a_bad_gateway_and_the_next_request_finds_a_new_box() {
    let server = Server::new().await;
    server.engine.serve_guests(|_, stream| drop(stream));
    server.create(json!({"name": "demo"})).await;
    let answer = server.get("/v1/agents/demo/guest/health").await;
    assert_error(&answer, StatusCode::BAD_GATEWAY, "unavailable");
    assert!(answer.1["hint"].is_string());
    assert_eq!(
        server
            .state
            .registry
            .get(&Workspace::default(), "demo")
            .unwrap()
            .open_requests(),
        0
    );
}

#[tokio::test]
async fn a_start_that_fails_on_the_way_to_the_guest_says_why() {
    let server = Server::new().await;
    server.create(json!({"name": "demo", "start": false})).await;
    server.engine.fail_next_start("not today");
    let answer = server.get("/v1/agents/demo/guest/health").await;
    assert_error(&answer, StatusCode::INTERNAL_SERVER_ERROR, "internal");
    assert!(answer.1["message"].as_str().unwrap().contains("not today"));
}
