//! Templates over HTTP, with a whole daemon on engine and homes that exist only in memory.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dorm_engine::Limits;
use dorm_engine::fake::{FakeEngine, FakeHomes};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, NetworkRange, OnShutdown};
use crate::guest_client::fake::FakeGuests;
use crate::isolation::Choice;
use crate::serve::serve;

struct Daemon {
    address: SocketAddr,
    key: String,
    homes: Arc<FakeHomes>,
    shutdown: CancellationToken,
    serving: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// Commands that hold `sleep` never end.
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            data: dir.path().to_owned(),
            listen: "127.0.0.1:0".parse().unwrap(),
            tls: None,
            domain: None,
            isolation: Choice::Container,
            defaults: Limits {
                cpu_millis: 1000,
                memory: 1 << 30,
                pids: 100,
                disk: 1 << 30,
                io_bps: None,
            },
            first_uid: 1_000_000,
            max_slots: 100,
            network_range: NetworkRange {
                base: "10.99.0.0".parse().unwrap(),
                prefix: 16,
            },
            nameservers: Vec::new(),
            on_shutdown: OnShutdown::Leave,
            stop_grace: Duration::from_secs(1),
            template_cache: None,
            host_ca: None,
            standby: Default::default(),
            max_body: 1 << 20,
        };
        let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
        FakeGuests::answering(&engine, |run| {
            (!run.contains("sleep")).then(|| ("out\n".into(), 0))
        });
        let (ready, address) = oneshot::channel();
        let shutdown = CancellationToken::new();
        let (until, its_homes) = (shutdown.clone(), homes.clone());
        let serving = tokio::spawn(async move {
            serve(config, engine, its_homes, ready, until)
                .await
                .expect("the daemon serves");
        });
        let address = address.await.expect("the daemon comes up");
        let key = std::fs::read_to_string(dir.path().join("api-key"))
            .unwrap()
            .trim()
            .to_owned();
        Self {
            address,
            key,
            homes,
            shutdown,
            serving,
            _dir: dir,
        }
    }

    async fn send(&self, method: Method, path: &str, body: impl Into<Bytes>) -> http::Response<Incoming> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(format!("/v1/templates{path}"))
            .header("host", "dorm")
            .header("x-api-key", &self.key)
            .body(Full::new(body.into()))
            .unwrap();
        sender.send_request(request).await.unwrap()
    }

    async fn call(&self, method: Method, path: &str, body: impl Into<Bytes>) -> (StatusCode, String) {
        let response = self.send(method, path, body).await;
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn refused(&self, path: &str, body: impl Into<Bytes>) -> (u16, Value) {
        let (status, body) = self.call(Method::POST, path, body).await;
        (status.as_u16(), serde_json::from_str(&body).unwrap())
    }

    async fn end(self) {
        self.shutdown.cancel();
        self.serving.await.unwrap();
    }
}

fn recipe(run: &[&str]) -> String {
    json!({"recipe": {"from": "debian:bookworm", "run": run}}).to_string()
}

#[tokio::test]
async fn a_build_streams_its_progress_and_the_template_is_there_at_its_end() {
    let daemon = Daemon::start().await;
    let (status, body) = daemon.call(Method::POST, "/base/build", recipe(&["make"])).await;
    assert_eq!(status, StatusCode::OK);
    let lines: Vec<Value> = body
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        lines[0],
        json!({"type": "step", "step": 1, "steps": 5, "title": "Bootstrap Debian bookworm"})
    );
    assert!(lines.contains(&json!({"type": "log", "line": "out"})));
    let done = lines.last().unwrap();
    assert_eq!((&done["type"], &done["cached"]), (&json!("done"), &json!(false)));

    let (_, list) = daemon.call(Method::GET, "", "").await;
    let list: Vec<Value> = serde_json::from_str(&list).unwrap();
    assert_eq!(list, [done["template"].clone()]);
    let (_, one) = daemon
        .call(Method::GET, &format!("/{}", list[0]["id"].as_str().unwrap()), "")
        .await;
    assert_eq!(serde_json::from_str::<Value>(&one).unwrap(), list[0]);
    let (_, log) = daemon.call(Method::GET, "/base/log", "").await;
    assert!(log.starts_with("[1/5] Bootstrap Debian bookworm\n"), "{log}");
    assert_eq!(
        daemon.call(Method::DELETE, "/base", "").await.0,
        StatusCode::NO_CONTENT
    );
    assert_eq!(
        daemon.call(Method::DELETE, "/base", "").await.0,
        StatusCode::NOT_FOUND
    );
    daemon.end().await;
}

#[tokio::test]
async fn an_upload_is_imported_and_what_is_none_is_refused() {
    let daemon = Daemon::start().await;
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(3 << 20);
    header.set_mode(0o644);
    tar.append_data(&mut header, "bin/sh", vec![0; 3 << 20].as_slice())
        .unwrap();
    // Larger than a JSON body may be.
    let (status, body) = daemon
        .call(
            Method::POST,
            "/image/import?start=true",
            tar.into_inner().unwrap(),
        )
        .await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        body.lines().last().unwrap().contains(r#""type":"done""#),
        "{body}"
    );

    let (status, error) = daemon.refused("/image/import", "no archive").await;
    assert_eq!((status, &error["code"]), (400, &json!("invalid_argument")));
    assert_eq!(daemon.refused("/image/import?stat=true", "").await.0, 400);
    daemon.end().await;
}

#[tokio::test]
async fn wrong_requests_are_refused_before_anything_is_streamed() {
    let daemon = Daemon::start().await;
    let unknown = json!({"recipe": {"from": "debian:bookworm", "form": 1}}).to_string();
    assert_eq!(daemon.refused("/base/build", unknown).await.0, 400);
    assert_eq!(daemon.refused("/Base/build", recipe(&[])).await.0, 400);
    let absent = json!({"recipe": {"from": "absent"}}).to_string();
    let (status, error) = daemon.refused("/base/build", absent).await;
    assert_eq!((status, &error["code"]), (404, &json!("not_found")));
    assert!(error["hint"].as_str().unwrap().contains("dorm template ls"));
    assert_eq!(
        daemon.call(Method::GET, "/base/log", "").await.0,
        StatusCode::NOT_FOUND
    );
    daemon.end().await;
}

#[tokio::test]
async fn a_second_build_of_a_name_is_a_conflict_until_the_first_ones_client_goes_away() {
    let daemon = Daemon::start().await;
    let mut first = daemon.send(Method::POST, "/app/build", recipe(&["sleep"])).await;
    let frame = first.body_mut().frame().await.unwrap().unwrap();
    assert!(frame.into_data().unwrap().starts_with(br#"{"type":"step""#));
    let (status, error) = daemon.refused("/app/build", recipe(&["sleep"])).await;
    assert_eq!((status, &error["code"]), (409, &json!("conflict")));
    assert_eq!(daemon.homes.count(), 1);

    drop(first);
    // The daemon notices by itself; nothing else is sent to it.
    tokio::time::timeout(Duration::from_secs(60), async {
        while daemon.homes.count() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the build is cleared away");
    daemon.end().await;
}

#[tokio::test]
async fn the_daemon_ends_although_a_build_is_under_way() {
    let daemon = Daemon::start().await;
    let response = daemon.send(Method::POST, "/app/build", recipe(&["sleep"])).await;
    let homes = daemon.homes.clone();
    daemon.end().await;
    assert_eq!(homes.count(), 0);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let last: Value =
        serde_json::from_slice(body.trim_ascii().rsplit(|b| *b == b'\n').next().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "unavailable");
}
