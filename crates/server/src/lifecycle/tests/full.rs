//! No room on the disk, and other wants of the machine.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::EngineError;

use super::drive::{ask, settle};
use super::idle::{seconds, watched};
use super::{Agent, World, reaches, vanishes};
use crate::config::Standby;
use crate::faults::{Action, Point};
use crate::lifecycle::Trouble;
use crate::lifecycle::why::why;
use crate::records::{Lifetime, SnapshotKind, State};
use crate::store::Store as _;

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

/// None of these can be recorded.
const UNTOLD: [State; 5] = [
    State::Standby,
    State::Stopping,
    State::Stopped,
    State::Hibernated,
    State::Deleting,
];

#[tokio::test(start_paused = true)]
async fn a_box_that_ends_while_nothing_can_be_recorded_is_gone_at_once_and_recorded_later() {
    let mut world = World::new().await;
    let (awake, asleep) = (world.running("awake").await, world.running("asleep").await);
    let durable = world.running("durable").await;
    world.engine.remember(&durable.profile.id, "a secret");
    asleep.pause().await.unwrap();
    durable.pause().await.unwrap();
    durable.make_durable().await.unwrap();
    world.store.fail_changes_to(UNTOLD);
    // That is not recorded either when the end comes.
    awake.pause().await.unwrap();
    settle().await;
    let ends = [
        (&awake, State::Stopped),
        (&asleep, State::Stopped),
        (&durable, State::Hibernated),
    ];
    for (agent, state) in ends {
        world.engine.kill(&agent.profile.id, "no room for its memory");
        reaches(agent, state).await;
        let published = agent.published();
        assert!(
            published.status.reason.contains("no room for its memory"),
            "{published:?}"
        );
        assert!(published.current_box.is_none());
    }
    world
        .store
        .fail_changes_to([State::Starting, State::Stopped, State::Hibernated]);
    let trouble = awake.ensure_running().await.unwrap_err();
    assert!(matches!(trouble, Trouble::Store(_)), "{trouble:?}");
    world.store.fail_changes_to(None);
    world.assert_in_order().await;
    world.restart().await;
    world.assert_in_order().await;
    for agent in world.registry.all() {
        agent.ensure_running().await.unwrap();
    }
    assert_eq!(
        world.engine.memory(&durable.profile.id).as_deref(),
        Some("a secret")
    );
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn an_ephemeral_agent_whose_end_cannot_be_recorded_goes_once_it_can() {
    let world = World::new().await;
    let agent = world.create("one", Lifetime::Ephemeral, true).await.unwrap();
    world.store.fail_changes_to(UNTOLD);
    world.engine.kill(&agent.profile.id, "the end");
    settle().await;
    assert_eq!(agent.state(), State::Running);
    world.store.fail_changes_to(None);
    vanishes(&agent).await;
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn what_could_not_be_recorded_is_not_recorded_over_a_deletion() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    world.store.fail_changes_to(UNTOLD);
    agent.pause().await.unwrap();
    settle().await;
    world.store.fail_changes_to([State::Standby]);
    world.faults.arm(Point::DeleteRecorded, Action::Hang);
    let deleting = ask(&agent, |agent| async move { agent.delete().await });
    world.faults.struck().await;
    world.store.fail_changes_to(None);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let records = world.store.agents().await.unwrap().readable;
    assert_eq!(records[0].status.state, State::Deleting);
    deleting.abort();
    world.restart().await;
    if let Some(agent) = world.get("one") {
        vanishes(&agent).await;
    }
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_is_asked_by_one_task_for_each_agent() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    world.store.fail_changes_to([State::Standby]);
    seconds(60).await;
    assert_eq!(agent.state(), State::Standby);
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let tries = world.store.refusals();
    seconds(300).await;
    assert!(tasks() <= before + 1, "{} tasks have become {}", before, tasks());
    let tries = world.store.refusals() - tries;
    // Each second, and when its memory is to go to disk, which is tried each minute.
    assert!((290..=330).contains(&tries), "{tries} tries in 300 s");
    assert_eq!(world.engine.checkpoints(), 0);
    world.store.fail_changes_to(None);
    seconds(300).await;
    assert!(agent.current_image().is_some());
    world.assert_in_order().await;
}
