//! What could not be put to disk by itself, and when that is tried again.

use std::time::Duration;

use dorm_engine::EngineError;

use super::World;
use super::idle::{seconds, watched};
use crate::config::Standby;
use crate::lifecycle::idle::pressure::Budget;
use crate::records::State;

/// An agent becomes durable, goes to disk after its time, or has to when memory is short: one of these alone.
fn ways() -> [Standby; 3] {
    let default = Standby::default();
    let never = Standby {
        durable_after: Duration::ZERO,
        hibernate_after: Duration::ZERO,
        ..default
    };
    [
        Standby {
            durable_after: default.durable_after,
            ..never
        },
        Standby {
            hibernate_after: default.hibernate_after,
            ..never
        },
        Standby {
            memory: Budget::Bytes(0),
            ..never
        },
    ]
}

/// How long it takes until so many checkpoints were tried.
async fn until_tried(world: &World, checkpoints: u64) -> u64 {
    for waited in 0..10_000 {
        if world.engine.checkpoints() == checkpoints {
            return waited;
        }
        seconds(1).await;
    }
    panic!("it is not tried");
}

#[tokio::test(start_paused = true)]
async fn what_could_not_be_saved_for_a_reason_that_may_pass_is_tried_again_later() {
    let full = || EngineError::NoSpace { free: 0 };
    let slow = || EngineError::io("criu did not come to an end")(std::io::ErrorKind::TimedOut.into());
    let reasons: [(fn() -> EngineError, u64); 2] = [(full, 60), (slow, 300)];
    for (reason, pause) in reasons {
        for settings in ways() {
            let (world, ..) = watched(settings).await;
            let agent = world.running("one").await;
            world.engine.fail_next_checkpoint_with(reason());
            until_tried(&world, 1).await;
            assert_eq!(agent.state(), State::Standby, "{settings:?}");
            assert!(agent.setback().is_some(), "it is told");
            let waited = until_tried(&world, 2).await;
            // The memory of the host is looked at every five seconds.
            assert!(
                (pause - 1..=pause + 6).contains(&waited),
                "{waited}, {settings:?}"
            );
            assert!(agent.current_image().is_some(), "{settings:?}");
            world.assert_in_order().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_memory_that_cannot_be_saved_is_not_tried_again_until_it_was_awake() {
    let unsavable = [EngineError::CannotCheckpoint, EngineError::BadImage];
    for reason in unsavable {
        for settings in ways() {
            let (world, ..) = watched(settings).await;
            let agent = world.running("one").await;
            let why = "process 7 uses io_uring".to_owned();
            world.engine.fail_next_checkpoint_with(reason(why));
            seconds(10_000).await;
            assert_eq!(agent.state(), State::Standby, "{settings:?}");
            assert_eq!(world.engine.checkpoints(), 1, "{settings:?}");
            agent.ensure_running().await.unwrap();
            seconds(10_000).await;
            assert_eq!(world.engine.checkpoints(), 2, "{settings:?}");
            assert!(agent.current_image().is_some(), "{settings:?}");
        }
    }
}
