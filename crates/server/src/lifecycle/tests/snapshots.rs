//! Snapshots, and ways back to them.

use std::time::Duration;

use dorm_engine::{EngineError, Homes as _};
use futures_util::FutureExt as _;

use super::World;
use super::drive::{ask, settle};
use crate::faults::{Action, Point};
use crate::guest_client::fake::FakeGuests;
use crate::lifecycle::Trouble;
use crate::records::{Lifetime, SnapshotKind, State};

#[tokio::test]
async fn a_live_agent_goes_on_after_its_snapshot() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    for kind in [SnapshotKind::Full, SnapshotKind::Files] {
        let snapshot = agent.snapshot("before", kind).await.unwrap();
        assert_eq!((snapshot.kind, snapshot.label.as_str()), (kind, "before"));
        assert_eq!(agent.state(), State::Running);
        assert_eq!(agent.published().status.reason, "started");
        world.assert_in_order().await;
    }
    let all = agent.snapshots().await.unwrap();
    assert_eq!(all[1].parent.as_ref(), Some(&all[0].id));
    assert_eq!(
        agent.find_snapshot("before").await.unwrap(),
        all[1],
        "the newest of a label"
    );
    let ambiguous = agent.find_only_snapshot("before").await;
    assert!(matches!(ambiguous, Err(Trouble::SameLabel(_))), "{ambiguous:?}");
    assert_eq!(
        agent.find_only_snapshot(all[0].id.as_str()).await.unwrap(),
        all[0]
    );
    assert_eq!(
        world.engine.memory(&agent.profile.id).as_deref(),
        Some("a secret")
    );
}

#[tokio::test]
async fn an_agent_in_any_state_of_rest_is_snapshotted_as_it_is() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    let snapshot = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    assert_eq!(snapshot.kind, SnapshotKind::Files, "it has no memory");
    agent.ensure_running().await.unwrap();
    world.engine.remember(&agent.profile.id, "a secret");
    agent.pause().await.unwrap();
    let paused = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    assert_eq!(agent.state(), State::Standby);
    world.assert_in_order().await;
    agent.hibernate("asked").await.unwrap();
    let checkpoints = world.engine.checkpoints();
    let slept = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    assert_eq!(agent.state(), State::Hibernated);
    assert_eq!(
        world.engine.checkpoints(),
        checkpoints,
        "the image is there already"
    );
    assert_eq!(
        (paused.kind, slept.kind),
        (SnapshotKind::Full, SnapshotKind::Full)
    );
    world.assert_in_order().await;
    agent.delete().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn the_files_alone_of_an_agent_that_sleeps_are_kept_without_traces_of_its_image() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let awake = agent.snapshot("", SnapshotKind::Files).await.unwrap();
    assert_eq!(world.homes.taken_without(&awake.id), None);
    agent.pause().await.unwrap();
    for durable in [true, false] {
        if durable {
            agent.make_durable().await.unwrap();
        } else {
            agent.hibernate("asked").await.unwrap();
        }
        let image = world.image_of(&agent);
        let files = agent.snapshot("", SnapshotKind::Files).await.unwrap();
        assert_eq!(world.homes.taken_without(&files.id), Some(image));
        let full = agent.snapshot("", SnapshotKind::Full).await.unwrap();
        assert_eq!(world.homes.taken_without(&full.id), None, "its memory needs them");
    }
}

