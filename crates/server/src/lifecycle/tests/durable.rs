//! Boxes in standby whose memory is on disk too.

use std::sync::Arc;

use tokio::task::JoinHandle;

use super::drive::{ask, settle};
use super::{Agent, World, lag, later, reaches};
use crate::faults::{Action, Point};
use crate::lifecycle::Trouble;
use crate::records::State;

/// An agent with this memory.
async fn durable(world: &World, memory: &str) -> Arc<Agent> {
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, memory);
    agent.pause().await.unwrap();
    agent.make_durable().await.unwrap();
    lag::catch_up(&agent).await.unwrap();
    agent
}

fn assert_remembers(world: &World, agent: &Agent, memory: &str) {
    assert_eq!(world.engine.memory(&agent.profile.id).as_deref(), Some(memory));
}

#[tokio::test]
async fn a_durable_agent_in_standby_wakes_by_a_thaw_and_gives_up_its_ram_for_free() {
    let world = World::new().await;
    let agent = durable(&world, "").await;
    assert_eq!(agent.state(), State::Standby);
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    assert_eq!((world.engine.thaws(), world.engine.restores()), (1, 0));
    assert_eq!(agent.current_image(), None, "the memory has gone on");
    world.assert_in_order().await;
    agent.pause().await.unwrap();
    agent.make_durable().await.unwrap();
    agent.make_durable().await.unwrap();
    agent.hibernate("memory is short").await.unwrap();
    assert_eq!(
        world.engine.checkpoints(),
        2,
        "one for each time that it was made durable"
    );
    world.assert_in_order().await;
}

#[tokio::test]
async fn what_was_on_disk_is_not_used_once_the_agent_went_on() {
    let mut world = World::new().await;
    let agent = durable(&world, "old").await;
    let id = agent.profile.id.clone();
    agent.ensure_running().await.unwrap();
    world.engine.remember(&id, "new");
    agent.hibernate("asked").await.unwrap();
    world.engine.reboot();
    world.restart().await;
    world.get("one").unwrap().ensure_running().await.unwrap();
    assert_eq!(world.engine.memory(&id).as_deref(), Some("new"));
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_host_that_dies_right_after_a_thaw_does_not_bring_back_memory_that_the_files_have_left_behind() {
    let mut world = World::new().await;
    let agent = durable(&world, "old").await;
    let id = agent.profile.id.clone();
    // The thaw is done, the files change, and then the host dies before the thaw is recorded.
    world.faults.arm(Point::ThawThawed, Action::Hang);
    let asked = agent.clone();
    tokio::spawn(async move { asked.ensure_running().await });
    world.faults.struck().await;
    world.homes.write(&id, "newer than the memory");
    world.engine.reboot();
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Hibernated);
    agent.ensure_running().await.unwrap();
    assert_eq!(world.engine.memory(&id).as_deref(), Some(""));
    assert_eq!(world.homes.content(&id).as_deref(), Some("newer than the memory"));
    let reason = agent.published().status.reason;
    assert!(reason.contains("its files have changed"), "{reason}");
    world.assert_in_order().await;
}

#[tokio::test]
async fn the_next_daemon_keeps_the_image_of_a_box_that_slept_on() {
    let mut world = World::new().await;
    let image = durable(&world, "a secret").await.current_image().unwrap();
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.current_image(), Some(image));
    assert_eq!(agent.state(), State::Standby);
    let checkpoints = world.engine.checkpoints();
    agent.hibernate("asked").await.unwrap();
    assert_eq!(
        world.engine.checkpoints(),
        checkpoints,
        "its memory is on disk already"
    );
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "a secret");
}

#[tokio::test]
async fn the_next_daemon_uses_no_image_of_a_box_that_went_on_in_between() {
    let mut world = World::new().await;
    let agent = durable(&world, "a secret").await;
    // It is thawed, which is not recorded, when the daemon dies.
    world.faults.arm(Point::ThawThawed, Action::Hang);
    let woken = agent.clone();
    tokio::spawn(async move { woken.ensure_running().await });
    world.faults.struck().await;
    world.engine.remember(&agent.profile.id, "another secret");
    world.restart().await;
    let agent = world.get("one").unwrap();
    agent.hibernate("asked").await.unwrap();
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "another secret");
}

#[tokio::test]
async fn a_box_that_ends_in_its_sleep_is_not_lost_if_its_memory_is_on_disk() {
    let world = World::new().await;
    let agent = durable(&world, "a secret").await;
    world.engine.kill(&agent.profile.id, "out of memory");
    reaches(&agent, State::Hibernated).await;
    assert!(agent.published().status.reason.contains("out of memory"));
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "a secret");
}

