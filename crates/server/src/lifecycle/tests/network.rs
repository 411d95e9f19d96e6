//! What boxes may reach.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dorm_engine::network::Policy;

use super::World;
use super::drive::settle;

#[tokio::test]
async fn a_new_policy_holds_and_what_belongs_to_it_is_done_when_whoever_asked_goes_away() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let closed = Policy {
        internet: false,
        ..Policy::default()
    };
    world.engine.hold_networks(true);
    let told = Arc::new(AtomicBool::new(false));
    let asking = tokio::spawn({
        let (agent, closed, told) = (agent.clone(), closed.clone(), told.clone());
        let tell = async move {
            told.store(true, Ordering::Relaxed);
            Ok(())
        };
        async move { agent.set_network_and(closed, tell).await }
    });
    settle().await;
    let in_force = || world.engine.last_spec().unwrap().network;
    assert!(*agent.network() == closed && in_force() != closed, "half is done");
    asking.abort();
    settle().await;
    world.engine.hold_networks(false);
    settle().await;
    assert_eq!(in_force(), closed);
    assert!(told.load(Ordering::Relaxed));
    world.assert_in_order().await;
}
