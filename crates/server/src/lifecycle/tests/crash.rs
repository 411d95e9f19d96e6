//! The daemon dies at each declared point; the next one puts everything in order.

use std::time::Duration;

use dorm_engine::{Engine as _, Isolation};

use super::World;
use crate::config::OnShutdown;
use crate::faults::{Action, Point};
use crate::guest_client::fake::FakeGuests;
use crate::records::{Lifetime, SnapshotKind, State};

/// What passes through a point, and what must be there before.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    Create,
    Start,
    Stop,
    Delete,
    Pause,
    Thaw,
    MakeDurable,
    Hibernate,
    Wake,
    /// With an image that cannot be used.
    WakeInVain,
    /// Out of standby.
    StopAsleep,
    Settle,
    Snapshot,
    DeleteSnapshot,
    RollBack,
    Fork,
    Convert,
}

fn act_of(point: Point) -> Act {
    match point {
        Point::CreateHomeMade | Point::CreateRecorded => Act::Create,
        Point::StartRecorded | Point::StartBoxUp | Point::StartFinished => Act::Start,
        Point::WakeBegun | Point::WakeRestored => Act::Wake,
        Point::WakeRefused | Point::WakeSetAside => Act::WakeInVain,
        Point::StopRecorded | Point::StopBoxGone | Point::StopFinished => Act::Stop,
        Point::StopThawed => Act::StopAsleep,
        Point::SettleBegun | Point::SettleBoxGone | Point::SettleRecorded => Act::Settle,
        Point::FreezeBegun | Point::FreezeFrozen | Point::FreezeRecorded => Act::Pause,
        Point::ThawBegun | Point::ThawThawed | Point::ThawRecorded => Act::Thaw,
        Point::ImageFrozen | Point::ImageRead | Point::ImageMade | Point::ImageRecorded => Act::MakeDurable,
        Point::HibernateRecorded
        | Point::HibernateImageRecorded
        | Point::HibernateBoxGone
        | Point::HibernateFinished => Act::Hibernate,
        Point::SnapshotFrozen
        | Point::SnapshotImageMade
        | Point::SnapshotHomeKept
        | Point::SnapshotThawed
        | Point::SnapshotSealed
        | Point::SnapshotRecorded => Act::Snapshot,
        Point::SnapshotForgotten | Point::SnapshotImageGone => Act::DeleteSnapshot,
        Point::RollBackRecorded
        | Point::RollBackStaged
        | Point::RollBackBoxGone
        | Point::RollBackHomeBack
        | Point::RollBackMoved
        | Point::RollBackFinished => Act::RollBack,
        Point::ConvertRecorded
        | Point::ConvertBoxGone
        | Point::ConvertHomeMade
        | Point::ConvertMoved
        | Point::ConvertFinished => Act::Convert,
        Point::ForkHomeMade | Point::ForkImageMade | Point::ForkRecorded | Point::ForkMade => Act::Fork,
        Point::DeleteRecorded
        | Point::DeleteBoxGone
        | Point::DeleteHomeGone
        | Point::DeleteSnapshotsGone
        | Point::DeleteImagesGone
        | Point::DeleteFinished => Act::Delete,
    }
}

/// Does what passes through `point`, dies there, and gives what the next daemon made of it.
async fn die_at(point: Point, act: Act, lifetime: Lifetime, reboot: bool) -> World {
    let mut world = World::new().await;
    FakeGuests::answering(&world.engine, |_| None);
    if act != Act::Create {
        let agent = world.create("one", lifetime, act != Act::Start).await.unwrap();
        if act != Act::Start {
            world.engine.remember(&agent.profile.id, "a secret");
        }
        match act {
            Act::Thaw | Act::MakeDurable | Act::StopAsleep => agent.pause().await.unwrap(),
            Act::Wake => agent.hibernate("asked").await.unwrap(),
            Act::WakeInVain => {
                agent.hibernate("asked").await.unwrap();
                world
                    .engine
                    .fail_next_restore(dorm_engine::EngineError::BadImage("declared".to_owned()));
            }
            Act::RollBack | Act::DeleteSnapshot => {
                world.homes.write(&agent.profile.id, "old");
                agent.snapshot("old", SnapshotKind::Full).await.unwrap();
                world.homes.write(&agent.profile.id, "new");
                world.engine.remember(&agent.profile.id, "a newer secret");
            }
            Act::Create
            | Act::Start
            | Act::Stop
            | Act::Delete
            | Act::Pause
            | Act::Hibernate
            | Act::Settle
            | Act::Snapshot
            | Act::Convert
            | Act::Fork => {}
        }
        if act == Act::Thaw {
            agent.make_durable().await.unwrap();
        }
        crate::lifecycle::lag::catch_up(&agent).await.unwrap();
    }
    world.faults.arm(point, Action::Hang);
    let (registry, engine) = (world.registry.clone(), world.engine.clone());
    let agent = world.get("one");
    tokio::spawn(async move {
        let agent = match agent {
            Some(agent) => agent,
            None => return drop(registry.create(World::creation("one", lifetime, true)).await),
        };
        drop(match act {
            Act::Create | Act::Start | Act::Thaw | Act::Wake | Act::WakeInVain => {
                agent.ensure_running().await
            }
            Act::Stop | Act::StopAsleep => agent.stop(None).await,
            Act::Settle => {
                engine.kill(&agent.profile.id, "declared");
                Ok(())
            }
            Act::Delete => agent.delete().await,
            Act::Pause => agent.pause().await,
            Act::MakeDurable => agent.make_durable().await,
            Act::Hibernate => agent.hibernate("asked").await,
            Act::Snapshot => agent.snapshot("", SnapshotKind::Full).await.map(drop),
            Act::DeleteSnapshot => match agent.find_snapshot("old").await {
                Ok(snapshot) => agent.delete_snapshot(&snapshot).await,
                Err(trouble) => Err(trouble),
            },
            Act::RollBack => match agent.find_snapshot("old").await {
                Ok(snapshot) => agent.roll_back(&snapshot).await.map(drop),
                Err(trouble) => Err(trouble),
            },
            Act::Convert => agent.set_isolation(Isolation::Gvisor).await,
            Act::Fork => {
                let names = vec!["fork".to_owned()];
                registry.fork(&agent, names, None, false, false).await.map(drop)
            }
        });
    });
    world.faults.struck().await;
    if reboot {
        world.engine.reboot();
    }
    world.restart().await;
    // What is finished in the background is finished when the daemon ends in order.
    world
        .registry
        .shut_down(OnShutdown::Leave, Duration::from_secs(60))
        .await;
    world.restart().await;
    world.assert_in_order().await;
    world
}

