//! No room on the disk, and other wants of the machine.

use dorm_engine::EngineError;

use super::World;
use crate::lifecycle::Trouble;
use crate::records::{SnapshotKind, State};

const FULL: EngineError = EngineError::NoSpace { free: 0 };

/// Gives what is told of a wake that fails for `error`. The agent sleeps on, and the next wake brings its memory back.
async fn told_of_a_wake_in_vain(error: EngineError) -> Trouble {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    agent.hibernate("asked").await.unwrap();
    world.engine.fail_next_restore(error);
    let trouble = agent.ensure_running().await.unwrap_err();
    assert_eq!(agent.state(), State::Hibernated);
    assert!(agent.setback().is_none(), "nothing is lost");
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    assert_eq!(
        world.engine.memory(&agent.profile.id).as_deref(),
        Some("a secret")
    );
    trouble
}

#[tokio::test]
async fn a_wake_for_which_there_is_no_room_loses_no_memory() {
    let trouble = told_of_a_wake_in_vain(FULL).await;
    assert!(trouble.is_no_space(), "{trouble:?}");
}

#[tokio::test]
async fn a_machine_that_fails_at_a_wake_is_not_held_against_the_memory() {
    let broken = EngineError::io("cannot start criu")(std::io::Error::other("too many open files"));
    let trouble = told_of_a_wake_in_vain(broken).await;
    assert!(
        matches!(&trouble, Trouble::CannotWake(why) if why.contains("too many")),
        "{trouble:?}"
    );
}

#[tokio::test]
async fn a_snapshot_or_fork_for_which_there_is_no_room_leaves_the_agent_as_it_was() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let old = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    world.homes.fill(true);
    assert!(
        agent
            .snapshot("", SnapshotKind::Full)
            .await
            .unwrap_err()
            .is_no_space()
    );
    assert!(agent.roll_back(&old).await.unwrap_err().is_no_space());
    let forked = world
        .registry
        .fork(&agent, vec!["two".to_owned()], None, false, true);
    assert!(forked.await.is_err_and(|trouble| trouble.is_no_space()));
    assert_eq!(agent.state(), State::Running);
    world.assert_in_order().await;
}
