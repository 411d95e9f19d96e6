//! Agents that get another isolation.

use dorm_engine::{EngineError, Isolation, VolumeMount};

use super::{World, reaches};
use crate::faults::{Action, Point};
use crate::guest_client::fake::FakeGuests;
use crate::lifecycle::{Trouble, decide::Refusal};
use crate::records::{Lifetime, SnapshotKind, State};
use crate::store::Store;

#[tokio::test]
async fn an_agent_that_ran_runs_with_its_new_isolation_and_without_its_memory() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    agent.set_isolation(Isolation::Gvisor).await.unwrap();
    assert_eq!(
        (agent.state(), agent.isolation()),
        (State::Running, Isolation::Gvisor)
    );
    assert_eq!(world.engine.memory(&agent.profile.id).as_deref(), Some(""));
    assert_eq!(world.engine.last_spec().unwrap().isolation, Isolation::Gvisor);
    assert_eq!(world.engine.conversions(), [Isolation::Gvisor]);
    world.assert_in_order().await;

    let starts = world.engine.starts();
    agent.set_isolation(Isolation::Gvisor).await.unwrap();
    assert_eq!(world.engine.starts(), starts, "it is so already");
}

#[tokio::test]
async fn one_that_was_stopped_stays_stopped_and_knows_it_after_a_restart() {
    let mut world = World::new().await;
    let agent = world.stopped("one").await;
    agent.set_isolation(Isolation::Gvisor).await.unwrap();
    assert_eq!(agent.state(), State::Stopped);
    assert_eq!(agent.published().status.reason, "its isolation is gvisor now");
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.isolation(), Isolation::Gvisor);
    agent.ensure_running().await.unwrap();
    assert_eq!(world.engine.last_spec().unwrap().isolation, Isolation::Gvisor);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_home_that_cannot_be_converted_leaves_the_agent_as_it_was() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world
        .engine
        .fail_next_conversion(EngineError::NoSpace { free: 0 });
    let trouble = agent.set_isolation(Isolation::Gvisor).await.unwrap_err();
    assert!(trouble.is_no_space(), "{trouble:?}");
    assert_eq!(
        (agent.state(), agent.isolation()),
        (State::Running, Isolation::Container)
    );
    world.assert_in_order().await;

    agent.stop(None).await.unwrap();
    world
        .engine
        .fail_next_conversion(EngineError::NoSpace { free: 0 });
    agent.set_isolation(Isolation::Gvisor).await.unwrap_err();
    assert_eq!(agent.state(), State::Stopped);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_home_that_is_known_to_have_no_room_costs_no_memory() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.remember(&agent.profile.id, "a secret");
    world
        .engine
        .refuse_next_conversion(EngineError::TooLittleSpace { needed: 2, free: 1 });
    let trouble = agent.set_isolation(Isolation::Gvisor).await.unwrap_err();
    assert!(trouble.is_no_space(), "{trouble:?}");
    assert_eq!(
        (agent.state(), agent.isolation()),
        (State::Running, Isolation::Container)
    );
    assert_eq!(
        world.engine.memory(&agent.profile.id).as_deref(),
        Some("a secret")
    );
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_home_has_no_traces_of_an_image_when_it_is_converted() {
    let world = World::new().await;
    let agent = world.running("one").await;
    agent.hibernate("asked").await.unwrap();
    let image = world.image_of(&agent);
    agent.set_isolation(Isolation::Gvisor).await.unwrap();
    assert_eq!(world.engine.released(&image), Some(Isolation::Container));
    assert_eq!(world.engine.conversions(), [Isolation::Gvisor]);
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_ephemeral_agent_is_refused_and_left_alone_and_one_with_volumes_is_not_refused() {
    let world = World::new().await;
    let agent = world.create("passing", Lifetime::Ephemeral, true).await.unwrap();
    let refused = agent.set_isolation(Isolation::Gvisor).await;
    assert!(
        matches!(refused, Err(Trouble::Refused(Refusal::Ephemeral))),
        "{refused:?}"
    );
    assert_eq!(agent.state(), State::Running);

    let mut creation = World::creation("two", Lifetime::Persistent, true);
    creation.spec.volumes.push(VolumeMount {
        volume: dorm_engine::Id::random(),
        path: "/data".to_owned(),
    });
    let agent = world.registry.create(creation).await.unwrap();
    agent.set_isolation(Isolation::Vm).await.unwrap();
    assert_eq!(
        (agent.state(), agent.isolation()),
        (State::Running, Isolation::Vm)
    );
    world.assert_in_order().await;
}

#[tokio::test]
async fn memory_of_another_isolation_is_refused_and_files_are_not() {
    let world = World::new().await;
    let _guests = FakeGuests::answering(&world.engine, |_| None);
    let agent = world.running("one").await;
    world.homes.write(&agent.profile.id, "old");
    let full = agent.snapshot("full", SnapshotKind::Full).await.unwrap();
    let files = agent.snapshot("files", SnapshotKind::Files).await.unwrap();
    agent.set_isolation(Isolation::Gvisor).await.unwrap();
    world.homes.write(&agent.profile.id, "new");
    world.engine.remember(&agent.profile.id, "a secret");

    let refused = agent.roll_back(&full).await;
    assert!(
        matches!(refused, Err(Trouble::OtherIsolation { .. })),
        "{refused:?}"
    );
    let forked = world
        .registry
        .fork(&agent, vec!["fork".to_owned()], Some(full.clone()), false, true)
        .await;
    assert!(matches!(forked, Err(Trouble::OtherIsolation { .. })));
    assert_eq!(
        world.engine.memory(&agent.profile.id).as_deref(),
        Some("a secret")
    );
    assert_eq!(agent.snapshots().await.unwrap().len(), 2, "nothing was begun");
    let copies = world
        .registry
        .fork(&agent, vec!["copy".to_owned()], Some(full.clone()), true, true)
        .await
        .unwrap();
    assert_eq!(copies[0].isolation(), Isolation::Gvisor);

    agent.roll_back(&files).await.unwrap();
    assert_eq!(world.homes.content(&agent.profile.id).as_deref(), Some("old"));
    agent.set_isolation(Isolation::Container).await.unwrap();
    agent.roll_back(&full).await.unwrap();
    reaches(&agent, State::Running).await;
    world.assert_in_order().await;
}

#[tokio::test]
async fn one_that_is_deleted_meanwhile_is_not_waited_for() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.hold_conversions(true);
    let changed = tokio::spawn({
        let agent = agent.clone();
        async move { agent.set_isolation(Isolation::Gvisor).await }
    });
    reaches(&agent, State::Stopping).await;
    let deleted = tokio::time::timeout(std::time::Duration::from_secs(30), agent.delete()).await;
    deleted.expect("it waits for files that nobody wants").unwrap();
    let changed = changed.await.unwrap();
    assert!(
        matches!(changed, Err(Trouble::Refused(Refusal::BeingDeleted))),
        "{changed:?}"
    );
    assert!(world.engine.conversions().is_empty());
    world.assert_in_order().await;
}

