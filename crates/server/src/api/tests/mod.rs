//! The API on engines and homes that exist only in memory, and a guest that answers in this process.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use dorm_engine::fake::{FakeEngine, FakeHomes};
use dorm_engine::{Id, Limits};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use super::{AppState, Shared, router};
use crate::build_slots::BuildSlots;
use crate::config::{Config, NetworkRange, OnShutdown, Standby};
use crate::e2b::Sandboxes;
use crate::faults::Faults;
use crate::isolation::Choice;
use crate::keys::KeyRing;
use crate::lifecycle::{Parts, Registry};
use crate::metrics::Metrics;
use crate::names::Names;
use crate::proxy::Proxy;
use crate::records::{TemplateDefaults, TemplateRecord, Workspace, now};
use crate::store::memory::MemoryStore;
use crate::store::{SqliteStore, Store};
use crate::templates::{self, Templates};
use crate::tokens::Tokens;
use crate::volumes::Volumes;

mod agents;
mod daemon;
mod e2b;
mod guest;
mod keys;
mod manners;
mod ports;
mod sleep;
mod snapshots;
mod uploads;
mod workspaces;

struct Server {
    app: Router,
    state: AppState,
    engine: Arc<FakeEngine>,
    homes: Arc<FakeHomes>,
    key: String,
}

impl Server {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
        add_base(&*store, &homes).await;
        engine.serve_guests(|_, stream| {
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service_fn(guest::answer));
            tokio::spawn(connection);
        });
        let config = Arc::new(config(dir.path()));
        let metrics = Arc::new(Metrics::default());
        let parts = Parts {
            store: store.clone(),
            engine: engine.clone(),
            homes: homes.clone(),
            metrics: metrics.clone(),
            faults: Faults::none(),
            slots: config.slots(),
            nameservers: config.nameservers.clone(),
            stop_grace: config.stop_grace,
            images: config.data.join("images"),
        };
        let registry = Registry::open(parts, true).await.unwrap();
        let keys = KeyRing::new(store.clone());
        let (_, key) = keys.create(&Workspace::default(), "test").await.unwrap();
        let tokens = Arc::new(Tokens::open(&*store).await.unwrap());
        let build_slots = BuildSlots::new(config.slots());
        let parts = templates::Parts {
            config: config.clone(),
            store: store.clone(),
            engine: engine.clone(),
            homes: homes.clone(),
            build_slots: build_slots.clone(),
        };
        let sandboxes = Sandboxes::open(store.clone(), registry.clone()).await.unwrap();
        let volumes = Volumes::open(store.clone(), homes.clone(), registry.clone(), 1 << 30, true);
        let state = AppState::new(Shared {
            volumes: volumes.await.unwrap(),
            builds: crate::e2b::Builds::open(store.clone()).await.unwrap(),
            sandboxes,
            config,
            store,
            engine: engine.clone(),
            homes: homes.clone(),
            registry: registry.clone(),
            keys,
            tokens,
            metrics,
            templates: Templates::new(parts),
            build_slots,
            proxy: Proxy::new(engine.clone(), registry),
            names: Names::new(None, 3676, false),
            shutdown: CancellationToken::new(),
        });
        Self {
            app: router(&state),
            state,
            engine,
            homes,
            key,
        }
    }

    async fn send(&self, request: Request<Body>) -> Response<Body> {
        self.app.clone().oneshot(request).await.unwrap()
    }

    fn request(&self, method: Method, path: &str, body: impl Into<Body>) -> Request<Body> {
        Request::builder()
            .method(method)
            .uri(path)
            .header("x-api-key", &self.key)
            .body(body.into())
            .unwrap()
    }

    async fn call(&self, method: Method, path: &str, body: Value) -> (StatusCode, Value) {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        read(self.send(self.request(method, path, body)).await).await
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        self.call(Method::GET, path, Value::Null).await
    }

    async fn delete(&self, path: &str) -> (StatusCode, Value) {
        read(self.send(self.request(Method::DELETE, path, Body::empty())).await).await
    }

    async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        self.call(Method::POST, path, body).await
    }

    /// Creates an agent that must come to be.
    async fn create(&self, body: Value) -> Value {
        let (status, agent) = self.post("/v1/agents", body).await;
        assert_eq!(status, StatusCode::CREATED, "{agent}");
        agent
    }
}

async fn add_base(store: &dyn Store, homes: &FakeHomes) {
    let template = TemplateRecord {
        id: Id::random(),
        workspace: Workspace::default(),
        name: "base".to_owned(),
        built: Default::default(),
        recipe_hash: None,
        defaults: TemplateDefaults::default(),
        size: 1,
        created: now(),
    };
    homes.add_template(&template.id);
    store.insert_template(&template).await.unwrap();
}

fn config(data: &std::path::Path) -> Config {
    Config {
        data: data.to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        tls: None,
        domain: None,
        isolation: Choice::Container,
        defaults: Limits {
            cpu_millis: 2000,
            memory: 1 << 30,
            pids: 512,
            disk: 1 << 34,
            io_bps: None,
        },
        first_uid: 1_000_000,
        max_slots: 1000,
        network_range: NetworkRange {
            base: "10.99.0.0".parse().unwrap(),
            prefix: 16,
        },
        nameservers: vec!["169.254.1.1".to_owned()],
        on_shutdown: OnShutdown::Leave,
        stop_grace: Duration::from_secs(10),
        template_cache: None,
        host_ca: None,
        standby: Standby::default(),
        max_body: 64 * 1024,
    }
}

async fn read(response: Response<Body>) -> (StatusCode, Value) {
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let value = serde_json::from_slice(&bytes)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
    (status, value)
}

/// That the answer is an error in the one form that errors have.
fn assert_error(answer: &(StatusCode, Value), status: StatusCode, code: &str) {
    assert_eq!(answer.0, status, "{}", answer.1);
    assert_eq!(answer.1["code"], code, "{}", answer.1);
    assert!(
        answer.1["message"]
            .as_str()
            .is_some_and(|message| !message.is_empty()),
        "{}",
        answer.1
    );
}
