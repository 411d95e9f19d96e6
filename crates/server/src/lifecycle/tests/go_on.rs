//! The end of a daemon, and what goes on with the next.

use std::sync::Arc;
use std::time::Duration;

use super::{World, reaches};
use crate::config::OnShutdown;
use crate::faults::{Action, Point};
use crate::lifecycle::Agent;
use crate::records::{SleepChange, State};

async fn end(world: &World, boxes: OnShutdown) {
    world.registry.shut_down(boxes, Duration::from_secs(60)).await;
}

async fn keep_awake(agent: &Arc<Agent>) {
    let change = SleepChange {
        keep_awake: Some(true),
        ..Default::default()
    };
    agent.set_sleep(change).await.unwrap();
}

#[tokio::test]
async fn at_shutdown_boxes_are_put_to_disk_if_that_is_wanted() {
    let mut world = World::new().await;
    let (one, two) = (world.running("one").await, world.running("two").await);
    world.engine.remember(&one.profile.id, "a secret");
    two.pause().await.unwrap();
    end(&world, OnShutdown::Hibernate).await;
    assert_eq!((one.state(), two.state()), (State::Hibernated, State::Hibernated));
    world.engine.reboot();
    world.restart().await;
    // Whatever ran goes on with the next daemon; whatever slept does not.
    world.registry.go_on();
    reaches(&world.get("one").unwrap(), State::Running).await;
    assert_eq!(world.get("two").unwrap().state(), State::Hibernated);
    assert_eq!(world.engine.memory(&one.profile.id).as_deref(), Some("a secret"));
    world.assert_in_order().await;
}

#[tokio::test]
async fn whoever_is_due_and_wanted_otherwise_meanwhile_is_not_brought_back() {
    let mut world = World::new().await;
    for name in ["due", "hibernated", "stopped"] {
        world.running(name).await;
    }
    end(&world, OnShutdown::Hibernate).await;
    world.restart().await;
    world.get("hibernated").unwrap().hibernate("asked").await.unwrap();
    world.get("stopped").unwrap().stop(None).await.unwrap();
    let states =
        |world: &World| ["due", "hibernated", "stopped"].map(|name| world.get(name).unwrap().state());
    let expected = [State::Running, State::Hibernated, State::Stopped];
    world.registry.go_on();
    reaches(&world.get("due").unwrap(), State::Running).await;
    assert_eq!(states(&world), expected);
    // And stays so.
    world.restart().await;
    world.registry.go_on();
    world.registry.go_on_no_more().await;
    assert_eq!(states(&world), expected);
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn whoever_could_not_be_brought_back_is_tried_again_until_it_runs() {
    let mut world = World::new().await;
    world.running("one").await;
    end(&world, OnShutdown::Hibernate).await;
    world.restart().await;
    world.faults.arm(Point::WakeBegun, Action::Fail);
    world.registry.go_on();
    reaches(&world.get("one").unwrap(), State::Running).await;
    // Whoever is asleep after that has been put to sleep.
    world.registry.go_on_no_more().await;
    let agent = world.get("one").unwrap();
    agent.idle("idle".to_owned(), agent.quiet_since()).await.unwrap();
    agent.retire("idle".to_owned()).await.unwrap();
    world.restart().await;
    world.registry.go_on();
    world.registry.go_on_no_more().await;
    assert_eq!(world.get("one").unwrap().state(), State::Hibernated);
}

#[tokio::test]
async fn what_is_always_on_comes_back_also_if_it_could_not_be_stopped_in_order() {
    let mut world = World::new().await;
    let agent = world.running("always").await;
    keep_awake(&agent).await;
    world.faults.arm(Point::StopBoxGone, Action::Fail);
    end(&world, OnShutdown::Stop).await;
    world.restart().await;
    world.registry.go_on();
    reaches(&world.get("always").unwrap(), State::Running).await;
    world.assert_in_order().await;
}

#[tokio::test]
async fn what_is_always_on_comes_back_after_the_daemon_has_stopped_it_unless_somebody_paused_it() {
    let mut world = World::new().await;
    for name in ["always", "paused", "idle"] {
        world.running(name).await;
    }
    for name in ["always", "paused"] {
        keep_awake(&world.get(name).unwrap()).await;
    }
    world.get("paused").unwrap().pause().await.unwrap();
    end(&world, OnShutdown::Stop).await;
    world.restart().await;
    world.registry.go_on();
    reaches(&world.get("always").unwrap(), State::Running).await;
    world.registry.go_on_no_more().await;
    let state = |name: &str| world.get(name).unwrap().state();
    assert_eq!([state("paused"), state("idle")], [State::Stopped, State::Stopped]);
    world.assert_in_order().await;
}

#[tokio::test]
async fn nothing_is_brought_back_once_the_daemon_ends() {
    let mut world = World::new().await;
    world.running("one").await;
    end(&world, OnShutdown::Hibernate).await;
    world.restart().await;
    world.registry.go_on_no_more().await;
    world.registry.go_on();
    end(&world, OnShutdown::Hibernate).await;
    assert_eq!(world.get("one").unwrap().state(), State::Hibernated);
    // It is as due as it was.
    world.restart().await;
    world.registry.go_on();
    reaches(&world.get("one").unwrap(), State::Running).await;
}

#[tokio::test]
async fn whoever_was_put_to_disk_or_stopped_by_somebody_is_not_brought_back() {
    let mut world = World::new().await;
    for name in ["hibernated", "stopped", "always", "idle"] {
        world.running(name).await;
    }
    for name in ["hibernated", "stopped", "always"] {
        keep_awake(&world.get(name).unwrap()).await;
    }
    world.get("hibernated").unwrap().hibernate("asked").await.unwrap();
    world.get("stopped").unwrap().stop(None).await.unwrap();
    world.engine.reboot();
    world.restart().await;
    world.registry.go_on();
    // The host has ended under it, and it is to be always on.
    reaches(&world.get("always").unwrap(), State::Running).await;
    let state = |name: &str| world.get(name).unwrap().state();
    assert_eq!(
        [state("hibernated"), state("stopped"), state("idle")],
        [State::Hibernated, State::Stopped, State::Stopped]
    );
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn at_shutdown_every_box_has_its_own_time_to_get_to_disk() {
    let world = World::new().await;
    let mut agents = Vec::new();
    for number in 0..9 {
        agents.push(world.running(&format!("agent-{number}")).await);
    }
    world.engine.hold_checkpoints(true);
    let engine = world.engine.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(90)).await;
        engine.hold_checkpoints(false);
    });
    end(&world, OnShutdown::Hibernate).await;
    // Eight go to disk at once, and are given up after 60 seconds; the ninth had only begun by then.
    assert!(agents.iter().all(|agent| agent.state() == State::Hibernated));
}
