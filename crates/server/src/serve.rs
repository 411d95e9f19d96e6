//! The daemon from its start to its end.
//!
//! ```text
//!   listen ▸ open the store ▸ first key ▸ reconcile ▸ daemon.json ▸ answer …
//!   … shutdown ▸ accept no more ▸ transitions end ▸ connections end ▸ close the store
//! ```

use std::fs::Permissions;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{Engine, Homes, Isolation};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::api::{AppState, Shared, router};
use crate::build_slots::BuildSlots;
use crate::config::{Config, ConfigError, OnShutdown};
use crate::e2b::{self, Builds, Sandboxes};
use crate::faults::{Faults, UnknownPoint};
use crate::keys::KeyRing;
use crate::lifecycle::{Parts, ReconcileError, Registry, idle};
use crate::listen::accept;
use crate::metrics::Metrics;
use crate::names::Names;
use crate::proxy::Proxy;
use crate::records::Workspace;
use crate::store::{SqliteStore, Store, StoreError};
use crate::templates::{self, Templates};
use crate::tls::{Tls, TlsConfig, TlsError};
use crate::tokens::Tokens;
use crate::volumes::Volumes;

/// How long open connections may take to finish once everything else has ended.
const DRAIN: Duration = Duration::from_secs(2);
/// How long transitions may take to end, beyond the time that boxes have to stop.
const PATIENCE: Duration = Duration::from_secs(30);
const FLUSH_KEYS: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("DORM_FAULT names no fault point")]
    Fault(#[from] UnknownPoint),
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("HTTPS cannot be offered")]
    Tls(#[from] TlsError),
    #[error("the data directory cannot be used: {doing}")]
    Data {
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the records cannot be used")]
    Store(#[from] StoreError),
    #[error("what an earlier daemon left cannot be put in order")]
    Reconcile(#[from] ReconcileError),
}

fn data(doing: &'static str) -> impl FnOnce(io::Error) -> ServeError {
    move |source| ServeError::Data { doing, source }
}

/// What a server leaves to the next.
#[derive(Debug)]
pub struct Left {
    /// Whether there is memory on disk that needs the home of an agent as it is.
    pub anybody_sleeps: bool,
}

/// Serves until `shutdown` is cancelled. `ready` gets the address once requests are answered.
pub async fn serve(
    config: Config,
    engine: Arc<dyn Engine>,
    homes: Arc<dyn Homes>,
    ready: oneshot::Sender<SocketAddr>,
    shutdown: CancellationToken,
) -> Result<Left, ServeError> {
    config.check()?;
    let faults = Faults::from_env()?;
    let config = Arc::new(config);
    let listening = |source| ServeError::Listen {
        address: config.listen,
        source,
    };
    let listener = TcpListener::bind(config.listen).await.map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;
    let tls = config.tls.as_ref().map(|tls| Tls::open(tls, &shutdown));
    let tls = tls.transpose()?.map(Arc::new);
    prepare(&config.data)?;

    let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&config.data.join("dorm.db")).await?);
    let keys = KeyRing::new(store.clone());
    // Without records nothing says whose the homes are: an operator who lost the database keeps them.
    let is_new = store.is_new().await?;
    if store.list_keys(&Workspace::default()).await?.is_empty() {
        let file = config.data.join("api-key");
        keys.create_first(&Workspace::default(), &file)
            .await?
            .map_err(data("the first key is written"))?;
    }
    let tokens = Arc::new(Tokens::open(&*store).await?);
    let metrics = Arc::new(Metrics::default());
    let parts = Parts {
        store: store.clone(),
        engine: engine.clone(),
        homes: homes.clone(),
        metrics: metrics.clone(),
        faults,
        slots: config.slots(),
        nameservers: config.nameservers.clone(),
        stop_grace: config.stop_grace,
        images: config.data.join("images"),
    };
    let registry = Registry::open(parts, !is_new).await?;
    registry.watch(config.standby, Arc::new(idle::pressure::of_host));
    let build_slots = BuildSlots::new(config.slots());
    let templates = Templates::new(templates::Parts {
        config: config.clone(),
        store: store.clone(),
        engine: engine.clone(),
        homes: homes.clone(),
        build_slots: build_slots.clone(),
    });
    let sandboxes = Sandboxes::open(store.clone(), registry.clone()).await?;
    let volumes = Volumes::open(
        store.clone(),
        homes.clone(),
        registry.clone(),
        config.defaults.disk,
        !is_new,
    )
    .await?;
    let state = AppState::new(Shared {
        volumes,
        builds: Builds::open(store.clone()).await?,
        store: store.clone(),
        sandboxes,
        proxy: Proxy::new(engine.clone(), registry.clone()),
        names: Names::new(config.domain.as_deref(), address.port(), tls.is_some()),
        engine,
        homes,
        registry: registry.clone(),
        keys: keys.clone(),
        tokens,
        metrics,
        templates: templates.clone(),
        build_slots,
        shutdown: shutdown.clone(),
        config: config.clone(),
    });

    e2b::watch(&state);
    registry.go_on();
    match announce(&config, address) {
        // Who has read the last one most likely finds this one, and can make room.
        Err(error) if dorm_engine::is_no_space(&error) => {
            tracing::warn!(%error, "daemon.json cannot be written");
        }
        announced => announced.map_err(data("daemon.json is written"))?,
    }
    tracing::info!(%address, https = tls.is_some(), "serving");
    let _ = ready.send(address);
    let flushing = tokio::spawn(flush_keys(keys.clone()));
    let mut connections = accept(listener, tls, router(&state), &shutdown).await;

    tracing::info!("shutting down");
    let savable = Isolation::ALL.map(|isolation| state.engine.can_checkpoint(isolation));
    let savable = savable.into_iter().reduce(Result::or).unwrap_or(Ok(()));
    let boxes = match (config.on_shutdown, savable) {
        (OnShutdown::Hibernate, Err(reason)) => {
            tracing::info!(%reason, "boxes are left, as their memory cannot be put to disk");
            OnShutdown::Leave
        }
        (wanted, _) => wanted,
    };
    tokio::join!(
        templates.close(),
        registry.shut_down(boxes, config.stop_grace + PATIENCE)
    );
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        connections.shutdown().await;
    }
    flushing.abort();
    if let Err(error) = keys.flush().await {
        tracing::warn!(%error, "when keys were last used is lost");
    }
    let anybody_sleeps = registry.all().iter().any(|agent| agent.current_image().is_some());
    registry.disband();
    store.close().await;
    let _ = std::fs::remove_file(config.data.join("daemon.json"));
    Ok(Left { anybody_sleeps })
}

