//! To standby, to disk, and back.

use futures_util::future::join_all;

use super::{World, later};
use crate::faults::{Action, Point};
use crate::lifecycle::Trouble;
use crate::lifecycle::decide::Refusal;
use crate::records::State;
use crate::store::Store as _;

#[tokio::test]
async fn a_paused_agent_is_frozen_and_goes_on_when_something_reaches_for_it() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    agent.pause().await.unwrap();
    assert_eq!(agent.state(), State::Standby);
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    assert_eq!(
        world.engine.memory(&agent.profile.id).as_deref(),
        Some("a secret")
    );
    assert_eq!((world.engine.starts(), world.engine.thaws()), (1, 1));
    assert_eq!(agent.generation(), 1, "it is the same box");
    world.assert_in_order().await;
}

#[tokio::test]
async fn neither_pause_nor_wake_from_standby_waits_for_the_disk() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let before = world.store.commits();
    agent.pause().await.unwrap();
    agent.ensure_running().await.unwrap();
    agent.pause().await.unwrap();
    world.assert_in_order().await;
    assert_eq!(world.store.commits(), before + 3, "each is recorded once");
}

#[tokio::test]
async fn a_hibernated_agent_comes_back_with_its_memory_after_a_reboot() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.engine.remember(&id, "a secret");
    agent.hibernate("asked").await.unwrap();
    assert_eq!(agent.state(), State::Hibernated);
    assert!(!world.engine.is_running(&id));
    world.assert_in_order().await;
    world.engine.reboot();
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Hibernated);
    agent.ensure_running().await.unwrap();
    assert_eq!(world.engine.memory(&id).as_deref(), Some("a secret"));
    assert_eq!(agent.published().status.reason, "woken from disk");
    world.assert_in_order().await;
}

#[tokio::test]
async fn the_image_is_recorded_before_the_processes_are_let_go() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.hold_stops(true);
    let asked = agent.clone();
    let hibernation = tokio::spawn(async move { asked.hibernate("asked").await });
    while world.engine.stops() == 0 {
        tokio::task::yield_now().await;
    }
    let record = world.store.agents().await.unwrap().readable.remove(0);
    assert_eq!(record.status.state, State::Hibernating);
    assert!(record.image.is_some_and(|image| image.current));
    assert!(world.engine.is_frozen(&agent.profile.id));
    world.engine.hold_stops(false);
    hibernation.await.unwrap().unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_hundred_requests_to_a_sleeping_agent_cause_one_wake() {
    let world = World::new().await;
    let agent = world.running("one").await;
    agent.hibernate("asked").await.unwrap();
    world.engine.hold_restores(true);
    let reaching = (0..100).map(|_| {
        let agent = agent.clone();
        tokio::spawn(async move { agent.ensure_running().await })
    });
    let reaching: Vec<_> = reaching.collect();
    while world.engine.restores() == 0 {
        tokio::task::yield_now().await;
    }
    world.engine.hold_restores(false);
    for answer in join_all(reaching).await {
        answer.unwrap().unwrap();
    }
    assert_eq!((world.engine.restores(), world.engine.starts()), (1, 1));
    agent.pause().await.unwrap();
    for answer in join_all((0..100).map(|_| agent.ensure_running())).await {
        answer.unwrap();
    }
    assert_eq!(world.engine.thaws(), 1);
}

