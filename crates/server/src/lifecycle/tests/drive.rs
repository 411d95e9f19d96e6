//! One daemon, one agent, many who ask.

use std::sync::Arc;

use futures_util::future::join_all;

use super::{World, reaches, vanishes};
use crate::config::OnShutdown;
use crate::faults::{Action, Point};
use crate::lifecycle::decide::Refusal;
use crate::lifecycle::{Agent, Trouble};
use crate::records::{Lifetime, State, Workspace};
use crate::store::Store as _;

pub(super) fn ask<F>(
    agent: &Arc<Agent>,
    how: impl FnOnce(Arc<Agent>) -> F,
) -> tokio::task::JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(how(agent.clone()))
}

/// Lets every task run until it waits for something.
pub(super) async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_new_agent_runs_with_the_template_s_defaults_below_its_own() {
    let world = World::new().await;
    let agent = world.running("one").await;
    let spec = world.engine.last_spec().unwrap();
    assert_eq!(
        (spec.hostname.as_str(), spec.slot, spec.uid_base),
        ("one", 0, 1_000_000)
    );
    assert_eq!(spec.boot.env["A"], "template");
    assert_eq!(spec.boot.env["B"], "agent");
    assert_eq!(spec.boot.default_user.as_deref(), Some("user"));
    assert_eq!(spec.boot.start_command.unwrap().command, "serve");
    assert_eq!(agent.published().status.reason, "started");
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_stopped_agent_starts_when_something_reaches_for_it() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    agent.ensure_running().await.unwrap();
    assert_eq!(agent.state(), State::Running);
    agent.stop(None).await.unwrap();
    assert_eq!(agent.state(), State::Stopped);
    world.assert_in_order().await;
}

#[tokio::test]
async fn creating_and_starting_takes_two_commits_and_so_does_every_transition() {
    let world = World::new().await;
    let agent = world.running("one").await;
    assert_eq!(world.store.commits(), 2);
    agent.stop(None).await.unwrap();
    assert_eq!(world.store.commits(), 4);
    agent.delete().await.unwrap();
    assert_eq!(world.store.commits(), 6);
}

#[tokio::test]
async fn all_who_reach_for_a_stopped_agent_wait_for_one_start() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    world.engine.hold_starts(true);
    let asking: Vec<_> = (0..20)
        .map(|_| ask(&agent, |agent| async move { agent.ensure_running().await }))
        .collect();
    settle().await;
    assert!(asking.iter().all(|task| !task.is_finished()));
    assert_eq!(agent.state(), State::Starting);
    world.engine.hold_starts(false);
    for answer in join_all(asking).await {
        answer.unwrap().unwrap();
    }
    assert_eq!(world.engine.starts(), 1);
}