#[tokio::test]
async fn a_rollback_brings_back_files_and_memory_and_keeps_what_was() {
    let world = World::new().await;
    FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.engine.remember(&id, "old memory");
    world.homes.write(&id, "old files");
    let old = agent.snapshot("old", SnapshotKind::Full).await.unwrap();
    world.engine.remember(&id, "new memory");
    world.homes.write(&id, "new files");
    let new = agent.roll_back(&old).await.unwrap();
    assert_eq!(agent.state(), State::Running);
    let now = |world: &World| {
        (
            world.engine.memory(&id).unwrap(),
            world.homes.content(&id).unwrap(),
        )
    };
    assert_eq!(now(&world), ("old memory".to_owned(), "old files".to_owned()));
    world.assert_in_order().await;
    agent.roll_back(&new.before).await.unwrap();
    assert_eq!(now(&world), ("new memory".to_owned(), "new files".to_owned()));
    let newest = agent.snapshots().await.unwrap().pop().unwrap();
    assert_eq!(newest.parent, Some(old.id), "it was at the old one");
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_rollback_whose_memory_cannot_be_brought_back_says_so() {
    let world = World::new().await;
    FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    let old = agent.snapshot("old", SnapshotKind::Full).await.unwrap();
    let damaged = EngineError::BadImage("its checksum is wrong".to_owned());
    world.engine.fail_next_restore(damaged);
    let back = agent.roll_back(&old).await.unwrap();
    assert_eq!(agent.state(), State::Running);
    assert!(
        back.lost
            .is_some_and(|lost| lost.contains("its checksum is wrong"))
    );
    let back = agent.roll_back(&old).await.unwrap();
    assert_eq!(back.lost, None, "that was another time");
}

#[tokio::test]
async fn a_snapshot_is_deleted_to_its_end_although_nobody_waits_for_it() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let snapshot = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    assert!(agent.delete_snapshot(&snapshot).now_or_never().is_none());
    let gone = async {
        while !world.homes.snapshots().await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn the_memory_of_snapshots_counts_as_held_and_once_where_it_is_shared() {
    let world = World::new().await;
    let agent = world.running("one").await;
    assert_eq!(agent.memory_on_disk().await, 0);
    world.engine.remember(&agent.profile.id, "a secret");
    agent.hibernate("asked").await.unwrap();
    let own = agent.memory_on_disk().await;
    assert_eq!(own, agent.image().unwrap().size);
    agent.snapshot("", SnapshotKind::Full).await.unwrap();
    assert_eq!(agent.memory_on_disk().await, own, "it has the same files");
    agent.ensure_running().await.unwrap();
    agent.snapshot("", SnapshotKind::Full).await.unwrap();
    agent.stop(None).await.unwrap();
    assert_eq!(agent.memory_on_disk().await, 2 * own, "of two snapshots");
}

#[tokio::test]
async fn a_rollback_to_files_starts_what_ran_and_leaves_stopped_what_did_not() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.homes.write(&id, "old");
    let old = agent.snapshot("", SnapshotKind::Files).await.unwrap();
    world.homes.write(&id, "new");
    world.engine.remember(&id, "a secret");
    agent.roll_back(&old).await.unwrap();
    assert_eq!(
        (agent.state(), world.engine.memory(&id).as_deref()),
        (State::Running, Some(""))
    );
    agent.stop(None).await.unwrap();
    world.homes.write(&id, "newer");
    agent.roll_back(&old).await.unwrap();
    assert_eq!(agent.state(), State::Stopped);
    assert_eq!(world.homes.content(&id).as_deref(), Some("old"));
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_rollback_of_what_cannot_be_saved_keeps_its_files_at_least() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let old = agent.snapshot("", SnapshotKind::Files).await.unwrap();
    world.engine.fail_next_checkpoint("io_uring");
    let back = agent.roll_back(&old).await.unwrap();
    assert_eq!(back.before.kind, SnapshotKind::Files);
    assert!(back.lost.unwrap().contains("io_uring"));
    world.assert_in_order().await;
    assert_eq!(
        agent.roll_back(&old).await.unwrap().lost,
        None,
        "what is kept is not lost"
    );
}

#[tokio::test]
async fn nothing_goes_on_between_what_a_rollback_keeps_and_the_end_of_the_box() {
    for point in [
        Point::SnapshotSealed,
        Point::RollBackRecorded,
        Point::RollBackStaged,
    ] {
        let world = World::new().await;
        let agent = world.running("one").await;
        let id = agent.profile.id.clone();
        let old = agent.snapshot("", SnapshotKind::Full).await.unwrap();
        world.engine.remember(&id, "new");
        world.faults.arm(point, Action::Hang);
        let rolled = agent.clone();
        tokio::spawn(async move { rolled.roll_back(&old).await });
        world.faults.struck().await;
        assert!(world.engine.is_frozen(&id), "{point:?}");
        assert_ne!(agent.state(), State::Running, "nobody is let in, {point:?}");
    }
}

#[tokio::test]
async fn a_rollback_that_cannot_be_recorded_lets_the_agent_go_on() {
    for state in [State::Running, State::Standby, State::Hibernated] {
        let world = World::new().await;
        let agent = world.running("one").await;
        let id = agent.profile.id.clone();
        let old = agent.snapshot("", SnapshotKind::Full).await.unwrap();
        world.engine.remember(&id, "new");
        match state {
            State::Standby => agent.pause().await.unwrap(),
            State::Hibernated => agent.hibernate("asked").await.unwrap(),
            _ => {}
        }
        world.store.fail_changes_to(Some(State::Stopping));
        agent.roll_back(&old).await.unwrap_err();
        world.store.fail_changes_to(None);
        assert_eq!(agent.state(), state);
        world.assert_in_order().await;
        agent.ensure_running().await.unwrap();
        assert_eq!(world.engine.memory(&id).as_deref(), Some("new"));
    }
}

#[tokio::test]
async fn a_live_snapshot_holds_nobody_up_while_it_goes_to_disk() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.faults.arm(Point::SnapshotThawed, Action::Hang);
    let taken = agent.clone();
    tokio::spawn(async move { taken.snapshot("", SnapshotKind::Full).await });
    world.faults.struck().await;
    assert!(!world.engine.is_frozen(&agent.profile.id));
    agent.ensure_running().await.unwrap();
    assert_eq!(agent.published().status.reason, "started");
}