#[tokio::test]
async fn a_checkpoint_that_fails_leaves_the_agent_as_it_was() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.engine.remember(&id, "a secret");
    world.engine.fail_next_checkpoint("process 7 uses io_uring");
    let trouble = agent.hibernate("asked").await.unwrap_err();
    assert!(
        trouble.in_full().contains("process 7 uses io_uring"),
        "{trouble:?}"
    );
    assert_eq!(agent.state(), State::Running);
    assert!(agent.published().status.reason.contains("io_uring"));
    assert!(agent.setback().unwrap().what.contains("io_uring"));
    assert!(
        !agent.is_unsavable(),
        "it goes on, and may be savable when it sleeps"
    );
    world.assert_in_order().await;

    agent.pause().await.unwrap();
    let asleep = agent.published().status;
    later().await;
    world.engine.fail_next_checkpoint("process 7 uses io_uring");
    agent.hibernate("asked").await.unwrap_err();
    let status = agent.published().status;
    assert_eq!((status.state, status.since), (State::Standby, asleep.since));
    assert!(agent.is_unsavable(), "nobody tries again by himself");
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    assert!(!agent.is_unsavable());
    assert_eq!(world.engine.memory(&id).as_deref(), Some("a secret"));
    agent.hibernate("asked").await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn where_no_images_can_be_made_hibernation_is_refused_and_standby_works() {
    let world = World::new().await;
    world.engine.cannot_checkpoint("criu is too old");
    let agent = world.running("one").await;
    let refused = agent.hibernate("asked").await.unwrap_err();
    assert!(
        matches!(&refused, Trouble::NoImages(why) if why == "criu is too old"),
        "{refused:?}"
    );
    assert_eq!(agent.state(), State::Running);
    agent.pause().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn where_no_image_can_be_brought_back_a_wake_is_refused_and_the_image_stays_good() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.engine.remember(&id, "a secret");
    agent.hibernate("asked").await.unwrap();
    let image = agent.current_image().unwrap();
    world.engine.cannot_checkpoint("criu is not installed");
    for restarted in [false, true] {
        if restarted {
            world.engine.reboot();
            world.restart().await;
        }
        let agent = world.get("one").unwrap();
        for _ in 0..2 {
            let refused = agent.ensure_running().await.unwrap_err();
            assert!(
                matches!(&refused, Trouble::CannotWake(why) if why == "criu is not installed"),
                "{refused:?}"
            );
            assert_eq!(agent.state(), State::Hibernated);
            let reason = agent.published().status.reason;
            assert!(reason.contains("criu is not installed"), "{reason}");
            assert_eq!(agent.current_image().as_ref(), Some(&image));
            assert!(agent.setback().is_none(), "nothing is lost");
            world.assert_in_order().await;
        }
    }
    world.engine.can_checkpoint_again();
    let agent = world.get("one").unwrap();
    agent.ensure_running().await.unwrap();
    assert_eq!(world.engine.memory(&id).as_deref(), Some("a secret"));
    world.assert_in_order().await;
}

#[tokio::test]
async fn memory_that_cannot_be_brought_back_can_be_given_up() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.homes.write(&id, "a file");
    agent.hibernate("asked").await.unwrap();
    world.engine.cannot_checkpoint("criu is not installed");
    agent.ensure_running().await.unwrap_err();
    agent.stop(None).await.unwrap();
    agent.ensure_running().await.unwrap();
    assert_eq!(world.homes.content(&id).as_deref(), Some("a file"));
    assert!(agent.current_image().is_none());
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_image_that_cannot_be_used_is_set_aside_and_the_agent_says_so_and_starts_from_its_files() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.homes.write(&id, "a file");
    for damaged in [true, false] {
        agent.hibernate("asked").await.unwrap();
        let image = agent.current_image().unwrap().id;
        let folder = world.images.path().join(id.as_str());
        if damaged {
            std::fs::write(folder.join(image.as_str()).join("memory"), "garbage").unwrap();
        } else {
            world
                .engine
                .fail_next_restore(dorm_engine::EngineError::BadImage("no such kernel".to_owned()));
        }
        agent.ensure_running().await.unwrap();
        assert_eq!(agent.state(), State::Running);
        let reason = agent.published().status.reason;
        assert!(reason.contains("its memory is lost"), "{reason}");
        assert_eq!(agent.setback().unwrap().what, reason);
        assert!(folder.join(format!("{image}.bad")).is_dir());
        assert_eq!(world.homes.content(&id).as_deref(), Some("a file"));
        world.assert_in_order().await;
    }
    let kept = std::fs::read_dir(world.images.path().join(id.as_str())).unwrap();
    assert_eq!(kept.count(), 1, "only the newest is kept");
    agent.delete().await.unwrap();
    assert!(!world.images.path().join(id.as_str()).exists());
}

