//! Random lives against a simple model of what they should be.

use std::time::Duration;

use dorm_engine::Isolation;
use proptest::prelude::*;

use super::{World, reaches, vanishes};
use crate::config::OnShutdown;
use crate::lifecycle::lag;
use crate::records::{Lifetime, State};

#[derive(Debug, Clone, Copy)]
enum Step {
    Start { fails: bool },
    Reach { fails: bool },
    Stop { fails: bool },
    Delete { fails: bool },
    Pause { fails: bool },
    Hibernate { fails: bool },
    MakeDurable { fails: bool },
    Convert { fails: bool },
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
        3 => often().prop_map(|fails| Step::Pause { fails }),
        3 => often().prop_map(|fails| Step::Hibernate { fails }),
        2 => often().prop_map(|fails| Step::MakeDurable { fails }),
        2 => often().prop_map(|fails| Step::Convert { fails }),
        2 => Just(Step::BoxEnds),
        2 => Just(Step::Restart),
        1 => Just(Step::Reboot),
        1 => Just(Step::StoreFails),
    ];
    prop::collection::vec(step, 1..30)
}

/// The model: knows nothing of drivers, queues or records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Model {
    /// `None` is gone.
    state: Option<State>,
    /// Whether the memory is on disk as it is now.
    saved: bool,
    /// What the processes hold in memory; 0 after a start from files.
    memory: u32,
}

impl Model {
    fn at(self, state: State) -> Self {
        let saved = state == State::Hibernated;
        let state = Some(state);
        Self { state, saved, ..self }
    }

    /// The box is gone: only what is on disk is left of its memory.
    fn without_box(self, state: Option<State>) -> Self {
        let memory = if self.saved { self.memory } else { 0 };
        Self {
            state,
            memory,
            ..self
        }
    }

    fn only_files(self, state: Option<State>) -> Self {
        let (saved, memory) = (false, 0);
        Self { state, saved, memory }
    }
}

fn expected(model: Model, lifetime: Lifetime, step: Step) -> Model {
    use State::{Failed, Hibernated, Running, Standby, Stopped};
    let ephemeral = lifetime == Lifetime::Ephemeral;
    let ended = if ephemeral { None } else { Some(Stopped) };
    let Some(state) = model.state else { return model };
    match (step, state) {
        (Step::Start { .. } | Step::Reach { .. }, Running) => model,
        // A thaw that failed may have let something go on.
        (Step::Start { fails: true } | Step::Reach { fails: true }, Standby) => model.at(Standby),
        (Step::Start { .. } | Step::Reach { .. }, Standby) => model.at(Running),
        (Step::Start { fails: false } | Step::Reach { fails: false }, _) if model.saved => model.at(Running),
        // A restore that fails is a start from files.
        (Step::Start { fails } | Step::Reach { fails }, _) => {
            let failed = fails && !model.saved;
            model.only_files(Some(if failed { Failed } else { Running }))
        }
        (Step::Pause { fails: false }, Running) => model.at(Standby),
        (Step::Pause { .. }, _) => model,
        // Free, if the memory is on disk already.
        (Step::Hibernate { fails }, Running | Standby) if !fails || model.saved => model.at(Hibernated),
        (Step::Hibernate { .. }, _) => model,
        (Step::MakeDurable { fails: false }, Standby) => Model { saved: true, ..model },
        (Step::MakeDurable { .. }, _) => model,
        (Step::Convert { .. }, _) if ephemeral => model,
        // Whether it was converted or not, it was stopped for that; and goes on, if there was something to go on with.
        (Step::Convert { .. }, Running | Standby) => model.only_files(Some(Running)),
        (Step::Convert { .. }, _) if model.saved => model.only_files(Some(Running)),
        (Step::Convert { .. }, _) => model.only_files(Some(Stopped)),
        (Step::Stop { .. }, Stopped) => model,
        (Step::Stop { .. }, Failed | Hibernated) if ephemeral => model.only_files(None),
        (Step::Stop { fails: true }, Failed | Hibernated) => model.without_box(Some(Failed)),
        // To be deleted: it is not thawed for that.
        (Step::Stop { fails: true }, _) if ephemeral => model.without_box(Some(Failed)),
        (Step::Stop { fails: true }, _) => model.only_files(Some(Failed)),
        (Step::Stop { fails: false }, _) => model.only_files(ended),
        (Step::Delete { fails: true }, _) => model.without_box(Some(Failed)),
        (Step::Delete { fails: false }, _) => model.only_files(None),
        (Step::Reboot | Step::BoxEnds, Standby) if model.saved => model.at(Hibernated),
        (Step::BoxEnds | Step::Reboot, Running | Standby) => model.only_files(ended),
        (Step::BoxEnds | Step::Reboot | Step::Restart | Step::StoreFails, _) => model,
    }
}

