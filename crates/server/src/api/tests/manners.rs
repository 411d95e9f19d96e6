use super::*;

#[tokio::test]
async fn what_is_not_there_and_what_cannot_be_done_to_it_get_the_same_form_of_error() {
    let server = Server::new().await;
    assert_error(
        &server.get("/v1/nothing").await,
        StatusCode::NOT_FOUND,
        "not_found",
    );
    assert_error(&server.get("/").await, StatusCode::NOT_FOUND, "not_found");
    let put = server.call(Method::PUT, "/v1/agents", Value::Null).await;
    assert_error(&put, StatusCode::METHOD_NOT_ALLOWED, "invalid_argument");
    let health = server.call(Method::DELETE, "/healthz", Value::Null).await;
    assert_error(&health, StatusCode::METHOD_NOT_ALLOWED, "invalid_argument");
    for path in [
        "/v1/agents/none",
        "/v1/agents/none/stats",
        "/v1/agents/none/events",
        "/v1/agents/none/guest/health",
    ] {
        assert_error(&server.get(path).await, StatusCode::NOT_FOUND, "not_found");
    }
    let garbled = server.get("/v1/agents/%ff").await;
    assert_error(&garbled, StatusCode::BAD_REQUEST, "invalid_argument");
}

#[tokio::test]
async fn the_document_describes_every_route_and_needs_no_other_file() {
    let server = Server::new().await;
    let (_, document) = server.get("/openapi.json").await;
    let paths = document["paths"].as_object().unwrap();
    for path in [
        "/v1/agents",
        "/v1/agents/{agent}",
        "/v1/agents/{agent}/start",
        "/v1/agents/{agent}/stop",
        "/v1/agents/{agent}/stats",
        "/v1/agents/{agent}/events",
        "/v1/keys",
        "/v1/keys/{id}",
        "/v1/info",
        "/v1/templates",
    ] {
        assert!(paths.contains_key(path), "{path}");
    }
    assert!(document["components"]["schemas"]["NewAgent"].is_object());
    let page = server.get("/docs/").await.1;
    assert!(page.as_str().unwrap().contains("swagger-ui"), "{page}");
    for file in ["swagger-ui.css", "swagger-ui-bundle.js", "swagger-initializer.js"] {
        let request = server.request(Method::GET, &format!("/docs/{file}"), Body::empty());
        assert_eq!(server.send(request).await.status(), StatusCode::OK, "{file}");
    }
}

#[tokio::test]
async fn metrics_count_agents_starts_and_requests() {
    let server = Server::new().await;
    server.create(json!({"name": "one"})).await;
    server.create(json!({"name": "two", "start": false})).await;
    server.get("/v1/agents/none").await;
    let (_, text) = server.get("/metrics").await;
    let text = text.as_str().unwrap();
    for line in [
        "dorm_agents{state=\"running\"} 1",
        "dorm_agents{state=\"stopped\"} 1",
        "dorm_agents{state=\"failed\"} 0",
        "dorm_starts_total{result=\"ok\"} 1",
        "dorm_start_seconds_count 1",
        "dorm_requests_total{route=\"/v1/agents\",status=\"201\"} 2",
        "dorm_requests_total{route=\"/v1/agents/{agent}\",status=\"404\"} 1",
        "dorm_pool_bytes 1099511627776",
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line} is not in\n{text}"
        );
    }
}

#[tokio::test]
async fn info_tells_version_and_room() {
    let server = Server::new().await;
    server.create(json!({"name": "one"})).await;
    let (_, info) = server.get("/v1/info").await;
    assert_eq!((&info["agents"], &info["running"]), (&json!(1), &json!(1)));
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    assert!(info["pool_free"].as_u64().unwrap() > 0);
}