#[tokio::test]
async fn what_a_conversion_leaves_out_is_told_also_when_a_start_makes_it() {
    let mut world = World::new().await;
    let agent = world.stopped("one").await;
    world.engine.leave_out_next("2 device nodes are left out");
    agent.set_isolation(Isolation::Gvisor).await.unwrap();
    let said = "its isolation is gvisor now; of its files, 2 device nodes are left out";
    assert_eq!(agent.published().status.reason, said);

    // As after a crash between the exchange of the home and its record.
    world
        .store
        .set_isolation(&agent.profile.id, Isolation::Container)
        .await
        .unwrap();
    world.restart().await;
    world.engine.leave_out_next("a socket is left out");
    let agent = world.get("one").unwrap();
    agent.ensure_running().await.unwrap();
    assert_eq!(
        agent.published().status.reason,
        "started; of its files, a socket is left out"
    );
    world.assert_in_order().await;
}

/// What the events of agent "one" say.
async fn told(world: &World) -> Vec<String> {
    let id = world.get("one").unwrap().profile.id.clone();
    let events = world.store.events(&id, 1000).await.unwrap();
    events.into_iter().map(|event| event.reason).collect()
}

#[tokio::test]
async fn what_a_conversion_leaves_out_is_told_also_when_the_start_that_made_it_fails() {
    let mut world = World::new().await;
    let agent = world.stopped("one").await;
    let id = &agent.profile.id;
    world.store.set_isolation(id, Isolation::Gvisor).await.unwrap();
    world.restart().await;
    world.engine.leave_out_next("a socket is left out");
    world.engine.fail_next_start("no room");
    let agent = world.get("one").unwrap();
    agent.ensure_running().await.unwrap_err();
    assert_eq!(agent.state(), State::Failed);
    assert!(
        told(&world)
            .await
            .contains(&"of its files, a socket is left out".to_owned())
    );
    world.assert_in_order().await;
    agent.ensure_running().await.unwrap();
    assert_eq!(agent.published().status.reason, "started");
    world.assert_in_order().await;
}

#[tokio::test]
async fn what_a_conversion_leaves_out_is_told_also_when_the_daemon_dies_after_it() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    world.engine.leave_out_next("a socket is left out");
    world.faults.arm(Point::ConvertHomeMade, Action::Hang);
    let changing = agent.clone();
    tokio::spawn(async move { changing.set_isolation(Isolation::Gvisor).await });
    world.faults.struck().await;
    world.restart().await;
    assert_eq!(world.get("one").unwrap().state(), State::Stopped);
    assert!(
        told(&world)
            .await
            .contains(&"of its files, a socket is left out".to_owned())
    );
    world.assert_in_order().await;
}
