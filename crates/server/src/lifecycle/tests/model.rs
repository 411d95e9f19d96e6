//! Random lives against a simple model of what they should be.

use std::time::Duration;

use proptest::prelude::*;

use super::{World, reaches, vanishes};
use crate::records::{Lifetime, State};

#[derive(Debug, Clone, Copy)]
enum Step {
    Start { fails: bool },
    Reach { fails: bool },
    Stop { fails: bool },
    Delete { fails: bool },
    BoxEnds,
    Restart,
    Reboot,
    StoreFails,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let often = || prop::bool::weighted(0.25);
    let step = prop_oneof![
        3 => often().prop_map(|fails| Step::Start { fails }),
        3 => often().prop_map(|fails| Step::Reach { fails }),
        3 => often().prop_map(|fails| Step::Stop { fails }),
        1 => often().prop_map(|fails| Step::Delete { fails }),
        2 => Just(Step::BoxEnds),
        2 => Just(Step::Restart),
        1 => Just(Step::Reboot),
        1 => Just(Step::StoreFails),
    ];
    prop::collection::vec(step, 1..30)
}

/// The model: `None` is gone. Knows nothing of drivers, queues or records.
fn expected(state: Option<State>, lifetime: Lifetime, step: Step) -> Option<State> {
    let ephemeral = lifetime == Lifetime::Ephemeral;
    let ended = if ephemeral { None } else { Some(State::Stopped) };
    match (step, state?) {
        (Step::Start { .. } | Step::Reach { .. }, State::Running) => Some(State::Running),
        (Step::Start { fails } | Step::Reach { fails }, _) => {
            Some(if fails { State::Failed } else { State::Running })
        }
        (Step::Stop { .. }, State::Stopped) => Some(State::Stopped),
        // Nothing runs, so nothing is there to be stopped: an ephemeral agent is swept and deleted.
        (Step::Stop { .. }, State::Failed) if ephemeral => None,
        (Step::Stop { fails: true }, _) => Some(State::Failed),
        (Step::Stop { fails: false }, _) => ended,
        (Step::Delete { fails: true }, _) => Some(State::Failed),
        (Step::Delete { fails: false }, _) => None,
        (Step::BoxEnds | Step::Reboot, State::Running) => ended,
        (Step::BoxEnds | Step::Reboot | Step::Restart | Step::StoreFails, state) => Some(state),
    }
}

async fn live(lifetime: Lifetime, steps: Vec<Step>) {
    let mut world = World::new().await;
    world.create("one", lifetime, false).await.unwrap();
    let mut model = Some(State::Stopped);
    for step in steps {
        let before = model;
        model = expected(model, lifetime, step);
        let Some(agent) = world.get("one") else {
            assert_eq!(before, None);
            break;
        };
        // A fault is declared only where it strikes, so that none is left for a later step.
        let starts = before != Some(State::Running);
        let stops = before != Some(State::Stopped)
            && !(lifetime == Lifetime::Ephemeral && before == Some(State::Failed));
        match step {
            Step::Start { fails } | Step::Reach { fails } => {
                if fails && starts {
                    world.engine.fail_next_start("declared");
                }
                let answer = match step {
                    Step::Start { .. } => agent.start().await,
                    _ => agent.ensure_running().await,
                };
                assert_eq!(answer.is_err(), fails && starts);
            }
            Step::Stop { fails } => {
                if fails && stops {
                    world.engine.fail_next_stop("declared");
                }
                assert_eq!(agent.stop(None).await.is_err(), fails && stops);
            }
            Step::Delete { fails } => {
                if fails {
                    world.homes.fail_next_delete("declared");
                }
                assert_eq!(agent.delete().await.is_err(), fails);
            }
            Step::BoxEnds => {
                if before == Some(State::Running) {
                    world.engine.kill(&agent.profile.id, "declared");
                    match model {
                        Some(state) => reaches(&agent, state).await,
                        None => vanishes(&agent).await,
                    }
                }
            }
            Step::Restart => world.restart().await,
            Step::Reboot => {
                world.engine.reboot();
                world.restart().await;
                if let (None, Some(agent)) = (model, world.get("one")) {
                    vanishes(&agent).await;
                }
            }
            Step::StoreFails => {
                let state = if before == Some(State::Running) {
                    State::Stopping
                } else {
                    State::Starting
                };
                if lifetime == Lifetime::Persistent {
                    world.store.fail_changes_to(Some(state));
                    let answer = if before == Some(State::Running) {
                        agent.stop(None).await
                    } else {
                        agent.start().await
                    };
                    assert!(answer.is_err());
                    world.store.fail_changes_to(None);
                }
            }
        }
        assert_eq!(
            world.get("one").map(|agent| agent.state()),
            model,
            "after {step:?} in {before:?}"
        );
        if model != Some(State::Failed) {
            world.assert_in_order().await;
        }
    }
}

/// Whoever asks is answered, in whatever order everything comes.
async fn crowd(lifetime: Lifetime, steps: Vec<Step>) {
    let world = World::new().await;
    let agent = world.create("one", lifetime, false).await.unwrap();
    let mut asking = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        let agent = agent.clone();
        world.engine.hold_starts(number % 3 == 0);
        world.engine.hold_stops(number % 4 == 1);
        match step {
            Step::Start { fails } => {
                if fails {
                    world.engine.fail_next_start("declared");
                }
                asking.push(tokio::spawn(async move { drop(agent.start().await) }));
            }
            Step::Reach { .. } => {
                asking.push(tokio::spawn(async move { drop(agent.ensure_running().await) }))
            }
            Step::Stop { .. } => asking.push(tokio::spawn(async move { drop(agent.stop(None).await) })),
            Step::Delete { .. } => asking.push(tokio::spawn(async move { drop(agent.delete().await) })),
            Step::BoxEnds => {
                if world.engine.is_running(&agent.profile.id) {
                    world.engine.kill(&agent.profile.id, "declared");
                }
            }
            Step::Restart | Step::Reboot | Step::StoreFails => tokio::task::yield_now().await,
        }
    }
    world.engine.hold_starts(false);
    world.engine.hold_stops(false);
    for task in asking {
        tokio::time::timeout(Duration::from_secs(60), task)
            .await
            .expect("an answer")
            .unwrap();
    }
    world.registry.shut_down(false, Duration::from_secs(60)).await;
    if agent.state() != State::Running {
        world.assert_in_order().await;
    }
}

fn run(life: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(life);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_life_is_what_the_model_says(steps in steps()) {
        run(live(Lifetime::Persistent, steps));
    }

    #[test]
    fn an_ephemeral_life_is_what_the_model_says(steps in steps()) {
        run(live(Lifetime::Ephemeral, steps));
    }

    #[test]
    fn everyone_in_a_crowd_is_answered(steps in steps()) {
        run(crowd(Lifetime::Persistent, steps));
    }

    #[test]
    fn everyone_in_a_crowd_around_an_ephemeral_agent_is_answered(steps in steps()) {
        run(crowd(Lifetime::Ephemeral, steps));
    }
}
