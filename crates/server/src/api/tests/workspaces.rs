//! What belongs to one workspace is not there for another.

use super::*;

#[tokio::test]
async fn the_sandbox_of_another_workspace_is_not_found() {
    let mut server = Server::new().await;
    let (status, made) = server
        .post("/v2/sandboxes", json!({ "templateID": "base" }))
        .await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    let id = made["sandboxID"].as_str().unwrap().to_owned();
    let (_, snapshot) = server
        .post(&format!("/sandboxes/{id}/snapshots"), json!({ "name": "gold" }))
        .await;
    let other = Workspace::new("other");
    server.key = server.state.keys.create(&other, "other").await.unwrap().1;

    let requests = [
        (Method::GET, format!("/sandboxes/{id}")),
        (Method::DELETE, format!("/sandboxes/{id}")),
        (Method::POST, format!("/v2/sandboxes/{id}/connect")),
        (Method::POST, format!("/sandboxes/{id}/pause")),
        (Method::POST, format!("/sandboxes/{id}/fork")),
        (Method::POST, format!("/sandboxes/{id}/snapshots")),
        (Method::GET, format!("/sandboxes/{id}/metrics")),
        (
            Method::DELETE,
            format!("/templates/{}", snapshot["snapshotID"].as_str().unwrap()),
        ),
        (Method::GET, format!("/v1/agents/{id}")),
        (Method::GET, format!("/v1/agents/{id}/guest/health")),
    ];
    for (method, path) in requests {
        let body = match method {
            Method::POST => json!({}),
            _ => Value::Null,
        };
        let (status, answer) = server.call(method.clone(), &path, body).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{method} {path}: {answer}");
    }
    for path in ["/v2/sandboxes", "/snapshots", "/v1/agents"] {
        let (_, listed) = server.get(path).await;
        assert_eq!(listed, json!([]), "{path}");
    }
    let mut request = server.request(Method::GET, "/files?path=/etc/hostname", Body::empty());
    request
        .headers_mut()
        .insert("e2b-sandbox-id", id.parse().unwrap());
    let (status, answer) = read(server.send(request).await).await;
    assert_eq!(
        status,
        StatusCode::UNAUTHORIZED,
        "its key opens nothing: {answer}"
    );
}
