//! Whatever is asked of an agent at once, snapshots, rollbacks, forks and its end included, records, boxes, homes and images agree afterwards.

use std::sync::Arc;

use futures_util::future::join_all;
use proptest::prelude::*;

use super::World;
use crate::guest_client::fake::FakeGuests;
use crate::lifecycle::Agent;
use crate::records::{SnapshotKind, State};

#[derive(Debug, Clone, Copy)]
enum Act {
    Wake,
    Pause,
    MakeDurable,
    Hibernate,
    Snapshot,
    RollBack,
    Fork,
    Stop,
    Delete,
}

fn acts() -> impl Strategy<Value = Vec<(Act, u8)>> {
    let act = prop_oneof![
        4 => Just(Act::Wake),
        2 => Just(Act::Pause),
        1 => Just(Act::MakeDurable),
        2 => Just(Act::Hibernate),
        2 => Just(Act::Snapshot),
        4 => Just(Act::RollBack),
        4 => Just(Act::Fork),
        1 => Just(Act::Stop),
        1 => Just(Act::Delete),
    ];
    prop::collection::vec((act, 0u8..60), 2..14)
}

async fn act(world: &World, agent: &Arc<Agent>, number: usize, act: Act) {
    match act {
        Act::Wake => drop(agent.ensure_running().await),
        Act::Pause => drop(agent.pause().await),
        Act::MakeDurable => drop(agent.make_durable().await),
        Act::Hibernate => drop(agent.hibernate("asked").await),
        Act::Snapshot => drop(agent.snapshot("", SnapshotKind::Full).await),
        Act::RollBack => {
            if let Ok(first) = agent.find_snapshot("first").await {
                drop(agent.roll_back(&first).await);
            }
        }
        Act::Fork => {
            let names = vec![format!("fork-{number}")];
            drop(world.registry.fork(agent, names, None, false, true).await);
        }
        Act::Stop => drop(agent.stop(None).await),
        Act::Delete => drop(agent.delete().await),
    }
}

async fn tangle(acts: Vec<(Act, u8)>) {
    let world = World::new().await;
    FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    agent.snapshot("first", SnapshotKind::Full).await.unwrap();
    let doing = acts.into_iter().enumerate().map(async |(number, (next, later))| {
        for _ in 0..later {
            tokio::task::yield_now().await;
        }
        act(&world, &agent, number, next).await;
    });
    join_all(doing).await;
    world.assert_in_order().await;
    for agent in world.registry.all() {
        agent.ensure_running().await.unwrap();
        assert_eq!(agent.state(), State::Running);
    }
    world.assert_in_order().await;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_tangle_of_requests_leaves_everything_in_order(acts in acts()) {
        super::model::run(tangle(acts));
    }
}