#[tokio::test]
async fn all_who_waited_for_a_start_that_fails_are_told_why_and_the_next_tries_again() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    world.engine.hold_starts(true);
    world.engine.fail_next_start("no more tapes");
    let asking: Vec<_> = (0..3)
        .map(|_| ask(&agent, |agent| async move { agent.ensure_running().await }))
        .collect();
    settle().await;
    world.engine.hold_starts(false);
    for answer in join_all(asking).await {
        let trouble = answer.unwrap().unwrap_err();
        assert!(trouble.in_full().contains("no more tapes"), "{trouble:?}");
    }
    assert_eq!(agent.state(), State::Failed);
    assert!(agent.published().status.reason.contains("no more tapes"));
    world.assert_in_order().await;
    agent.start().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_stop_asked_for_during_a_start_follows_it() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    world.engine.hold_starts(true);
    let start = ask(&agent, |agent| async move { agent.start().await });
    settle().await;
    let stop = ask(&agent, |agent| async move { agent.stop(None).await });
    settle().await;
    assert_eq!(world.engine.stops(), 0);
    world.engine.hold_starts(false);
    start.await.unwrap().unwrap();
    stop.await.unwrap().unwrap();
    assert_eq!(agent.state(), State::Stopped);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_start_asked_for_during_a_stop_follows_it() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.hold_stops(true);
    let stop = ask(&agent, |agent| async move { agent.stop(None).await });
    settle().await;
    let start = ask(&agent, |agent| async move { agent.ensure_running().await });
    settle().await;
    world.engine.hold_stops(false);
    stop.await.unwrap().unwrap();
    start.await.unwrap().unwrap();
    assert_eq!(agent.state(), State::Running);
    assert_eq!(agent.generation(), 2);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_delete_wins_over_all_who_wait() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.hold_stops(true);
    let stop = ask(&agent, |agent| async move { agent.stop(None).await });
    settle().await;
    let start = ask(&agent, |agent| async move { agent.ensure_running().await });
    settle().await;
    let deletes: Vec<_> = (0..2)
        .map(|_| ask(&agent, |agent| async move { agent.delete().await }))
        .collect();
    settle().await;
    for refused in [stop.await.unwrap(), start.await.unwrap()] {
        assert!(
            matches!(refused, Err(Trouble::Refused(Refusal::BeingDeleted))),
            "{refused:?}"
        );
    }
    world.engine.hold_stops(false);
    for deleted in join_all(deletes).await {
        deleted.unwrap().unwrap();
    }
    vanishes(&agent).await;
    assert!(world.get("one").is_none());
    assert!(matches!(agent.start().await, Err(Trouble::NotFound(_))));
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_box_that_ends_by_itself_leaves_a_stopped_agent_that_says_why() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world
        .engine
        .kill(&agent.profile.id, "process 1 was killed: out of memory");
    reaches(&agent, State::Stopped).await;
    assert_eq!(
        agent.published().status.reason,
        "the box ended: process 1 was killed: out of memory"
    );
    agent.ensure_running().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_ephemeral_agent_goes_with_its_box() {
    let world = World::new().await;
    let ends = world.create("ends", Lifetime::Ephemeral, true).await.unwrap();
    let stopped = world.create("stopped", Lifetime::Ephemeral, true).await.unwrap();
    world.engine.kill(&ends.profile.id, "the end");
    vanishes(&ends).await;
    stopped.stop(None).await.unwrap();
    assert!(world.registry.all().is_empty());
    world.assert_in_order().await;
}

#[tokio::test]
async fn late_news_of_an_earlier_box_harm_no_later_one() {
    let world = World::new().await;
    let agent = world.running("one").await;
    agent.stop(None).await.unwrap();
    agent.start().await.unwrap();
    let request = crate::lifecycle::decide::Request::BoxExited {
        generation: 1,
        reason: "old".to_owned(),
        saved: false,
    };
    agent.enqueue(crate::lifecycle::agent::Asked { request, reply: None });
    settle().await;
    assert_eq!(agent.state(), State::Running);
}

