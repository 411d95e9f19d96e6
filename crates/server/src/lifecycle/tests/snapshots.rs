//! Snapshots, and what is made of them.

use std::sync::Mutex;
use std::time::Duration;

use dorm_engine::{EngineError, Homes as _};
use futures_util::FutureExt as _;

use super::drive::{ask, settle};
use super::{World, reaches};
use crate::config::OnShutdown;
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
async fn forks_are_made_to_the_end_when_whoever_asked_goes_away() {
    let world = World::new().await;
    FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    world.engine.hold_restores(true);
    let registry = world.registry.clone();
    let names = vec!["two".to_owned(), "three".to_owned()];
    let asking = tokio::spawn(async move { registry.fork(&agent, names, None, false, true).await });
    while world.engine.restores() < 2 {
        tokio::task::yield_now().await;
    }
    asking.abort();
    world.engine.hold_restores(false);
    for name in ["two", "three"] {
        reaches(&world.get(name).unwrap(), State::Running).await;
    }
    while world.homes.snapshot_count() > 0 {
        tokio::task::yield_now().await;
    }
    world.assert_in_order().await;
}

#[tokio::test]
async fn either_all_forks_are_made_or_none_when_the_daemon_ends_meanwhile() {
    let mut world = World::new().await;
    FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    world.engine.hold_restores(true);
    let names: Vec<_> = (0..6).map(|n| format!("fork-{n}")).collect();
    let (registry, asked) = (world.registry.clone(), names.clone());
    let asking = tokio::spawn(async move { registry.fork(&agent, asked, None, false, true).await });
    while world.engine.restores() < 4 {
        tokio::task::yield_now().await;
    }
    let registry = world.registry.clone();
    let ending = tokio::spawn(async move {
        let patience = Duration::from_secs(60);
        registry.shut_down(OnShutdown::Leave, patience).await;
    });
    settle().await;
    world.engine.hold_restores(false);
    let refused = asking.await.unwrap().err().unwrap();
    assert!(matches!(refused, Trouble::ShuttingDown), "{refused}");
    ending.await.unwrap();
    world.restart().await;
    for name in &names {
        while world.get(name).is_some() {
            tokio::task::yield_now().await;
        }
    }
    world.assert_in_order().await;
}

