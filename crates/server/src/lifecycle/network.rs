//! What an agent's box may reach: kept in its record, and in force whenever there is a box.

use std::sync::{Arc, Mutex, PoisonError};

use dorm_engine::network::Policy;
use dorm_engine::{BoxSpec, EngineError};

use super::{Agent, Trouble};
use crate::store::StoreError;

const VERB: &str = "get its network policy";

pub(super) struct Network {
    policy: Mutex<Arc<Policy>>,
    /// Held while a box comes up and while the policy changes, so that no box comes up with an old one.
    order: tokio::sync::Mutex<()>,
}

impl Network {
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            policy: Mutex::new(Arc::new(policy)),
            order: tokio::sync::Mutex::default(),
        }
    }
}

impl Agent {
    pub fn network(&self) -> Arc<Policy> {
        let policy = self.network.policy.lock();
        policy.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns when the policy holds, for the box that runs and for all that come.
    pub async fn set_network(self: &Arc<Self>, policy: Policy) -> Result<(), Trouble> {
        self.set_network_and(policy, async { Ok(()) }).await
    }

    /// The same, and `then`, which is a part of the change.
    pub(crate) async fn set_network_and(
        self: &Arc<Self>,
        policy: Policy,
        then: impl Future<Output = Result<(), Trouble>> + Send + 'static,
    ) -> Result<(), Trouble> {
        let agent = Arc::clone(self);
        let changed = async move {
            let _alone = agent.network.order.lock().await;
            agent.apply_network(policy).await?;
            then.await
        };
        self.ctx.to_the_end(VERB, changed).await
    }

    async fn apply_network(&self, policy: Policy) -> Result<(), Trouble> {
        self.ctx.store.set_network(&self.profile.id, &policy).await?;
        *self.network.policy.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
        match self.ctx.engine.set_network(&self.box_spec()).await {
            Ok(()) | Err(EngineError::NotRunning(_)) => Ok(()),
            Err(error) => Err(Trouble::engine(VERB)(error)),
        }
    }

    /// Brings up a box with the policy that holds when it is up.
    pub(super) async fn with_box_spec<T>(
        &self,
        bring_up: impl AsyncFnOnce(BoxSpec) -> T,
    ) -> Result<T, StoreError> {
        let _unchanging = self.network.order.lock().await;
        Ok(bring_up(self.filled_spec().await?).await)
    }

    /// What a box is told, with the secrets that its environment speaks of.
    pub(super) async fn filled_spec(&self) -> Result<BoxSpec, StoreError> {
        let mut spec = self.box_spec();
        let (store, workspace) = (&*self.ctx.store, &self.profile.workspace);
        spec.boot.env = crate::secrets::fill(store, workspace, spec.boot.env).await?;
        Ok(spec)
    }
}