#[tokio::test]
async fn a_crash_at_any_point_leaves_nothing_that_the_next_daemon_does_not_put_in_order() {
    for point in Point::ALL {
        let act = act_of(point);
        let world = die_at(point, act, Lifetime::Persistent, false).await;
        let state = world.get("one").map(|agent| agent.state());
        let expected = match (act, point) {
            (Act::Create, Point::CreateHomeMade) | (Act::Delete, _) => None,
            (Act::Start, Point::StartFinished) => Some(State::Running),
            (Act::Create | Act::Start | Act::Stop | Act::StopAsleep | Act::Settle, _) => Some(State::Stopped),
            (Act::Convert, _) => Some(State::Stopped),
            (Act::Pause, Point::FreezeRecorded) => Some(State::Standby),
            (Act::Thaw, Point::ThawRecorded) => Some(State::Running),
            (Act::Pause, _) => Some(State::Running),
            (Act::Thaw | Act::MakeDurable, _) => Some(State::Standby),
            (Act::Hibernate, _) => Some(State::Hibernated),
            // The box has gone on.
            (Act::Wake, Point::WakeRestored) => Some(State::Running),
            (Act::Wake, _) => Some(State::Hibernated),
            (Act::WakeInVain, Point::WakeRefused) => Some(State::Hibernated),
            (Act::WakeInVain, _) => Some(State::Stopped),
            (Act::Snapshot | Act::DeleteSnapshot | Act::Fork, _) => Some(State::Running),
            (Act::RollBack, Point::RollBackFinished) => Some(State::Hibernated),
            // Finished as a stop: what it was is in a snapshot.
            (Act::RollBack, _) => Some(State::Stopped),
        };
        assert_eq!(state, expected, "{point:?}");
        if let Some(agent) = world.get("one") {
            agent.ensure_running().await.unwrap();
            world.assert_in_order().await;
            let memory = match act {
                Act::DeleteSnapshot => Some("a newer secret"),
                Act::RollBack if point == Point::RollBackFinished => Some("a secret"),
                Act::WakeInVain if point == Point::WakeSetAside => Some(""),
                Act::Create | Act::Start | Act::Stop | Act::StopAsleep | Act::Settle | Act::RollBack => None,
                Act::Convert => Some(""),
                _ => Some("a secret"),
            };
            let moved = matches!(point, Point::ConvertMoved | Point::ConvertFinished);
            let isolation = if moved {
                Isolation::Gvisor
            } else {
                Isolation::Container
            };
            assert_eq!(agent.isolation(), isolation, "{point:?}");
            assert_eq!(
                world.engine.last_spec().unwrap().isolation,
                isolation,
                "{point:?}"
            );
            let found = world.engine.memory(&agent.profile.id);
            assert!(
                memory.is_none() || found.as_deref() == memory,
                "{point:?}: {found:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_crash_of_the_host_loses_no_memory_that_is_on_disk() {
    for (point, act, kept) in [
        (Point::FreezeFrozen, Act::Pause, false),
        (Point::ImageRead, Act::MakeDurable, false),
        (Point::ImageMade, Act::MakeDurable, false),
        (Point::ImageRecorded, Act::MakeDurable, true),
        (Point::ThawBegun, Act::Thaw, true),
        (Point::HibernateRecorded, Act::Hibernate, false),
        (Point::ImageMade, Act::Hibernate, false),
        (Point::ImageRecorded, Act::Hibernate, true),
        (Point::HibernateImageRecorded, Act::Hibernate, true),
        (Point::HibernateBoxGone, Act::Hibernate, true),
        (Point::HibernateFinished, Act::Hibernate, true),
        (Point::StartRecorded, Act::Wake, true),
        (Point::StartBoxUp, Act::Wake, true),
    ] {
        let world = die_at(point, act, Lifetime::Persistent, true).await;
        let agent = world.get("one").unwrap();
        let expected = if kept { State::Hibernated } else { State::Stopped };
        assert_eq!(agent.state(), expected, "{point:?} in {act:?}");
        agent.ensure_running().await.unwrap();
        let memory = world.engine.memory(&agent.profile.id).unwrap();
        assert_eq!(memory, if kept { "a secret" } else { "" }, "{point:?} in {act:?}");
        world.assert_in_order().await;
    }
}

#[tokio::test]
async fn a_wake_that_a_crash_interrupts_has_not_begun_or_is_over() {
    for (point, expected) in [
        (Point::StartRecorded, State::Hibernated),
        (Point::StartBoxUp, State::Running),
    ] {
        let world = die_at(point, Act::Wake, Lifetime::Persistent, false).await;
        let agent = world.get("one").unwrap();
        assert_eq!(agent.state(), expected, "{point:?}");
        agent.ensure_running().await.unwrap();
        assert_eq!(
            world.engine.memory(&agent.profile.id).as_deref(),
            Some("a secret")
        );
    }
}

#[tokio::test]
async fn an_ephemeral_agent_whose_start_was_not_finished_is_gone_after_a_crash() {
    for point in [
        Point::CreateRecorded,
        Point::StartRecorded,
        Point::StartBoxUp,
        Point::DeleteBoxGone,
    ] {
        let world = die_at(point, act_of(point), Lifetime::Ephemeral, false).await;
        assert!(world.get("one").is_none(), "{point:?}");
    }
}

/// What the agent was is kept, and it is not back yet.
const ROLLING_BACK: [Point; 5] = [
    Point::RollBackRecorded,
    Point::RollBackStaged,
    Point::RollBackBoxGone,
    Point::RollBackHomeBack,
    Point::RollBackMoved,
];

#[tokio::test]
async fn a_crash_in_a_rollback_leaves_either_home_whole_and_a_snapshot_of_what_was() {
    for point in ROLLING_BACK {
        let world = die_at(point, Act::RollBack, Lifetime::Persistent, false).await;
        let agent = world.get("one").unwrap();
        let expected = match point {
            Point::RollBackRecorded | Point::RollBackStaged | Point::RollBackBoxGone => "new",
            _ => "old",
        };
        assert_eq!(
            world.homes.content(&agent.profile.id).as_deref(),
            Some(expected),
            "{point:?}"
        );
        let before = agent.snapshots().await.unwrap().pop().unwrap();
        assert!(before.label.starts_with("before the rollback"), "{before:?}");
        agent.roll_back(&before).await.unwrap();
        assert_eq!(
            world.engine.memory(&agent.profile.id).as_deref(),
            Some("a newer secret")
        );
        assert_eq!(world.homes.content(&agent.profile.id).as_deref(), Some("new"));
        world.assert_in_order().await;
    }
}

#[tokio::test]
async fn an_ephemeral_agent_goes_with_its_box_when_a_crash_cuts_its_rollback_short() {
    for point in ROLLING_BACK {
        for reboot in [false, true] {
            let world = die_at(point, Act::RollBack, Lifetime::Ephemeral, reboot).await;
            assert!(world.get("one").is_none(), "{point:?}");
            assert!(world.engine.present().await.unwrap().is_empty(), "{point:?}");
        }
    }
}

#[tokio::test]
async fn an_ephemeral_agent_that_was_back_at_its_snapshot_before_the_crash_is_there_still() {
    for reboot in [false, true] {
        let world = die_at(
            Point::RollBackFinished,
            Act::RollBack,
            Lifetime::Ephemeral,
            reboot,
        )
        .await;
        let agent = world.get("one").unwrap();
        let id = &agent.profile.id;
        assert_eq!(agent.state(), State::Hibernated);
        agent.ensure_running().await.unwrap();
        assert_eq!(world.engine.memory(id).as_deref(), Some("a secret"));
        assert_eq!(world.homes.content(id).as_deref(), Some("old"));
        world.assert_in_order().await;
    }
}

#[tokio::test]
async fn a_crash_before_a_rollback_has_kept_what_is_there_leaves_the_agent_running() {
    for point in [
        Point::SnapshotFrozen,
        Point::SnapshotImageMade,
        Point::SnapshotHomeKept,
        Point::SnapshotSealed,
        Point::SnapshotRecorded,
    ] {
        let world = die_at(point, Act::RollBack, Lifetime::Persistent, false).await;
        let agent = world.get("one").unwrap();
        let id = &agent.profile.id;
        assert_eq!(agent.state(), State::Running, "{point:?}");
        assert_eq!(world.engine.memory(id).as_deref(), Some("a newer secret"));
        assert_eq!(world.homes.content(id).as_deref(), Some("new"));
        world.assert_in_order().await;
    }
}