#[tokio::test]
async fn whatever_fails_in_a_creation_leaves_nothing_of_it() {
    let world = World::new().await;
    world.engine.fail_next_start("no");
    assert!(world.create("one", Lifetime::Persistent, true).await.is_err());
    world.homes.fail_next_create("no");
    assert!(world.create("one", Lifetime::Persistent, true).await.is_err());
    world.homes.fill(true);
    assert!(world.create("one", Lifetime::Persistent, true).await.is_err());
    world.homes.fill(false);
    for point in [
        Point::CreateHomeMade,
        Point::CreateRecorded,
        Point::StartRecorded,
        Point::StartBoxUp,
    ] {
        world.faults.arm(point, Action::Fail);
        assert!(
            world.create("one", Lifetime::Persistent, true).await.is_err(),
            "{point:?}"
        );
    }
    world.store.fail_changes_to(Some(State::Running));
    assert!(world.create("one", Lifetime::Persistent, true).await.is_err());
    world.store.fail_changes_to(None);
    assert!(world.registry.all().is_empty());
    assert_eq!(world.homes.count(), 0);
    world.assert_in_order().await;
    world.running("one").await;
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_name_belongs_to_one_agent_even_if_many_ask_at_once() {
    let world = World::new().await;
    let made = join_all((0..5).map(|_| world.create("one", Lifetime::Persistent, true))).await;
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_creation_goes_on_when_whoever_asked_goes_away() {
    let world = World::new().await;
    world.engine.hold_starts(true);
    let registry = world.registry.clone();
    let creation = World::creation("one", Lifetime::Persistent, true);
    let asking = tokio::spawn(async move { registry.create(creation).await });
    settle().await;
    asking.abort();
    world.engine.hold_starts(false);
    let agent = world.get("one").unwrap();
    reaches(&agent, State::Running).await;
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_stop_that_fails_is_told_and_can_be_tried_again() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.fail_next_stop("it clings");
    let trouble = agent.stop(None).await.unwrap_err();
    assert!(trouble.in_full().contains("it clings"));
    assert_eq!(agent.state(), State::Failed);
    agent.stop(None).await.unwrap();
    assert_eq!(agent.state(), State::Stopped);
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_box_left_by_a_failed_stop_does_not_stand_in_the_way_of_a_start() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.engine.fail_next_stop("it clings");
    agent.stop(None).await.unwrap_err();
    agent.start().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn a_delete_that_fails_leaves_an_agent_that_can_be_deleted() {
    let world = World::new().await;
    let agent = world.running("one").await;
    world.homes.fail_next_delete("busy");
    agent.delete().await.unwrap_err();
    assert_eq!(agent.state(), State::Failed);
    agent.delete().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn what_cannot_be_recorded_is_not_begun() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    world.store.fail_changes_to(Some(State::Starting));
    assert!(matches!(agent.start().await, Err(Trouble::Store(_))));
    assert_eq!(agent.state(), State::Stopped);
    assert_eq!(world.engine.starts(), 0);
    world.store.fail_changes_to(None);
    agent.start().await.unwrap();
}

#[tokio::test]
async fn a_box_that_cannot_be_recorded_is_removed_again() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    world.store.fail_changes_to(Some(State::Running));
    agent.start().await.unwrap_err();
    assert!(!world.engine.is_running(&agent.profile.id));
    assert_eq!(agent.state(), State::Failed);
    world.store.fail_changes_to(None);
    agent.start().await.unwrap();
    assert_eq!(agent.state(), State::Running);
}

#[tokio::test]
async fn a_bug_in_a_transition_fails_the_agent_and_not_the_daemon() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    world.faults.arm(Point::StartBoxUp, Action::Panic);
    assert!(matches!(agent.start().await, Err(Trouble::Bug { .. })));
    assert_eq!(agent.state(), State::Failed);
    world.assert_in_order().await;
    agent.start().await.unwrap();
    world.assert_in_order().await;
}

#[tokio::test]
async fn an_idle_agent_has_no_task_and_costs_little() {
    let world = World::new().await;
    let agents: Vec<_> = join_all((0..50).map(|n| async move { format!("a{n}") })).await;
    for name in &agents {
        world.stopped(name).await;
    }
    settle().await;
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(tasks, 0, "no task lives for agents that nobody asks anything of");
    assert!(size_of::<Agent>() <= 1152, "{}", size_of::<Agent>());
}

#[tokio::test]
async fn open_requests_are_counted_until_they_end() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    let (first, second) = (agent.open_request(), agent.open_request());
    assert_eq!(agent.open_requests(), 2);
    drop(first);
    assert_eq!(agent.open_requests(), 1);
    drop(second);
    assert_eq!(agent.open_requests(), 0);
}

#[tokio::test]
async fn an_agent_is_found_by_name_and_by_id_in_its_workspace_alone() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    let id = agent.profile.id.to_string();
    assert!(world.get("one").is_some() && world.get(&id).is_some());
    let other = Workspace::new("other");
    assert!(world.registry.get(&other, "one").is_err() && world.registry.get(&other, &id).is_err());
}

#[tokio::test]
async fn at_shutdown_what_is_under_way_ends_and_nothing_new_begins() {
    let world = World::new().await;
    let agent = world.stopped("one").await;
    world.engine.hold_starts(true);
    let start = ask(&agent, |agent| async move { agent.start().await });
    settle().await;
    let registry = world.registry.clone();
    let ending = tokio::spawn(async move {
        registry
            .shut_down(OnShutdown::Leave, std::time::Duration::from_secs(60))
            .await
    });
    settle().await;
    assert!(matches!(agent.stop(None).await, Err(Trouble::ShuttingDown)));
    world.engine.hold_starts(false);
    start.await.unwrap().unwrap();
    ending.await.unwrap();
    world.assert_in_order().await;
    assert!(matches!(
        world.create("two", Lifetime::Persistent, true).await,
        Err(Trouble::ShuttingDown)
    ));
}

#[tokio::test]
async fn boxes_are_stopped_at_shutdown_if_that_is_wanted() {
    let world = World::new().await;
    world.running("one").await;
    world.running("two").await;
    world
        .registry
        .shut_down(OnShutdown::Stop, std::time::Duration::from_secs(60))
        .await;
    assert_eq!(world.engine.stops(), 2);
    assert!(
        world
            .registry
            .all()
            .iter()
            .all(|agent| agent.state() == State::Stopped)
    );
    assert!(
        world
            .store
            .agents()
            .await
            .unwrap()
            .readable
            .iter()
            .all(|agent| agent.box_record.is_none())
    );
}
