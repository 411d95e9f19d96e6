//! The daemon dies at each declared point; the next one puts everything in order.

use std::time::Duration;

use super::World;
use crate::faults::{Action, Point};
use crate::records::{Lifetime, State};

/// Runs what passes through `point`, dies there, and gives what the next daemon made of it.
async fn die_at(point: Point, lifetime: Lifetime) -> World {
    let mut world = World::new().await;
    let (creates, starts, stops) = match point {
        Point::CreateHomeMade | Point::CreateRecorded => (true, false, false),
        Point::StartRecorded | Point::StartBoxUp | Point::StartFinished => (false, true, false),
        Point::StopRecorded | Point::StopBoxGone | Point::StopFinished => (false, false, true),
        Point::DeleteRecorded | Point::DeleteBoxGone | Point::DeleteHomeGone | Point::DeleteFinished => {
            (false, false, false)
        }
    };
    if !creates {
        world.create("one", lifetime, !starts).await.unwrap();
    }
    world.faults.arm(point, Action::Hang);
    let registry = world.registry.clone();
    let agent = world.get("one");
    tokio::spawn(async move {
        match agent {
            None => drop(registry.create(World::creation("one", lifetime, true)).await),
            Some(agent) if starts => drop(agent.start().await),
            Some(agent) if stops => drop(agent.stop(None).await),
            Some(agent) => drop(agent.delete().await),
        }
    });
    world.faults.struck().await;
    world.restart().await;
    // What is finished in the background is finished when the daemon ends in order.
    world.registry.shut_down(false, Duration::from_secs(60)).await;
    world.restart().await;
    world.assert_in_order().await;
    world
}

#[tokio::test]
async fn a_crash_at_any_point_leaves_nothing_that_the_next_daemon_does_not_put_in_order() {
    for point in Point::ALL {
        let world = die_at(point, Lifetime::Persistent).await;
        let state = world.get("one").map(|agent| agent.state());
        let expected = match point {
            Point::CreateHomeMade => None,
            Point::CreateRecorded | Point::StartRecorded | Point::StartBoxUp => Some(State::Stopped),
            Point::StartFinished => Some(State::Running),
            Point::StopRecorded | Point::StopBoxGone | Point::StopFinished => Some(State::Stopped),
            Point::DeleteRecorded | Point::DeleteBoxGone | Point::DeleteHomeGone | Point::DeleteFinished => {
                None
            }
        };
        assert_eq!(state, expected, "{point:?}");
        if let Some(agent) = world.get("one") {
            agent.ensure_running().await.unwrap();
            world.assert_in_order().await;
        }
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
        let world = die_at(point, Lifetime::Ephemeral).await;
        assert!(world.get("one").is_none(), "{point:?}");
    }
}
