//! Boxes with the memory of another agent, or of another time, that cannot be told who they are.

use std::sync::Arc;

use super::World;
use crate::faults::{Action, Point};
use crate::guest_client::fake::FakeGuests;
use crate::lifecycle::{Agent, Trouble};
use crate::records::{SnapshotKind, State};

/// An agent that runs with this memory. Its guest hangs up on everybody.
async fn running(world: &World, memory: &str) -> Arc<Agent> {
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, memory);
    agent
}

/// A fork that was not woken yet.
async fn fork(world: &World, agent: &Arc<Agent>) -> Arc<Agent> {
    let names = vec!["two".to_owned()];
    let forks = world.registry.fork(agent, names, None, false, false).await;
    forks.unwrap().remove(0)
}

/// From now on guests write to their home, and hang up.
fn write_before_they_are_told(world: &World) {
    let homes = world.homes.clone();
    world
        .engine
        .serve_guests(move |id, _| homes.write(&id, "newer than the memory"));
}

/// The wake was refused, and nothing is lost: the next one, with a guest that listens, brings the memory back.
async fn assert_sleeps_on(world: &World, agent: &Arc<Agent>, refused: Trouble, memory: &str) {
    assert!(
        matches!(&refused, Trouble::CannotWake(why) if why.contains("it could not be told who it is")),
        "{refused:?}"
    );
    assert_eq!(agent.state(), State::Hibernated);
    assert!(agent.setback().is_none(), "nothing is lost");
    world.assert_in_order().await;
    let guests = FakeGuests::answering(&world.engine, |_| None);
    agent.ensure_running().await.unwrap();
    let id = &agent.profile.id;
    assert_eq!(world.engine.memory(id).as_deref(), Some(memory));
    assert_eq!(
        guests.asked(|asked| asked.introduced[0]["agentId"].clone()),
        id.as_str()
    );
    world.assert_in_order().await;
}

/// It was started from what its box has left of its files, and says so.
async fn assert_lost_its_memory(world: &World, agent: &Arc<Agent>) {
    let id = &agent.profile.id;
    assert_eq!(agent.state(), State::Running);
    assert_eq!(world.engine.memory(id).as_deref(), Some(""));
    assert_eq!(world.homes.content(id).as_deref(), Some("newer than the memory"));
    let reason = agent.published().status.reason;
    assert!(
        reason.contains("its memory is lost") && reason.contains("it could not be told who it is"),
        "{reason}"
    );
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_fork_that_cannot_be_told_who_it_is_sleeps_on() {
    let world = World::new().await;
    let fork = fork(&world, &running(&world, "a secret").await).await;
    let image = fork.current_image();
    let refused = fork.ensure_running().await.unwrap_err();
    assert_eq!(fork.current_image(), image);
    assert_sleeps_on(&world, &fork, refused, "a secret").await;
}

#[tokio::test]
async fn an_agent_that_went_back_and_cannot_be_told_who_it_is_sleeps_on() {
    let world = World::new().await;
    let agent = running(&world, "old").await;
    let old = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    world.engine.remember(&agent.profile.id, "new");
    let refused = agent.roll_back(&old).await.unwrap_err();
    assert_sleeps_on(&world, &agent, refused, "old").await;
}

#[tokio::test]
async fn a_fork_that_changed_its_home_before_it_could_be_told_starts_from_its_files() {
    let world = World::new().await;
    let fork = fork(&world, &running(&world, "a secret").await).await;
    let image = fork.current_image().unwrap().id;
    write_before_they_are_told(&world);
    fork.ensure_running().await.unwrap();
    assert_lost_its_memory(&world, &fork).await;
    let aside = format!("{}/{image}.bad", fork.profile.id);
    assert!(world.images.path().join(aside).is_dir());
}

#[tokio::test]
async fn an_agent_that_went_back_and_changed_its_home_before_it_could_be_told_starts_from_its_files() {
    let world = World::new().await;
    let agent = running(&world, "old").await;
    let old = agent.snapshot("", SnapshotKind::Full).await.unwrap();
    write_before_they_are_told(&world);
    let back = agent.roll_back(&old).await.unwrap();
    assert_lost_its_memory(&world, &agent).await;
    assert_eq!(back.lost, Some(agent.published().status.reason));
}

#[tokio::test]
async fn a_fork_that_came_back_as_the_daemon_died_and_cannot_be_told_who_it_is_sleeps_on() {
    let mut world = World::new().await;
    let fork = fork(&world, &running(&world, "a secret").await).await;
    world.faults.arm(Point::WakeRestored, Action::Hang);
    let woken = fork.clone();
    tokio::spawn(async move { woken.ensure_running().await });
    world.faults.struck().await;
    world.restart().await;
    let fork = world.get("two").unwrap();
    let refused = fork.ensure_running().await.unwrap_err();
    assert_sleeps_on(&world, &fork, refused, "a secret").await;
}
