//! The pure functions.

use std::time::Duration;

use proptest::prelude::*;

use crate::lifecycle::decide::{Decision, Next, Outcome, Request, after, decide, during};
use crate::records::{Lifetime, State};

fn at_rest(state: State) -> bool {
    matches!(state, State::Stopped | State::Running | State::Failed)
}

fn requests() -> impl Strategy<Value = Request> {
    prop_oneof![
        Just(Request::Start),
        Just(Request::EnsureRunning),
        Just(Request::Stop {
            grace: Duration::from_secs(1)
        }),
        Just(Request::Delete),
        Just(Request::BoxExited {
            generation: 1,
            reason: "it fell over".to_owned()
        }),
    ]
}

fn states() -> impl Strategy<Value = State> {
    proptest::sample::select(&State::ALL[..])
}

fn lifetimes() -> impl Strategy<Value = Lifetime> {
    prop_oneof![Just(Lifetime::Persistent), Just(Lifetime::Ephemeral)]
}

proptest! {
    #[test]
    fn something_begins_only_at_rest_and_is_waited_for_only_under_way(
        state in states(), lifetime in lifetimes(), request in requests(),
    ) {
        match decide(state, lifetime, &request) {
            Decision::Begin(transition) => {
                prop_assert!(at_rest(state));
                prop_assert!(!at_rest(during(&transition)));
            }
            Decision::Join | Decision::Wait | Decision::Overrule => prop_assert!(!at_rest(state)),
            Decision::Refuse(_) => prop_assert_eq!(state, State::Deleting),
            Decision::Done => {}
        }
    }

    #[test]
    fn every_transition_ends_at_rest_or_in_nothing(
        state in states(), lifetime in lifetimes(), request in requests(),
        outcome in proptest::sample::select(vec![Outcome::Done, Outcome::Failed, Outcome::NotBegun]),
    ) {
        if let Decision::Begin(transition) = decide(state, lifetime, &request) {
            match after(&transition, state, outcome) {
                Next::Rest(next) => prop_assert!(at_rest(next)),
                Next::Gone => prop_assert_eq!(during(&transition), State::Deleting),
            }
        }
    }

    #[test]
    fn what_is_asked_for_is_what_success_leads_to(
        state in states(), lifetime in lifetimes(), request in requests(),
    ) {
        let reached = match decide(state, lifetime, &request) {
            Decision::Begin(transition) => after(&transition, state, Outcome::Done),
            Decision::Done => Next::Rest(state),
            Decision::Join | Decision::Wait | Decision::Overrule | Decision::Refuse(_) => return Ok(()),
        };
        match request {
            Request::Start | Request::EnsureRunning => prop_assert_eq!(reached, Next::Rest(State::Running)),
            Request::Stop { .. } if lifetime == Lifetime::Ephemeral && state != State::Stopped => {
                prop_assert_eq!(reached, Next::Gone);
            }
            Request::Stop { .. } => prop_assert_eq!(reached, Next::Rest(State::Stopped)),
            Request::Delete => prop_assert_eq!(reached, Next::Gone),
            Request::BoxExited { .. } => prop_assert_ne!(reached, Next::Rest(State::Running)),
        }
    }
}

#[test]
fn a_failed_agent_can_be_started_stopped_and_deleted() {
    for request in [
        Request::Start,
        Request::EnsureRunning,
        Request::Stop {
            grace: Duration::ZERO,
        },
        Request::Delete,
    ] {
        let decision = decide(State::Failed, Lifetime::Persistent, &request);
        assert!(
            matches!(decision, Decision::Begin(_)),
            "{request:?}: {decision:?}"
        );
    }
}