#[tokio::test]
async fn what_went_wrong_with_its_memory_is_known_to_the_next_daemon() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    world.engine.fail_next_checkpoint("process 7 uses io_uring");
    agent.hibernate("asked").await.unwrap_err();
    let setback = agent.setback();
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert!(setback.is_some() && agent.setback() == setback, "{setback:?}");
}

#[tokio::test]
async fn a_save_that_fails_does_not_begin_the_time_in_standby_anew() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    agent.pause().await.unwrap();
    let since = agent.published().status.since;
    later().await;
    world.engine.fail_next_checkpoint("process 7 uses io_uring");
    agent.make_durable().await.unwrap_err();
    let status = agent.published().status;
    assert!(status.reason.contains("io_uring"), "{status:?}");
    assert_eq!((status.state, status.since), (State::Standby, since));
    lag::catch_up(&agent).await.unwrap();
    world.restart().await;
    assert_eq!(world.get("one").unwrap().published().status, status);
}

#[tokio::test]
async fn a_thaw_that_could_not_be_recorded_is_before_anything_else() {
    let mut world = World::new().await;
    let agent = durable(&world, "old").await;
    let id = agent.profile.id.clone();
    world.store.fail_changes_to(Some(State::Running));
    agent.ensure_running().await.unwrap();
    world.engine.remember(&id, "new");
    lag::catch_up(&agent).await.unwrap_err();
    agent.hibernate("asked").await.unwrap_err();
    assert_eq!(agent.state(), State::Running);
    world.store.fail_changes_to(None);
    agent.hibernate("asked").await.unwrap();
    world.assert_in_order().await;
    world.engine.reboot();
    world.restart().await;
    let agent = world.get("one").unwrap();
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "new");
}

#[tokio::test]
async fn what_could_not_be_recorded_time_and_again_is_recorded_as_what_became_of_it() {
    let world = World::new().await;
    let agent = durable(&world, "old").await;
    world.store.fail_changes_to(Some(State::Running));
    agent.ensure_running().await.unwrap();
    lag::catch_up(&agent).await.unwrap_err();
    agent.pause().await.unwrap();
    world.store.fail_changes_to(None);
    agent.make_durable().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_memory_that_went_on_does_not_come_back_old_although_nothing_could_be_recorded() {
    let mut world = World::new().await;
    let agent = durable(&world, "old").await;
    world.store.fail_changes_to(Some(State::Running));
    agent.ensure_running().await.unwrap();
    lag::catch_up(&agent).await.unwrap_err();
    world.engine.remember(&agent.profile.id, "new");
    world.engine.reboot();
    world.restart().await;
    world.store.fail_changes_to(None);
    let agent = world.get("one").unwrap();
    assert!(agent.setback().is_some(), "it is told");
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "");
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_image_that_was_brought_back_takes_no_room() {
    let world = World::new().await;
    let agent = world.running("one").await;
    agent.hibernate("asked").await.unwrap();
    agent.ensure_running().await.unwrap();
    assert_eq!(agent.image(), None);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_box_that_nobody_could_look_at_goes_on_when_somebody_can() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    world.engine.hide_boxes(true);
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Failed);
    agent.ensure_running().await.unwrap_err();
    assert_remembers(&world, &agent, "a secret");
    world.engine.hide_boxes(false);
    agent.ensure_running().await.unwrap();
    assert_eq!(agent.state(), State::Running);
    assert_remembers(&world, &agent, "a secret");
}

