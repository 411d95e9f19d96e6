//! The watcher, with a clock that stands still until everyone waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{World, reaches};
use crate::config::Standby;
use crate::guest_client::fake::FakeGuests;
use crate::lifecycle::idle::pressure::{Budget, Gauge};
use crate::lifecycle::{Agent, Trouble};
use crate::records::{Lifetime, Sleep, SleepChange, State};

const MIB: u64 = 1 << 20;

/// A world whose agents go to sleep, and the memory that its host has left.
pub(super) async fn watched(settings: Standby) -> (World, FakeGuests, Arc<AtomicU64>) {
    let world = World::new().await;
    let guests = FakeGuests::answering(&world.engine, |_| None);
    let available = Arc::new(AtomicU64::new(900 * MIB));
    let left = available.clone();
    let gauge = move || {
        Some(Gauge {
            total: 1000 * MIB,
            available: left.load(Ordering::Relaxed),
        })
    };
    world.registry.watch(settings, Arc::new(gauge));
    (world, guests, available)
}

pub(super) async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

/// How long it takes until the agent is in this state.
async fn until(agent: &Arc<Agent>, state: State) -> u64 {
    let begin = Instant::now();
    reaches(agent, state).await;
    begin.elapsed().as_secs()
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_nobody_uses_goes_to_standby_becomes_durable_and_goes_to_disk() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    assert_eq!(until(&agent, State::Standby).await, 15);
    assert_eq!(agent.published().status.reason, "idle for 15 s");
    seconds(59).await;
    assert!(agent.current_image().is_none());
    seconds(2).await;
    assert!(
        agent.current_image().is_some(),
        "after a minute its memory is on disk"
    );
    assert_eq!(agent.state(), State::Standby);
    // When it came to standby is known to the millisecond of the wall clock, which does not stand still.
    assert!((600 - 62..=600 - 61).contains(&until(&agent, State::Hibernated).await));
    assert_eq!(world.engine.checkpoints(), 1);
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_sleeps_for_good_is_not_looked_at() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    until(&agent, State::Hibernated).await;
    seconds(1).await;
    let before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    seconds(3600).await;
    assert_eq!(
        tokio::runtime::Handle::current().metrics().num_alive_tasks(),
        before
    );
    assert_eq!((world.engine.thaws(), world.engine.restores()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn an_open_request_keeps_it_awake_and_the_time_counts_from_its_end() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    let open = agent.open_request();
    seconds(100).await;
    assert_eq!(agent.state(), State::Running);
    drop(open);
    let waited = until(&agent, State::Standby).await;
    assert!((15..=23).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn a_run_in_progress_keeps_it_awake_but_services_do_not() {
    let (world, guests, _) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    let service = |id: &str| json!({"runId": id, "keepsAwake": false});
    guests.now_running(&[json!({"runId": "r1", "keepsAwake": true}), service("r2")]);
    seconds(200).await;
    assert_eq!(agent.state(), State::Running);
    assert_eq!(agent.work().unwrap().what, "run r1 is in progress");
    guests.now_running(&[service("r2"), service("r3")]);
    let waited = until(&agent, State::Standby).await;
    assert!(waited <= 30, "{waited}");
    let reason = agent.published().status.reason;
    assert_eq!(reason, "idle for 15 s, but for 2 services");
}

#[tokio::test(start_paused = true)]
async fn a_start_command_that_is_flagged_as_work_keeps_it_awake_whatever_its_tag() {
    let (world, guests, _) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    guests.now_running(&[json!({"runId": "r1", "tag": "start", "keepsAwake": true})]);
    seconds(200).await;
    assert_eq!(agent.state(), State::Running);
}

#[tokio::test(start_paused = true)]
async fn of_a_guest_that_knows_no_services_the_start_command_is_one() {
    let (world, guests, _) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    guests.now_running(&[json!({"runId": "r1"}), json!({"runId": "r2", "tag": "start"})]);
    seconds(200).await;
    assert_eq!(agent.state(), State::Running);
    guests.now_running(&[json!({"runId": "r2", "tag": "start"})]);
    until(&agent, State::Standby).await;
}

#[tokio::test(start_paused = true)]
async fn a_box_that_computes_stays_awake() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    for _ in 0..100 {
        seconds(1).await;
        world.engine.burn(&agent.profile.id, Duration::from_millis(30));
    }
    assert_eq!(agent.state(), State::Running);
    assert_eq!(agent.work().unwrap().what, "its processes use 3 % of a core");
    for _ in 0..60 {
        seconds(1).await;
        if agent.state() == State::Running {
            world.engine.burn(&agent.profile.id, Duration::from_millis(10));
        }
    }
    assert_eq!(agent.state(), State::Standby);
}

#[tokio::test(start_paused = true)]
async fn a_hold_keeps_it_awake_until_it_is_released() {
    let (mut world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    let hold = agent
        .hold(Duration::from_secs(36_000), "a demonstration")
        .await
        .unwrap();
    seconds(100).await;
    assert_eq!(agent.state(), State::Running);
    assert_eq!(agent.holds(), std::slice::from_ref(&hold));
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.holds(), [hold], "it outlives the daemon");
    world.registry.watch(Standby::default(), Arc::new(|| None));
    seconds(100).await;
    assert_eq!(agent.state(), State::Running);
    assert_eq!(agent.release(None).await.unwrap(), 1);
    assert_eq!(until(&agent, State::Standby).await, 15);
}

#[tokio::test(start_paused = true)]
async fn one_that_is_held_and_paused_becomes_durable_and_no_more() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    agent.hold(Duration::from_secs(3_600), "tomorrow").await.unwrap();
    agent.pause().await.unwrap();
    seconds(59).await;
    assert!(agent.current_image().is_none());
    seconds(3).await;
    assert!(agent.current_image().is_some());
    seconds(3_000).await;
    assert_eq!(agent.state(), State::Standby);
    agent.release(None).await.unwrap();
    assert!(until(&agent, State::Hibernated).await <= 1);
}

#[tokio::test(start_paused = true)]
async fn an_agent_has_times_of_its_own() {
    let (world, ..) = watched(Standby::default()).await;
    let with = |name: &str, sleep: Sleep| {
        let mut creation = World::creation(name, Lifetime::Persistent, true);
        creation.spec.sleep = sleep;
        world.registry.create(creation)
    };
    let awake = with(
        "awake",
        Sleep {
            keep_awake: true,
            ..Sleep::default()
        },
    )
    .await
    .unwrap();
    let slow = Sleep {
        standby_after: Some(60_000),
        hibernate_after: Some(0),
        ..Sleep::default()
    };
    let slow = with("slow", slow).await.unwrap();
    assert_eq!(until(&slow, State::Standby).await, 60);
    seconds(10_000).await;
    assert_eq!((awake.state(), slow.state()), (State::Running, State::Standby));
    assert!(slow.current_image().is_some());
}

#[tokio::test(start_paused = true)]
async fn what_is_changed_later_holds_at_once_and_wakes_nobody() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    let standby_after = |millis| SleepChange {
        standby_after: Some(millis),
        ..SleepChange::default()
    };
    let keep_awake = |keep| SleepChange {
        keep_awake: Some(keep),
        ..SleepChange::default()
    };
    seconds(10).await;
    agent.set_sleep(keep_awake(true)).await.unwrap();
    seconds(10_000).await;
    assert_eq!(agent.state(), State::Running);
    agent.set_sleep(standby_after(Some(3_600_000))).await.unwrap();
    agent.set_sleep(keep_awake(false)).await.unwrap();
    agent.touch();
    seconds(3_000).await;
    assert_eq!(agent.state(), State::Running, "it has a longer time now");
    agent.set_sleep(standby_after(Some(2_000))).await.unwrap();
    assert!(until(&agent, State::Standby).await <= 2);

    let thaws = world.engine.thaws();
    agent.set_sleep(keep_awake(true)).await.unwrap();
    seconds(10_000).await;
    assert_eq!((agent.state(), world.engine.thaws()), (State::Standby, thaws));
    assert!(
        agent.current_image().is_some(),
        "it is safe from a crash of the host"
    );
    let change = SleepChange {
        hibernate_after: Some(Some(1_000)),
        ..keep_awake(false)
    };
    agent.set_sleep(change).await.unwrap();
    assert_eq!(until(&agent, State::Hibernated).await, 0);
    agent.set_sleep(standby_after(None)).await.unwrap();
    assert_eq!(agent.state(), State::Hibernated);
    agent.ensure_running().await.unwrap();
    assert_eq!(until(&agent, State::Standby).await, 15);
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn one_that_was_found_idle_and_is_to_stay_awake_now_stays_awake() {
    let (world, ..) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    for change in [
        SleepChange {
            keep_awake: Some(true),
            ..SleepChange::default()
        },
        SleepChange {
            keep_awake: Some(false),
            standby_after: Some(Some(0)),
            ..SleepChange::default()
        },
    ] {
        agent.set_sleep(change).await.unwrap();
        let asked = agent.idle("idle for 15 s".to_owned(), agent.quiet_since()).await;
        assert!(matches!(asked, Err(Trouble::InUse)), "{asked:?}");
        assert_eq!(agent.state(), State::Running);
    }
    agent.pause().await.unwrap();
    assert_eq!(agent.state(), State::Standby, "whoever asks for it gets it");
}

#[tokio::test(start_paused = true)]
async fn changes_are_kept_by_the_record_in_any_state_and_taken_over_by_forks() {
    let (mut world, ..) = watched(Standby::default()).await;
    let agent = world.stopped("one").await;
    // At once, and of different settings.
    let (first, second) = tokio::join!(
        agent.set_sleep(SleepChange {
            standby_after: Some(Some(30_000)),
            ..SleepChange::default()
        }),
        agent.set_sleep(SleepChange {
            durable_after: Some(Some(0)),
            ..SleepChange::default()
        }),
    );
    first.and(second).unwrap();
    assert_eq!(agent.state(), State::Stopped);
    let expected = Sleep {
        standby_after: Some(30_000),
        durable_after: Some(0),
        ..Sleep::default()
    };
    world.restart().await;
    let agent = world.get("one").unwrap();
    assert_eq!(agent.sleep(), expected);
    world.registry.watch(Standby::default(), Arc::new(|| None));
    agent.start().await.unwrap();
    assert_eq!(until(&agent, State::Standby).await, 30);
    let change = SleepChange {
        standby_after: Some(None),
        ..SleepChange::default()
    };
    agent.set_sleep(change).await.unwrap();
    let forks = world
        .registry
        .fork(&agent, vec!["two".to_owned()], None, true, false);
    let fork = forks.await.unwrap().remove(0);
    let expected = expected.changed(change);
    assert_eq!((fork.sleep(), agent.sleep()), (expected, expected));
    agent.delete().await.unwrap();
    let gone = agent.set_sleep(SleepChange {
        keep_awake: Some(true),
        ..SleepChange::default()
    });
    assert!(gone.await.is_err());
}

#[tokio::test(start_paused = true)]
async fn where_no_images_can_be_made_agents_stay_in_standby() {
    let (world, ..) = watched(Standby::default()).await;
    world.engine.cannot_checkpoint("criu is too old");
    let agent = world.running("one").await;
    seconds(10_000).await;
    assert_eq!(agent.state(), State::Standby);
    assert_eq!(world.engine.checkpoints(), 0);
}

#[tokio::test(start_paused = true)]
async fn standby_has_a_budget_and_the_longest_asleep_go_first() {
    // The fake's boxes hold 4 MiB each.
    let settings = Standby {
        memory: Budget::Bytes(9 * MIB),
        ..Standby::default()
    };
    let (world, ..) = watched(settings).await;
    let mut agents = Vec::new();
    for name in ["a", "b", "c"] {
        agents.push(world.running(name).await);
        until(agents.last().unwrap(), State::Standby).await;
    }
    seconds(6).await;
    let states: Vec<_> = agents.iter().map(|agent| agent.state()).collect();
    assert_eq!(states, [State::Hibernated, State::Standby, State::Standby]);
    assert_eq!(agents[0].published().status.reason, "memory is short");
}

#[tokio::test(start_paused = true)]
async fn a_host_that_is_short_of_memory_gets_it_back() {
    let (world, _, available) = watched(Standby::default()).await;
    let agent = world.running("one").await;
    until(&agent, State::Standby).await;
    seconds(20).await;
    assert_eq!(agent.state(), State::Standby);
    available.store(10 * MIB, Ordering::Relaxed);
    seconds(6).await;
    assert_eq!(agent.state(), State::Hibernated);
    world.assert_in_order().await;
}

#[tokio::test(start_paused = true)]
async fn many_agents_are_watched_by_one_task() {
    let (world, ..) = watched(Standby::default()).await;
    for number in 0..90 {
        world.running(&format!("a{number}")).await;
    }
    seconds(700).await;
    assert!(
        world
            .registry
            .all()
            .iter()
            .all(|agent| agent.state() == State::Hibernated)
    );
    // The watcher; boxes that are gone have no watchers.
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(tasks, 1);
}
