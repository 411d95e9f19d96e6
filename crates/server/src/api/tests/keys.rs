use super::*;

async fn with(server: &Server, header: &str, value: &str) -> (StatusCode, Value) {
    let request = Request::builder()
        .uri("/v1/info")
        .header(header, value)
        .body(Body::empty())
        .unwrap();
    read(server.send(request).await).await
}

#[tokio::test]
async fn everything_but_health_and_docs_needs_a_key() {
    let server = Server::new().await;
    for path in [
        "/v1/info",
        "/v1/agents",
        "/v1/agents/x/guest/health",
        "/v1/keys",
        "/metrics",
        "/v1/templates",
    ] {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        assert_error(
            &read(server.send(request).await).await,
            StatusCode::UNAUTHORIZED,
            "unauthorized",
        );
    }
    for path in ["/healthz", "/openapi.json", "/docs/"] {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        assert_eq!(server.send(request).await.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn a_key_opens_as_header_and_as_bearer_token_and_nothing_else_does() {
    let server = Server::new().await;
    let key = server.key.clone();
    assert_eq!(with(&server, "x-api-key", &key).await.0, StatusCode::OK);
    assert_eq!(
        with(&server, "authorization", &format!("Bearer {key}")).await.0,
        StatusCode::OK
    );
    let mut wrong = key.clone();
    let last = if wrong.pop() == Some('0') { '1' } else { '0' };
    wrong.push(last);
    for wrong in [wrong.as_str(), &key[..20], "", "e2b_", "ééééééééé"] {
        assert_eq!(
            with(&server, "x-api-key", wrong).await.0,
            StatusCode::UNAUTHORIZED,
            "{wrong}"
        );
    }
    assert_eq!(
        with(&server, "authorization", &format!("Basic {key}")).await.0,
        StatusCode::UNAUTHORIZED
    );
}

#[tokio::test]
async fn a_key_is_shown_once_works_and_ends_when_deleted() {
    let server = Server::new().await;
    let (status, created) = server.post("/v1/keys", json!({"name": "ci"})).await;
    assert_eq!(status, StatusCode::CREATED);
    let secret = created["secret"].as_str().unwrap();
    let (start, hex) = secret.split_at(4);
    assert_eq!((start, hex.len()), ("e2b_", 40));
    assert!(hex.bytes().all(|b| b.is_ascii_hexdigit()));
    assert_eq!(with(&server, "x-api-key", secret).await.0, StatusCode::OK);

    let (_, keys) = server.get("/v1/keys").await;
    let listed = keys
        .as_array()
        .unwrap()
        .iter()
        .find(|key| key["name"] == "ci")
        .unwrap();
    assert!(listed.get("secret").is_none() && listed.get("hash").is_none());
    assert!(secret.starts_with(listed["prefix"].as_str().unwrap()));
    assert!(
        listed["last_used"].is_i64(),
        "its use is known before it is written"
    );
    server.state.keys.flush().await.unwrap();
    assert!(
        server.state.store.list_keys(&Workspace::default()).await.unwrap()[1]
            .last_used
            .is_some()
    );

    let path = format!("/v1/keys/{}", created["id"].as_str().unwrap());
    assert_eq!(
        server.call(Method::DELETE, &path, Value::Null).await.0,
        StatusCode::NO_CONTENT
    );
    assert_eq!(
        with(&server, "x-api-key", secret).await.0,
        StatusCode::UNAUTHORIZED
    );
    let again = server.call(Method::DELETE, &path, Value::Null).await;
    assert_error(&again, StatusCode::NOT_FOUND, "not_found");
    let nonsense = server
        .call(Method::DELETE, "/v1/keys/nonsense", Value::Null)
        .await;
    assert_error(&nonsense, StatusCode::NOT_FOUND, "not_found");
}

#[tokio::test]
async fn a_key_needs_a_name_of_one_line() {
    let server = Server::new().await;
    for name in ["", "  ", "a\nb", &"x".repeat(101)] {
        let answer = server.post("/v1/keys", json!({"name": name})).await;
        assert_error(&answer, StatusCode::BAD_REQUEST, "invalid_argument");
    }
}
