//! No room on the disk, and other wants of the machine.

use std::sync::Arc;

use dorm_engine::EngineError;

use super::{Agent, World};
use crate::config::Standby;
use crate::lifecycle::Trouble;
use crate::lifecycle::why::why;
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

#[tokio::test]
async fn an_agent_that_has_lost_its_memory_and_finds_no_room_to_start_is_stopped_and_says_so() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    agent.hibernate("asked").await.unwrap();
    world
        .engine
        .fail_next_restore(EngineError::BadImage("it is torn".to_owned()));
    world.engine.fail_next_start_with(FULL);
    let trouble = agent.ensure_running().await.unwrap_err();
    assert!(trouble.is_no_space(), "{trouble:?}");
    for restarted in [false, true] {
        if restarted {
            world.restart().await;
        }
        let agent = world.get("one").unwrap();
        let status = agent.published().status;
        assert_eq!(status.state, State::Stopped, "{status:?}");
        for told in [&status.reason, &agent.setback().unwrap().what] {
            let all = ["memory is lost: ", "it is torn", "not started from its files"];
            assert!(all.iter().all(|part| told.contains(part)), "{told}");
        }
        assert_eq!(why(&agent, &Standby::default()).memory, "none");
        world.assert_in_order().await;
    }
    world.get("one").unwrap().ensure_running().await.unwrap();
    assert_eq!(world.engine.restores(), 1, "it is over with the image");
    world.assert_in_order().await;
}

/// The box of an agent whose memory is on disk runs once more, and ends, in vain. What it wrote is not on disk yet.
async fn assert_old_memory_is_not_used(world: &World, agent: &Arc<Agent>) {
    agent.ensure_running().await.unwrap();
    assert_eq!(world.engine.memory(&agent.profile.id).as_deref(), Some(""));
    let reason = agent.published().status.reason;
    assert!(reason.contains("its files have changed"), "{reason}");
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_wake_that_failed_after_the_box_had_run_is_not_tried_again_with_the_old_memory() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "old");
    agent.hibernate("asked").await.unwrap();
    world.homes.write(&agent.profile.id, "newer than the memory");
    let died = EngineError::io("the sandbox ended")(std::io::Error::other("out of memory"));
    world.engine.fail_next_restore(died);
    agent.ensure_running().await.unwrap_err();
    assert_eq!(agent.state(), State::Hibernated);
    assert_old_memory_is_not_used(&world, &agent).await;
}

#[tokio::test]
async fn a_box_that_would_not_go_and_wrote_on_is_not_brought_back_as_it_was() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "old");
    world.engine.fail_next_stop("it hangs");
    agent.hibernate("asked").await.unwrap_err();
    assert_eq!(agent.state(), State::Failed);
    world.homes.write(&agent.profile.id, "newer than the memory");
    assert_old_memory_is_not_used(&world, &agent).await;
}
