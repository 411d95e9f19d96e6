use super::*;

/// Asks for a port of an agent by its host name.
async fn ask(server: &Server, id: &str, port: u16, path: &str, headers: &[(&str, &str)]) -> Response<Body> {
    let mut request = Request::builder()
        .uri(path)
        .header("host", format!("{port}-{id}.localhost:3676"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

async fn demo(server: &Server, public: bool) -> Id {
    server.engine.open_port(3000);
    let agent = server.create(json!({"name": "demo", "public": public})).await;
    agent["id"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_public_port_is_reached_by_its_name_and_sees_no_credentials() {
    let server = Server::new().await;
    let id = demo(&server, true).await;
    let (access, traffic) = (server.state.tokens.access(&id), server.state.tokens.traffic(&id));
    let cookie = format!("dorm_token={traffic}; mine=1");
    let bearer = format!("Bearer {}", server.key);
    let headers = [
        ("x-api-key", server.key.as_str()),
        ("authorization", &bearer),
        ("x-access-token", &access),
        ("e2b-traffic-access-token", &traffic),
        ("cookie", &cookie),
        ("x-custom", "kept"),
    ];
    let (status, seen) = read(ask(&server, id.as_str(), 3000, "/a%2Fb?c=1", &headers).await).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(seen["uri"], "/a%2Fb?c=1");
    assert_eq!(seen["headers"]["cookie"], "mine=1");
    assert_eq!(seen["headers"]["x-custom"], "kept");
    assert_eq!(seen["headers"]["host"], format!("3000-{id}.localhost:3676"));
    let text = seen.to_string();
    for secret in [&server.key, &access, &traffic] {
        assert!(!text.contains(secret.as_str()), "{text}");
    }
}

#[tokio::test]
async fn what_is_a_servers_own_affair_reaches_it() {
    let server = Server::new().await;
    let id = demo(&server, true).await;
    let headers = [
        ("x-api-key", "mine"),
        ("authorization", "Bearer mine"),
        ("x-access-token", "mine"),
    ];
    let (_, seen) = read(ask(&server, id.as_str(), 3000, "/", &headers).await).await;
    assert_eq!(seen["headers"]["x-api-key"], "mine");
    assert_eq!(seen["headers"]["authorization"], "Bearer mine");
    assert_eq!(seen["headers"]["x-access-token"], "mine");
}

#[tokio::test]
async fn a_port_that_is_not_public_opens_to_a_token_a_key_and_a_link() {
    let server = Server::new().await;
    let id = demo(&server, false).await;
    let status =
        async |headers: &[(&str, &str)]| ask(&server, id.as_str(), 3000, "/", headers).await.status();
    let (access, traffic) = (server.state.tokens.access(&id), server.state.tokens.traffic(&id));
    assert_eq!(status(&[]).await, StatusCode::FORBIDDEN);
    assert_eq!(
        status(&[("e2b-traffic-access-token", &access)]).await,
        StatusCode::FORBIDDEN
    );
    assert_eq!(
        status(&[("e2b-traffic-access-token", &traffic)]).await,
        StatusCode::OK
    );
    assert_eq!(status(&[("x-access-token", &access)]).await, StatusCode::OK);
    assert_eq!(status(&[("x-api-key", &server.key)]).await, StatusCode::OK);
    assert_eq!(
        status(&[("cookie", &format!("dorm_token={traffic}"))]).await,
        StatusCode::OK
    );
    let (_, other) = server
        .state
        .keys
        .create(&Workspace::new("other"), "x")
        .await
        .unwrap();
    assert_eq!(status(&[("x-api-key", &other)]).await, StatusCode::FORBIDDEN);

    let link = format!("/page?dorm_token={traffic}&x=1");
    let page = [("accept", "text/html")];
    let answer = ask(&server, id.as_str(), 3000, &link, &page).await;
    assert_eq!(answer.status(), StatusCode::FOUND);
    let place = format!("http://3000-{id}.localhost:3676/page?x=1");
    assert_eq!(answer.headers()["location"], place);
    let cookie = answer.headers()["set-cookie"].to_str().unwrap();
    assert!(
        cookie.starts_with(&format!("dorm_token={traffic};")) && cookie.contains("HttpOnly"),
        "{cookie}"
    );
    let wrong = ask(&server, id.as_str(), 3000, "/?dorm_token=x", &page).await;
    assert_eq!(wrong.status(), StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn what_is_not_there_is_said_in_the_words_that_clients_look_for() {
    let server = Server::new().await;
    let id = demo(&server, true).await;
    let unknown = Id::random();
    let (status, body) = read(ask(&server, unknown.as_str(), 3000, "/", &[]).await).await;
    assert_eq!(status, StatusCode::BAD_GATEWAY);
    let expected =
        json!({"sandboxId": unknown.as_str(), "message": "The sandbox was not found", "code": 502});
    assert_eq!(body, expected);
    tokio::time::pause();
    let (status, body) = read(ask(&server, id.as_str(), 4000, "/", &[]).await).await;
    assert_eq!(status, StatusCode::BAD_GATEWAY);
    assert_eq!(body["message"], "The sandbox is running but port is not open");
    let page = ask(&server, id.as_str(), 4000, "/", &[("accept", "text/html")]).await;
    assert_eq!(page.status(), StatusCode::BAD_GATEWAY);
    let page = page.into_body().collect().await.unwrap().to_bytes();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(
        page.contains(&format!("href=\"//3000-{id}.localhost:3676/\"")),
        "{page}"
    );
}

#[tokio::test]
async fn the_guest_opens_to_its_token_and_to_signatures_and_never_for_set_up() {
    let server = Server::new().await;
    let id = demo(&server, true).await;
    let access = server.state.tokens.access(&id);
    let traffic = server.state.tokens.traffic(&id);
    let by_header = async |path: &str, token: Option<&str>| {
        let mut request = Request::builder()
            .uri(path)
            .header("host", "127.0.0.1:3676")
            .header("e2b-sandbox-id", id.as_str())
            .header("e2b-sandbox-port", "49983");
        if let Some(token) = token {
            request = request.header("x-access-token", token);
        }
        read(server.send(request.body(Body::empty()).unwrap()).await).await
    };
    assert_eq!(by_header("/health", None).await.0, StatusCode::OK);
    assert_eq!(by_header("/envs", None).await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(
        by_header("/envs", Some(&traffic)).await.0,
        StatusCode::UNAUTHORIZED
    );
    let (status, seen) = by_header("/envs", Some(&access)).await;
    assert_eq!(status, StatusCode::OK);
    assert!(seen["headers"].get("x-access-token").is_none(), "{seen}");
    assert_eq!(by_header("/init", Some(&access)).await.0, StatusCode::FORBIDDEN);
    assert_eq!(
        server.get("/v1/agents/demo/guest/init").await.0,
        StatusCode::FORBIDDEN
    );

    let signed = |expiration: &str| {
        use base64::Engine as _;
        use sha2::Digest as _;
        let text = format!("/tmp/a b:read:user:{access}:{expiration}");
        let digest = base64::engine::general_purpose::STANDARD_NO_PAD.encode(sha2::Sha256::digest(text));
        let signature = format!("v1_{digest}").replace('+', "%2B").replace('/', "%2F");
        format!(
            "/files?path=%2Ftmp%2Fa+b&username=user&signature={signature}&signature_expiration={expiration}"
        )
    };
    assert_eq!(by_header(&signed("99999999999"), None).await.0, StatusCode::OK);
    let (status, body) = by_header(&signed("1"), None).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    assert_eq!(
        body,
        json!({"code": 401, "message": "signature is already expired"})
    );
    let nameless = async |path: String| {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        server.send(request).await.status()
    };
    assert_eq!(nameless(signed("99999999999")).await, StatusCode::OK);
    assert_eq!(
        nameless(signed("99999999999").replace("a+b", "c")).await,
        StatusCode::UNAUTHORIZED
    );
}

#[tokio::test]
async fn a_request_for_a_port_wakes_a_sleeping_agent() {
    let server = Server::new().await;
    let id = demo(&server, true).await;
    for verb in ["hibernate", "stop"] {
        let (status, agent) = server.post(&format!("/v1/agents/demo/{verb}"), json!({})).await;
        assert_eq!(status, StatusCode::OK, "{agent}");
        let answer = ask(&server, id.as_str(), 3000, "/", &[]).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(server.get("/v1/agents/demo").await.1["state"], "running");
    }
}

#[tokio::test]
async fn ports_are_listed_with_their_urls() {
    let server = Server::new().await;
    let id = demo(&server, false).await;
    let (_, ports) = server.get("/v1/agents/demo/ports").await;
    let url = format!("http://3000-{id}.localhost:3676");
    assert_eq!(
        ports,
        json!([{"port": 3000, "addresses": ["127.0.0.1"], "url": url}])
    );
    let (_, port) = server.get("/v1/agents/demo/ports/80").await;
    assert_eq!(port["public"], false);
    let token = server.state.tokens.traffic(&id);
    assert_eq!(
        port["link"],
        format!("http://80-{id}.localhost:3676/?dorm_token={token}")
    );
    assert_eq!(
        server.get("/v1/agents/demo/ports/0").await.0,
        StatusCode::BAD_REQUEST
    );
}