fn other(isolation: Isolation) -> Isolation {
    match isolation {
        Isolation::Container => Isolation::Gvisor,
        Isolation::Gvisor | Isolation::Vm => Isolation::Container,
    }
}

/// Declares the fault that the step is to meet, only where it strikes, so that none is left for a later
/// step. Gives whether the answer is an error.
fn declare(world: &World, step: Step, model: Model, lifetime: Lifetime) -> bool {
    use State::{Failed, Hibernated, Running, Standby, Stopped};
    let engine = &world.engine;
    let state = model.state.expect("an agent");
    match (step, state) {
        (Step::Start { fails: true } | Step::Reach { fails: true }, Standby) => {
            engine.fail_next_thaw("declared");
        }
        (Step::Start { fails: true } | Step::Reach { fails: true }, Stopped | Failed | Hibernated) => {
            if model.saved {
                engine.fail_next_restore(dorm_engine::EngineError::BadImage("declared".to_owned()));
                return false;
            }
            engine.fail_next_start("declared");
        }
        (Step::Stop { fails: true }, Running | Standby | Hibernated | Failed) => {
            let swept = lifetime == Lifetime::Ephemeral && matches!(state, Failed | Hibernated);
            if swept {
                return false;
            }
            engine.fail_next_stop("declared");
        }
        // Refused.
        (Step::Convert { .. }, _) if lifetime == Lifetime::Ephemeral => {}
        (Step::Convert { fails: true }, _) => {
            engine.fail_next_conversion(dorm_engine::EngineError::NoSpace { free: 0 });
        }
        (Step::Delete { fails: true }, _) => world.homes.fail_next_delete("declared"),
        (Step::Pause { fails: true }, Running) => engine.fail_next_freeze("declared"),
        (Step::Pause { .. } | Step::Hibernate { .. }, Stopped | Failed) => {}
        (Step::Hibernate { fails: true }, Running) => engine.fail_next_checkpoint("declared"),
        (Step::Hibernate { fails: true } | Step::MakeDurable { fails: true }, Standby) if !model.saved => {
            engine.fail_next_checkpoint("declared");
        }
        _ => return false,
    }
    true
}

