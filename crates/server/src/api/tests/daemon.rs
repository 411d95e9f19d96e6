//! The whole daemon on a real socket and a real database.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;
use crate::{Left, ServeError, serve};

struct Daemon {
    address: SocketAddr,
    shutdown: CancellationToken,
    serving: JoinHandle<Result<Left, ServeError>>,
}

impl Daemon {
    async fn start(config: Config, engine: &Arc<FakeEngine>, homes: &Arc<FakeHomes>) -> Self {
        let (ready, address) = oneshot::channel();
        let shutdown = CancellationToken::new();
        let serving = tokio::spawn(serve(
            config,
            engine.clone(),
            homes.clone(),
            ready,
            shutdown.clone(),
        ));
        Self {
            address: address.await.unwrap(),
            shutdown,
            serving,
        }
    }

    async fn get(&self, path: &str, key: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn end(self) {
        self.shutdown.cancel();
        self.serving.await.unwrap().unwrap();
    }
}

fn key_in(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("api-key"))
        .unwrap()
        .trim()
        .to_owned()
}

#[tokio::test]
async fn a_first_start_makes_a_key_and_a_second_keeps_it_with_everything_else() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
    let daemon = Daemon::start(config(dir.path()), &engine, &homes).await;
    let key = key_in(dir.path());
    for file in ["api-key", "dorm.db"] {
        let mode = std::fs::metadata(dir.path().join(file))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    let announced: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("daemon.json")).unwrap()).unwrap();
    assert_eq!(announced["url"], format!("http://{}", daemon.address));
    assert_eq!(announced["pid"], std::process::id());
    assert!(daemon.get("/v1/info", &key).await.starts_with("HTTP/1.1 200"));
    daemon.end().await;
    assert!(!dir.path().join("daemon.json").exists());

    let daemon = Daemon::start(config(dir.path()), &engine, &homes).await;
    assert_eq!(key_in(dir.path()), key);
    let keys = daemon.get("/v1/keys", &key).await;
    assert!(
        keys.contains("\"last_used\":1"),
        "the use of a key is written at the end: {keys}"
    );
    daemon.end().await;
}

#[tokio::test]
async fn agents_and_their_boxes_outlive_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
    engine.serve_guests(|_, stream| {
        let connection = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service_fn(guest::answer));
        tokio::spawn(connection);
    });
    Daemon::start(config(dir.path()), &engine, &homes)
        .await
        .end()
        .await;
    let store = SqliteStore::open(&dir.path().join("dorm.db")).await.unwrap();
    add_base(&store, &homes).await;
    store.close().await;

    let daemon = Daemon::start(config(dir.path()), &engine, &homes).await;
    let key = key_in(dir.path());
    let body = r#"{"name":"demo"}"#;
    let mut stream = TcpStream::connect(daemon.address).await.unwrap();
    let head = format!(
        "POST /v1/agents HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut start = [0; 12];
    stream.read_exact(&mut start).await.unwrap();
    assert_eq!(&start, b"HTTP/1.1 201");
    // An open connection does not keep the daemon from ending.
    daemon.end().await;
    assert_eq!(engine.stops(), 0);

    let daemon = Daemon::start(config(dir.path()), &engine, &homes).await;
    let agent = daemon.get("/v1/agents/demo", &key).await;
    assert!(agent.contains("\"state\":\"running\""), "{agent}");
    assert!(
        daemon
            .get("/v1/agents/demo/guest/health", &key)
            .await
            .starts_with("HTTP/1.1 200")
    );
    daemon.end().await;

    let stopping = Config {
        on_shutdown: OnShutdown::Stop,
        ..config(dir.path())
    };
    Daemon::start(stopping, &engine, &homes).await.end().await;
    assert_eq!(engine.stops(), 1);
}

#[tokio::test]
async fn whoever_deleted_the_last_key_finds_a_new_one_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
    Daemon::start(config(dir.path()), &engine, &homes)
        .await
        .end()
        .await;
    let old = key_in(dir.path());
    let store = SqliteStore::open(&dir.path().join("dorm.db")).await.unwrap();
    let id = store.list_keys(&Workspace::default()).await.unwrap().remove(0).id;
    store.delete_key(&Workspace::default(), &id).await.unwrap();
    store.close().await;
    let daemon = Daemon::start(config(dir.path()), &engine, &homes).await;
    assert!(daemon.get("/v1/info", &old).await.starts_with("HTTP/1.1 401"));
    assert!(
        daemon
            .get("/v1/info", &key_in(dir.path()))
            .await
            .starts_with("HTTP/1.1 200")
    );
    daemon.end().await;
}

#[tokio::test]
async fn homes_are_kept_when_the_records_are_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
    let id = Id::random();
    dorm_engine::Homes::create_empty(&*homes, &id).await.unwrap();
    Daemon::start(config(dir.path()), &engine, &homes)
        .await
        .end()
        .await;
    assert!(homes.has(&id));
}

#[tokio::test]
async fn an_open_stream_does_not_keep_the_daemon_from_ending() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
    let daemon = Daemon::start(config(dir.path()), &engine, &homes).await;
    let mut half = TcpStream::connect(daemon.address).await.unwrap();
    half.write_all(b"POST /v1/agents HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        .await
        .unwrap();
    daemon.end().await;
}

#[tokio::test]
async fn a_configuration_that_cannot_work_is_refused_before_anything_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
    let small = NetworkRange {
        base: "10.0.0.0".parse().unwrap(),
        prefix: 24,
    };
    for bad in [
        Config {
            network_range: small,
            ..config(dir.path())
        },
        Config {
            first_uid: u32::MAX - 5,
            ..config(dir.path())
        },
    ] {
        let (ready, _) = oneshot::channel();
        let ended = serve(
            bad,
            engine.clone(),
            homes.clone(),
            ready,
            CancellationToken::new(),
        )
        .await;
        assert!(matches!(ended, Err(ServeError::Config(_))), "{ended:?}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