#[tokio::test]
async fn every_fault_on_the_way_to_disk_leaves_the_agent_as_it_was() {
    for point in [
        Point::HibernateRecorded,
        Point::ImageFrozen,
        Point::ImageMade,
        Point::ImageRecorded,
        Point::HibernateImageRecorded,
    ] {
        for paused in [false, true] {
            let world = World::new().await;
            let agent = world.running("one").await;
            world.engine.remember(&agent.profile.id, "a secret");
            if paused {
                agent.pause().await.unwrap();
            }
            let before = agent.state();
            world.faults.arm(point, Action::Fail);
            agent.hibernate("asked").await.unwrap_err();
            assert_eq!(agent.state(), before, "{point:?}");
            world.assert_in_order().await;
            agent.hibernate("asked").await.unwrap();
            agent.ensure_running().await.unwrap();
            assert_eq!(
                world.engine.memory(&agent.profile.id).as_deref(),
                Some("a secret")
            );
            world.assert_in_order().await;
        }
    }
}

#[tokio::test]
async fn an_image_that_cannot_be_recorded_is_no_image() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.store.fail_images(true);
    agent.hibernate("asked").await.unwrap_err();
    world.store.fail_images(false);
    assert_eq!(agent.state(), State::Running);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_box_that_does_not_go_away_after_its_memory_was_saved_costs_no_memory() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    world.engine.fail_next_stop("it clings");
    agent.hibernate("asked").await.unwrap_err();
    assert_eq!(agent.state(), State::Failed);
    agent.ensure_running().await.unwrap();
    assert_eq!(
        world.engine.memory(&agent.profile.id).as_deref(),
        Some("a secret")
    );
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_stop_from_sleep_keeps_the_files_alone() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    for hibernate in [false, true] {
        world.engine.remember(&id, "a secret");
        agent.pause().await.unwrap();
        if hibernate {
            agent.hibernate("asked").await.unwrap();
        }
        agent.stop(None).await.unwrap();
        assert_eq!(agent.state(), State::Stopped);
        world.assert_in_order().await;
        agent.ensure_running().await.unwrap();
        assert_eq!(world.engine.memory(&id).as_deref(), Some(""));
    }
}

#[tokio::test]
async fn what_does_not_run_can_neither_be_paused_nor_put_to_disk() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    for refused in [agent.pause().await, agent.hibernate("asked").await] {
        assert!(
            matches!(refused, Err(Trouble::Refused(Refusal::NothingRuns))),
            "{refused:?}"
        );
    }
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_agent_that_is_reached_for_in_the_moment_of_its_sleep_stays_awake() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let open = agent.open_request();
    let status = agent.published().status;
    let idle = |since| agent.idle("idle for 15 s".to_owned(), since);
    assert!(matches!(idle(agent.quiet_since()).await, Err(Trouble::InUse)));
    assert_eq!(agent.published().status, status);
    world.assert_in_order().await;
    drop(open);

    let found_idle = agent.quiet_since();
    // It has begun something that goes on.
    drop(agent.open_request());
    assert!(matches!(idle(found_idle).await, Err(Trouble::InUse)));
    assert_eq!(agent.published().status, status);
    idle(agent.quiet_since()).await.unwrap();
    assert_eq!(agent.state(), State::Standby);
    assert_eq!(agent.published().status.reason, "idle for 15 s");
}

#[tokio::test]
async fn a_freeze_or_thaw_that_fails_leaves_the_agent_where_it_was() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.fail_next_freeze("no");
    agent.pause().await.unwrap_err();
    assert_eq!(agent.state(), State::Running);
    world.assert_in_order().await;
    agent.pause().await.unwrap();
    world.engine.fail_next_thaw("no");
    agent.ensure_running().await.unwrap_err();
    assert_eq!(agent.state(), State::Standby);
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_bug_on_the_way_to_sleep_leaves_the_box_running() {
    for point in [
        Point::FreezeFrozen,
        Point::ThawBegun,
        Point::ImageMade,
        Point::HibernateImageRecorded,
    ] {
        let mut world = World::new().await;
        let agent = world.running("one").await;
        if point == Point::ThawBegun {
            agent.pause().await.unwrap();
        }
        world.faults.arm(point, Action::Panic);
        let answer = match point {
            Point::FreezeFrozen => agent.pause().await,
            Point::ThawBegun => agent.ensure_running().await,
            _ => agent.hibernate("asked").await,
        };
        assert!(matches!(answer, Err(Trouble::Bug { .. })), "{answer:?}");
        assert_eq!(agent.state(), State::Running, "{point:?}");
        assert!(!world.engine.is_frozen(&agent.profile.id));
        agent.hibernate("asked").await.unwrap();
        // The next daemon removes what a bug left.
        world.restart().await;
        world.assert_in_order().await;
    }
}