async fn live(lifetime: Lifetime, steps: Vec<Step>) {
    let mut world = World::new().await;
    world.create("one", lifetime, false).await.unwrap();
    let mut model = Model {
        state: Some(State::Stopped),
        saved: false,
        memory: 0,
    };
    for (number, step) in (1..).zip(steps) {
        let before = model;
        let Some(agent) = world.get("one") else {
            assert_eq!(before.state, None);
            break;
        };
        let strikes = declare(&world, step, before, lifetime);
        model = expected(model, lifetime, step);
        let answer = match step {
            Step::Start { .. } => Some(agent.start().await),
            Step::Reach { .. } => Some(agent.ensure_running().await),
            Step::Stop { .. } => Some(agent.stop(None).await),
            Step::Delete { .. } => Some(agent.delete().await),
            Step::Pause { .. } => Some(agent.pause().await),
            Step::Hibernate { .. } => Some(agent.hibernate("asked").await),
            Step::MakeDurable { .. } => Some(agent.make_durable().await),
            Step::Convert { .. } => Some(agent.set_isolation(other(agent.isolation())).await),
            Step::BoxEnds => {
                if world.engine.is_running(&agent.profile.id)
                    && matches!(before.state, Some(State::Running | State::Standby))
                {
                    world.engine.kill(&agent.profile.id, "declared");
                    match model.state {
                        Some(state) => reaches(&agent, state).await,
                        None => vanishes(&agent).await,
                    }
                }
                None
            }
            Step::Restart => {
                lag::catch_up(&agent).await.unwrap();
                world.restart().await;
                None
            }
            Step::Reboot => {
                lag::catch_up(&agent).await.unwrap();
                world.engine.reboot();
                world.restart().await;
                if let (None, Some(agent)) = (model.state, world.get("one")) {
                    vanishes(&agent).await;
                }
                None
            }
            Step::StoreFails => {
                let running = before.state == Some(State::Running);
                let rests = [State::Running, State::Stopped, State::Failed].map(Some);
                if lifetime == Lifetime::Persistent && rests.contains(&before.state) {
                    let state = if running { State::Stopping } else { State::Starting };
                    world.store.fail_changes_to(Some(state));
                    let answer = if running {
                        agent.stop(None).await
                    } else {
                        agent.start().await
                    };
                    assert!(answer.is_err());
                    world.store.fail_changes_to(None);
                }
                None
            }
        };
        if let Some(answer) = answer {
            assert_eq!(answer.is_err(), strikes, "{step:?} in {before:?}: {answer:?}");
        }
        let now = world.get("one");
        assert_eq!(
            now.as_ref().map(|agent| agent.state()),
            model.state,
            "after {step:?} in {before:?}"
        );
        if let (Some(agent), Some(State::Running | State::Standby)) = (&now, model.state) {
            let memory = world.engine.memory(&agent.profile.id).unwrap();
            let expected = if model.memory == 0 {
                String::new()
            } else {
                model.memory.to_string()
            };
            assert_eq!(memory, expected, "after {step:?} in {before:?}");
        }
        if let Some(agent) = &now {
            let saved = agent.current_image().is_some();
            assert_eq!(saved, model.saved, "after {step:?} in {before:?}");
        }
        if let (Some(agent), Some(State::Running)) = (&now, model.state) {
            world.engine.remember(&agent.profile.id, &number.to_string());
            model.memory = number;
        }
        if model.state != Some(State::Failed) {
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
        world.engine.hold_checkpoints(number % 5 == 2);
        world.engine.hold_restores(number % 3 == 1);
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
            Step::Pause { .. } => asking.push(tokio::spawn(async move { drop(agent.pause().await) })),
            Step::Hibernate { fails } => {
                if fails {
                    world.engine.fail_next_checkpoint("declared");
                }
                asking.push(tokio::spawn(async move { drop(agent.hibernate("asked").await) }));
            }
            Step::MakeDurable { .. } => {
                asking.push(tokio::spawn(async move { drop(agent.make_durable().await) }));
            }
            Step::Convert { .. } => asking.push(tokio::spawn(async move {
                drop(agent.set_isolation(other(agent.isolation())).await);
            })),
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
    world.engine.hold_checkpoints(false);
    world.engine.hold_restores(false);
    for task in asking {
        tokio::time::timeout(Duration::from_secs(60), task)
            .await
            .expect("an answer")
            .unwrap();
    }
    world
        .registry
        .shut_down(OnShutdown::Leave, Duration::from_secs(60))
        .await;
    // A box that ended in the last moment is the next daemon's to find.
    if !matches!(agent.state(), State::Running | State::Standby) {
        world.assert_in_order().await;
    }
}

pub(super) fn run(life: impl Future<Output = ()>) {
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