#[tokio::test]
async fn a_request_that_meets_a_live_snapshot_is_served_before_that_is_on_disk_and_wakes_nobody_later() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.engine.hold_checkpoints(true);
    world.engine.hold_seals(true);
    let taken = ask(&agent, |agent| async move {
        agent.snapshot("", SnapshotKind::Full).await
    });
    while world.engine.checkpoints() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(agent.state(), State::Freezing);
    let paused = ask(&agent, |agent| async move { agent.pause().await });
    settle().await;
    let reached = ask(&agent, |agent| async move { agent.ensure_running().await });
    settle().await;
    assert!(!reached.is_finished(), "it is held still");
    world.engine.hold_checkpoints(false);
    while world.engine.is_frozen(&id) {
        tokio::task::yield_now().await;
    }
    settle().await;
    assert!(!taken.is_finished(), "its memory is not on disk yet");
    assert!(reached.is_finished(), "it goes on");
    reached.await.unwrap().unwrap();
    world.engine.hold_seals(false);
    taken.await.unwrap().unwrap();
    paused.await.unwrap().unwrap();
    settle().await;
    assert_eq!(agent.state(), State::Standby);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_rollback_that_could_not_bring_memory_back_is_refused_before_anything_is_lost() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    let snapshot = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    world.engine.cannot_checkpoint("criu is too old");
    let refused = agent.roll_back(&snapshot).await.unwrap_err();
    assert!(matches!(refused, Trouble::NoImages(_)), "{refused}");
    assert_eq!(agent.state(), State::Running);
    let memory = world.engine.memory(&agent.profile.id);
    assert_eq!(memory.as_deref(), Some("a secret"));
}

