//! Forks: all or none, with a memory that is theirs from then on.

use std::sync::Mutex;
use std::time::Duration;

use super::drive::settle;
use super::{World, reaches};
use crate::config::OnShutdown;
use crate::faults::{Action, Point};
use crate::guest_client::fake::FakeGuests;
use crate::lifecycle::Trouble;
use crate::records::{SnapshotKind, State};

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
