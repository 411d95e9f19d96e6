//! A daemon finds what an earlier one left.

use dorm_engine::{Engine as _, Homes as _, Id};

use super::{World, reaches, vanishes};
use crate::records::{Lifetime, State};

#[tokio::test]
async fn boxes_that_go_on_running_are_adopted_and_watched() {
    let mut world = World::new().await;
    let id = world.running("one").await.profile.id.clone();
    let commits = world.store.commits();
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Running);
    assert_eq!(
        world.store.commits(),
        commits,
        "nothing changed, so nothing is written"
    );
    world.assert_in_order().await;
    world.engine.kill(&id, "later");
    reaches(&agent, State::Stopped).await;
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_network_policy_is_kept_by_the_record_and_given_to_every_box_and_fork() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    let policy = dorm_engine::network::Policy {
        internet: false,
        ..Default::default()
    };
    agent.set_network(policy.clone()).await.unwrap();
    assert_eq!(
        world.engine.last_spec().unwrap().network,
        policy,
        "the running box"
    );
    agent.stop(None).await.unwrap();
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(*agent.network(), policy);
    agent.start().await.unwrap();
    assert_eq!(world.engine.last_spec().unwrap().network, policy, "a new box");
    let forks = world
        .registry
        .fork(&agent, vec!["two".to_owned()], None, true, false);
    let fork = forks.await.unwrap().remove(0);
    fork.set_network(Default::default()).await.unwrap();
    assert_eq!(*agent.network(), policy, "the fork's is its own");
}

#[tokio::test]
async fn after_a_reboot_persistent_agents_are_stopped_and_ephemeral_ones_gone() {
    let mut world = World::new().await;
    world.running("one").await;
    world.create("short", Lifetime::Ephemeral, true).await.unwrap();
    world.engine.reboot();
    world.restart().await;
    if let Some(short) = world.get("short") {
        vanishes(&short).await;
    }
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Stopped);
    assert_eq!(
        agent.published().status.reason,
        "the box ended while the daemon was away"
    );
    world.assert_in_order().await;
    agent.start().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn boxes_and_homes_without_a_record_are_removed() {
    let mut world = World::new().await;
    let kept = world.running("kept").await;
    let stray = Id::random();
    world.homes.create_empty(&stray).await.unwrap();
    let mut spec = world.engine.last_spec().unwrap();
    spec.id = stray.clone();
    world.engine.start(&spec).await.unwrap();
    let template = Id::random();
    world.homes.add_template(&template);
    world.restart().await;
    assert!(!world.homes.has(&stray));
    assert!(!world.engine.is_running(&stray));
    assert!(!world.homes.templates().await.unwrap().contains(&template));
    assert!(world.engine.is_running(&kept.profile.id));
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_agent_whose_home_is_missing_fails_and_says_so() {
    let mut world = World::new().await;
    let id = world.running("one").await.profile.id.clone();
    world.homes.lose(&id);
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.state(), State::Failed);
    assert_eq!(
        agent.published().status.reason,
        "its home is missing from the pool"
    );
    assert!(!world.engine.is_running(&id));
    agent.delete().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_agent_whose_record_is_damaged_can_only_be_deleted_and_hurts_no_other() {
    let mut world = World::new().await;
    let id = world.stopped("bad").await.profile.id.clone();
    world.running("good").await;
    world.store.damage(&id, "spec: it is not JSON");
    world.restart().await;
    let bad = world.get("bad").unwrap();
    let trouble = bad.start().await.unwrap_err();
    assert!(trouble.to_string().contains("spec: it is not JSON"), "{trouble}");
    assert_eq!(bad.state(), State::Failed);
    assert_eq!(world.get("good").unwrap().state(), State::Running);
    bad.delete().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn the_remains_of_a_failed_stop_are_swept() {
    let mut world = World::new().await;
    let agent = world.running("one").await;
    world.engine.fail_next_stop("it clings");
    agent.stop(None).await.unwrap_err();
    assert!(world.engine.is_running(&agent.profile.id));
    world.restart().await;
    assert!(!world.engine.is_running(&agent.profile.id));
    assert_eq!(world.get("one").unwrap().state(), State::Failed);
}