#[tokio::test]
async fn a_box_that_nobody_could_look_at_is_left_to_the_next_daemon() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    world.engine.hide_boxes(true);
    world.restart().await;
    let agent = world.get("one").unwrap();
    agent.ensure_running().await.unwrap_err();
    world.engine.hide_boxes(false);
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Running);
    assert_remembers(&world, &agent, "a secret");
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_wake_that_could_not_be_recorded_is_recorded_later_and_not_undone() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    let id = agent.profile.id.clone();
    world.engine.remember(&id, "a secret");
    agent.hibernate("asked").await.unwrap();
    world.store.fail_changes_to(Some(State::Running));
    agent.ensure_running().await.unwrap_err();
    assert_eq!(agent.state(), State::Running);
    lag::catch_up(&agent).await.unwrap_err();
    world.store.fail_changes_to(None);
    world.assert_in_order().await;
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Running, "it was adopted");
    assert_remembers(&world, &agent, "a secret");
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_daemon_that_can_record_nothing_keeps_a_box_that_went_on_in_between() {
    let mut world = World::new().await;
    let agent = durable(&world, "old").await;
    world.faults.arm(Point::ThawThawed, Action::Hang);
    let woken = agent.clone();
    tokio::spawn(async move { woken.ensure_running().await });
    world.faults.struck().await;
    world.engine.remember(&agent.profile.id, "new");
    world.store.fail_images(true);
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Standby);
    assert_eq!(agent.current_image(), None, "it is old");
    world.store.fail_images(false);
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "new");
    lag::catch_up(&agent).await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_daemon_that_can_record_nothing_keeps_a_box_that_came_back() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    agent.hibernate("asked").await.unwrap();
    world.store.fail_changes_to(Some(State::Running));
    agent.ensure_running().await.unwrap_err();
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Running);
    assert_eq!(agent.current_image(), None, "it is old");
    world.store.fail_changes_to(None);
    lag::catch_up(&agent).await.unwrap();
    world.assert_in_order().await;
    world.restart().await;
    let agent = world.get("one").unwrap();
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "a secret");
}

/// An agent in standby whose memory goes to disk, as far as that is held up.
async fn on_the_way_to_disk(world: &World) -> Arc<Agent> {
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    agent.pause().await.unwrap();
    lag::catch_up(&agent).await.unwrap();
    let _durable = ask(&agent, |agent| async move { agent.make_durable().await });
    while world.engine.checkpoints() == 0 {
        tokio::task::yield_now().await;
    }
    settle().await;
    agent
}

async fn reached_meanwhile(world: &World) -> (Arc<Agent>, JoinHandle<Result<(), Trouble>>) {
    let agent = on_the_way_to_disk(world).await;
    let reached = ask(&agent, |agent| async move { agent.ensure_running().await });
    settle().await;
    (agent, reached)
}

#[tokio::test]
async fn who_reaches_for_an_agent_whose_memory_goes_to_disk_waits_for_no_disk() {
    let world = World::new().await;
    world.engine.hold_seals(true);
    let (agent, reached) = reached_meanwhile(&world).await;
    assert!(reached.is_finished(), "it goes on");
    reached.await.unwrap().unwrap();
    assert_eq!(agent.state(), State::Running);
    assert_eq!((world.engine.thaws(), world.engine.restores()), (1, 0));
    assert_eq!(agent.setback(), None, "nothing went wrong");
    world.engine.hold_seals(false);
    settle().await;
    assert_eq!(agent.image(), None, "that memory has gone on");
    agent.pause().await.unwrap();
    agent.make_durable().await.unwrap();
    world.assert_in_order().await;
    agent.hibernate("asked").await.unwrap();
    agent.ensure_running().await.unwrap();
    assert_remembers(&world, &agent, "a secret");
}

#[tokio::test]
async fn who_reaches_for_an_agent_whose_memory_is_being_read_waits_for_that_alone() {
    let world = World::new().await;
    world.engine.hold_checkpoints(true);
    world.engine.hold_seals(true);
    let (agent, reached) = reached_meanwhile(&world).await;
    assert!(!reached.is_finished(), "its processes are held by who reads");
    world.engine.hold_checkpoints(false);
    settle().await;
    assert!(reached.is_finished(), "it goes on");
    reached.await.unwrap().unwrap();
    assert_eq!(agent.state(), State::Running);
    world.engine.hold_seals(false);
    settle().await;
    assert_eq!(agent.image(), None);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_memory_that_goes_to_disk_is_not_given_up_for_who_comes_after_a_hibernation() {
    let world = World::new().await;
    world.engine.hold_seals(true);
    let agent = on_the_way_to_disk(&world).await;
    let put_away = ask(&agent, |agent| async move { agent.hibernate("asked").await });
    settle().await;
    let reached = ask(&agent, |agent| async move { agent.ensure_running().await });
    settle().await;
    assert!(!put_away.is_finished() && !reached.is_finished());
    world.engine.hold_seals(false);
    put_away.await.unwrap().unwrap();
    reached.await.unwrap().unwrap();
    assert_eq!(
        world.engine.checkpoints(),
        1,
        "the hibernation used what was there"
    );
    assert_eq!((world.engine.thaws(), world.engine.restores()), (0, 1));
    assert_remembers(&world, &agent, "a secret");
}