#[tokio::test]
async fn a_fork_that_goes_back_to_before_its_first_start_is_told_who_it_is() {
    let world = World::new().await;
    let guests = FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    let forks = world
        .registry
        .fork(&agent, vec!["two".to_owned()], None, false, false)
        .await;
    let fork = forks.unwrap().remove(0);
    let unborn = fork.snapshot("", SnapshotKind::Full).await.unwrap();
    fork.ensure_running().await.unwrap();
    fork.roll_back(&unborn).await.unwrap();
    let told = guests.asked(|asked| {
        asked
            .introduced
            .iter()
            .filter(|told| told["hostname"] == "two")
            .count()
    });
    assert_eq!(told, 2);
}

#[tokio::test]
async fn a_rollback_that_fails_leaves_the_home_and_says_why() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    let old = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    world.homes.write(&id, "new");
    world.homes.fail_next_exchange("declared");
    let trouble = agent.roll_back(&old).await.unwrap_err();
    assert!(trouble.in_full().contains("declared"));
    assert_eq!(agent.state(), State::Failed);
    assert_eq!(world.homes.content(&id).as_deref(), Some("new"));
    agent.ensure_running().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_rollback_for_which_nothing_can_be_made_ready_leaves_the_agent_as_it_was() {
    for point in [Point::RollBackRecorded, Point::RollBackStaged] {
        for state in [State::Running, State::Standby, State::Hibernated] {
            let world = World::new().await;
            let agent = world.running("one").await;
            let id = agent.profile.id.clone();
            world.engine.remember(&id, "old");
            let old = agent.snapshot("", SnapshotKind::Full).await.unwrap();
            world.engine.remember(&id, "new");
            match state {
                State::Standby => agent.pause().await.unwrap(),
                State::Hibernated => agent.hibernate("asked").await.unwrap(),
                _ => {}
            }
            world.faults.arm(point, Action::Fail);
            agent.roll_back(&old).await.unwrap_err();
            assert_eq!(agent.state(), state, "{point:?}");
            world.assert_in_order().await;
            agent.ensure_running().await.unwrap();
            assert_eq!(world.engine.memory(&id).as_deref(), Some("new"), "{point:?}");
        }
    }
}

#[tokio::test]
async fn a_snapshot_that_fails_leaves_nothing_and_the_agent_as_it_was() {
    let points = [
        Point::SnapshotFrozen,
        Point::SnapshotImageMade,
        Point::SnapshotHomeKept,
        Point::SnapshotRecorded,
    ];
    for point in points {
        for state in [State::Running, State::Standby, State::Hibernated] {
            let world = World::new().await;
            let agent = world.running("one").await;
            match state {
                State::Standby => agent.pause().await.unwrap(),
                State::Hibernated => agent.hibernate("asked").await.unwrap(),
                _ => {}
            }
            world.faults.arm(point, Action::Fail);
            agent.snapshot("", SnapshotKind::Full).await.unwrap_err();
            assert_eq!(agent.state(), state, "{point:?}");
            assert!(agent.snapshots().await.unwrap().is_empty(), "{point:?}");
            world.assert_in_order().await;
        }
    }
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.fail_next_checkpoint("io_uring");
    agent.snapshot("", SnapshotKind::Full).await.unwrap_err();
    world.homes.fail_next_snapshot("no");
    agent.snapshot("", SnapshotKind::Files).await.unwrap_err();
    assert_eq!(agent.state(), State::Running);
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_agent_that_is_deleted_takes_its_snapshots_with_it_but_not_its_forks() {
    let world = World::new().await;
    let _guests = FakeGuests::answering(&world.engine, |_| None);
    let agent = world.create("one", Lifetime::Persistent, true).await.unwrap();
    let snapshot = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    let names = vec!["two".to_owned()];
    let forks = world
        .registry
        .fork(&agent, names, Some(snapshot), false, false)
        .await
        .unwrap();
    agent.delete().await.unwrap();
    world.assert_in_order().await;
    forks[0].ensure_running().await.unwrap();
    world.assert_in_order().await;
}