fn prepare(dir: &Path) -> Result<(), ServeError> {
    // The records hold environments, which hold secrets.
    std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(dir.join("dorm.db"))
        .map_err(data("dorm.db is made"))?;
    match std::fs::remove_dir_all(dir.join("tmp")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(data("tmp is emptied")(error)),
        _ => {}
    }
    // Memory, output and files of agents go through these. What is around them may have been there before, for all to enter.
    for name in ["tmp", "logs", "images"] {
        let folder = dir.join(name);
        let made = std::fs::create_dir_all(&folder);
        let private = made.and_then(|()| std::fs::set_permissions(&folder, Permissions::from_mode(0o700)));
        private.map_err(data("its folders are made"))?;
    }
    Ok(())
}

/// Says where the daemon is, for clients that know the data directory.
fn announce(config: &Config, address: SocketAddr) -> io::Result<()> {
    let mut reachable = address;
    if reachable.ip().is_unspecified() {
        reachable.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let json = serde_json::json!({
        "pid": std::process::id(),
        "url": format!("{scheme}://{reachable}"),
        // Its certificate may be for other names than this address: clients that read this know it by its file.
        "certificate": config.tls.as_ref().map(TlsConfig::certificate),
    });
    let dir = &config.data;
    let new = dir.join("daemon.json.new");
    std::fs::write(&new, json.to_string())?;
    std::fs::rename(new, dir.join("daemon.json"))
}

async fn flush_keys(keys: Arc<KeyRing>) {
    loop {
        tokio::time::sleep(FLUSH_KEYS).await;
        if let Err(error) = keys.flush().await {
            tracing::warn!(%error, "when keys were last used could not be written");
        }
    }
}