/// Root in a box can have its guest wait for ever.
#[tokio::test]
async fn a_fork_whose_guest_does_not_answer_is_given_up() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let unanswered = Mutex::new(Vec::new());
    world
        .engine
        .serve_guests(move |_, stream| unanswered.lock().unwrap().push(stream));
    tokio::time::pause();
    let names = vec!["two".to_owned()];
    let refused = world.registry.fork(&agent, names, None, false, true).await;
    let refused = refused.err().unwrap().in_full();
    assert!(refused.contains("its guest does not answer"), "{refused}");
    tokio::time::resume();
    assert!(world.get("two").is_none());
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
async fn forks_run_with_the_memory_of_their_source_and_an_identity_of_their_own() {
    let world = World::new().await;
    let guests = FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    world.homes.write(&agent.profile.id, "a file");
    let names = ["two", "three"].map(str::to_owned).to_vec();
    let forks = world
        .registry
        .fork(&agent, names, None, false, true)
        .await
        .unwrap();
    for (fork, name) in forks.iter().zip(["two", "three"]) {
        let id = &fork.profile.id;
        assert_eq!((fork.profile.name.as_str(), fork.state()), (name, State::Running));
        assert_eq!(world.engine.memory(id).as_deref(), Some("a secret"));
        assert_eq!(world.homes.content(id).as_deref(), Some("a file"));
        assert_eq!(fork.profile.uid_base, agent.profile.uid_base);
        assert_ne!(fork.profile.slot, agent.profile.slot);
        let told = guests.asked(|asked| {
            let told = asked.introduced.iter().find(|told| told["hostname"] == name);
            told.cloned().expect("it was told who it is")
        });
        assert_eq!(told["agentId"], id.as_str());
        assert_eq!(told["entropy"].as_str().unwrap().len(), 88);
        assert_eq!(told["envVars"]["DORM_AGENT_ID"], id.as_str());
        assert_eq!(told["nameservers"][0], "169.254.1.1");
    }
    assert!(
        agent.snapshots().await.unwrap().is_empty(),
        "nothing passing is left"
    );
    assert_eq!(agent.state(), State::Running);
    world.assert_in_order().await;
    agent.delete().await.unwrap();
    forks[0].hibernate("asked").await.unwrap();
    forks[0].ensure_running().await.unwrap();
    assert_eq!(
        guests.asked(|asked| asked.introduced.len()),
        2,
        "it knows who it is"
    );
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_fork_whose_memory_cannot_be_brought_back_is_not_made() {
    let world = World::new().await;
    let _guests = FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    world
        .engine
        .fail_next_restore(dorm_engine::EngineError::BadImage("no such kernel".to_owned()));
    let fork = world
        .registry
        .fork(&agent, vec!["two".to_owned()], None, false, true);
    let trouble = fork.await.err().expect("no fork").in_full();
    assert!(trouble.contains("no such kernel"), "{trouble}");
    assert_eq!(world.registry.all().len(), 1);
    assert_eq!(agent.state(), State::Running);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_fork_from_a_snapshot_or_of_files_alone_is_what_was_asked_for() {
    let mut world = World::new().await;
    let _guests = FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "old");
    let old = agent.snapshot("old", SnapshotKind::Full).await.unwrap();
    world.engine.remember(&agent.profile.id, "new");
    let fork = |name: &str, from, files_only, start| {
        let (registry, agent) = (world.registry.clone(), agent.clone());
        let names = vec![name.to_owned()];
        async move {
            registry
                .fork(&agent, names, from, files_only, start)
                .await
                .unwrap()
                .remove(0)
        }
    };
    let from_old = fork("old", Some(old.clone()), false, true).await;
    assert_eq!(world.engine.memory(&from_old.profile.id).as_deref(), Some("old"));
    let files = fork("files", Some(old), true, true).await;
    assert_eq!(world.engine.memory(&files.profile.id).as_deref(), Some(""));
    assert_ne!(files.profile.uid_base, agent.profile.uid_base);
    let asleep = fork("asleep", None, false, false).await;
    assert_eq!(asleep.state(), State::Hibernated);
    assert_eq!(agent.snapshots().await.unwrap().len(), 1);
    world.assert_in_order().await;
    world.engine.reboot();
    world.restart().await;
    let asleep = world.get("asleep").unwrap();
    asleep.ensure_running().await.unwrap();
    assert_eq!(world.engine.memory(&asleep.profile.id).as_deref(), Some("new"));
    world.assert_in_order().await;
}

#[tokio::test]
async fn whatever_fails_in_a_fork_leaves_nothing_of_it() {
    let world = World::new().await;
    let _guests = FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    let fork = |names: &[&str]| {
        let (registry, agent) = (world.registry.clone(), agent.clone());
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        async move { registry.fork(&agent, names, None, false, true).await }
    };
    for point in [
        Point::ForkHomeMade,
        Point::ForkImageMade,
        Point::StartRecorded,
        Point::StartBoxUp,
    ] {
        world.faults.arm(point, Action::Fail);
        assert!(fork(&["two", "three"]).await.is_err(), "{point:?}");
        assert_eq!(world.registry.all().len(), 1, "{point:?}");
        world.assert_in_order().await;
    }
    let taken = fork(&["two", "one"]).await;
    assert!(matches!(taken, Err(Trouble::Store(_))), "the name is taken");
    assert_eq!(world.registry.all().len(), 1);
    world.assert_in_order().await;
    fork(&["two"]).await.unwrap();
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
