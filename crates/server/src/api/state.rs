//! What every handler has at hand.

use std::ops::Deref;
use std::sync::Arc;

use dorm_engine::{Engine, Homes};
use tokio_util::sync::CancellationToken;

use crate::build_slots::BuildSlots;
use crate::config::Config;
use crate::e2b::{Builds, Sandboxes};
use crate::keys::KeyRing;
use crate::lifecycle::Registry;
use crate::metrics::Metrics;
use crate::names::Names;
use crate::proxy::Proxy;
use crate::store::Store;
use crate::templates::Templates;
use crate::tokens::Tokens;
use crate::volumes::Volumes;

#[derive(Clone)]
pub struct AppState(Arc<Shared>);

pub struct Shared {
    pub config: Arc<Config>,
    pub store: Arc<dyn Store>,
    pub engine: Arc<dyn Engine>,
    pub homes: Arc<dyn Homes>,
    pub registry: Arc<Registry>,
    /// What the E2B API adds to agents.
    pub sandboxes: Arc<Sandboxes>,
    pub keys: Arc<KeyRing>,
    pub volumes: Arc<Volumes>,
    /// Templates that are built through the E2B API.
    pub builds: Builds,
    pub tokens: Arc<Tokens>,
    pub metrics: Arc<Metrics>,
    pub templates: Arc<Templates>,
    /// Slots for the boxes in which templates are built.
    pub build_slots: Arc<BuildSlots>,
    pub proxy: Proxy,
    pub names: Names,
    /// Cancelled when the daemon is to end.
    pub shutdown: CancellationToken,
}

impl AppState {
    pub fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }
}

impl Deref for AppState {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}
