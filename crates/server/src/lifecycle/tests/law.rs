//! The pure functions.

use std::time::Duration;

use dorm_engine::{Id, Isolation};
use proptest::prelude::*;
use tokio::time::Instant;

use crate::lifecycle::decide::{
    Decision, Next, Outcome, Refusal, Request, Rest, Situation, Transition, Work, after, decide, during,
    is_recorded_first,
};
use crate::records::{Lifetime, SnapshotKind, State};

fn requests() -> impl Strategy<Value = Request> {
    prop_oneof![
        Just(Request::Start),
        Just(Request::EnsureRunning),
        Just(Request::Stop {
            grace: Duration::from_secs(1)
        }),
        Just(Request::Pause),
        Just(Request::Idle {
            why: "nobody is here".to_owned(),
            since: Instant::now(),
        }),
        Just(Request::Hibernate {
            why: "it is late".to_owned()
        }),
        Just(Request::Retire {
            why: "memory is short".to_owned()
        }),
        Just(Request::MakeDurable),
        kinds().prop_map(|kind| Request::Snapshot {
            id: Id::random(),
            label: Some("before".to_owned()),
            kind
        }),
        kinds().prop_map(|kind| Request::RollBack {
            snapshot: Id::random(),
            kind,
            before: Id::random(),
        }),
        Just(Request::Convert {
            to: Isolation::Vm,
            grace: Duration::from_secs(1)
        }),
        Just(Request::Delete),
        proptest::bool::ANY.prop_map(|saved| Request::BoxExited {
            generation: 1,
            reason: "it fell over".to_owned(),
            saved,
        }),
    ]
}

fn kinds() -> impl Strategy<Value = SnapshotKind> {
    prop_oneof![Just(SnapshotKind::Files), Just(SnapshotKind::Full)]
}

fn rests() -> impl Strategy<Value = Rest> {
    proptest::sample::select(&Rest::ALL[..])
}

fn situations() -> impl Strategy<Value = Situation> {
    prop_oneof![
        rests().prop_map(Situation::At),
        proptest::sample::select(&Work::ALL[..]).prop_map(Situation::Busy),
    ]
}

fn lifetimes() -> impl Strategy<Value = Lifetime> {
    prop_oneof![Just(Lifetime::Persistent), Just(Lifetime::Ephemeral)]
}

proptest! {
    #[test]
    fn something_begins_only_at_rest_and_is_waited_for_only_under_way(
        situation in situations(), lifetime in lifetimes(), request in requests(),
    ) {
        let at_rest = matches!(situation, Situation::At(_));
        match decide(situation, lifetime, &request) {
            Decision::Begin(transition) => {
                prop_assert!(at_rest);
                let passing = Rest::of(during(&transition)).is_none();
                prop_assert!(passing || transition == Transition::MakeDurable);
            }
            Decision::Join | Decision::Wait | Decision::Overrule => prop_assert!(!at_rest),
            Decision::Hurry => prop_assert_eq!(situation, Situation::Busy(Work::MakeDurable)),
            Decision::Refuse(Refusal::BeingDeleted) => {
                prop_assert_eq!(situation, Situation::Busy(Work::Delete));
            }
            Decision::Refuse(Refusal::NothingRuns) => {
                let asleep = [Rest::Stopped, Rest::Failed].map(Situation::At);
                prop_assert!(asleep.contains(&situation));
            }
            Decision::Refuse(Refusal::Ephemeral) => {
                prop_assert!(at_rest && lifetime == Lifetime::Ephemeral);
            }
            Decision::Done => {}
        }
    }

    #[test]
    fn only_what_leaves_the_box_where_it_is_or_finds_it_ended_may_be_recorded_late(
        rest in rests(), lifetime in lifetimes(), request in requests(),
    ) {
        if let Decision::Begin(transition) = decide(Situation::At(rest), lifetime, &request)
            && !is_recorded_first(&transition)
        {
            let boxed = [Rest::Running, Rest::Standby];
            let Next::Rest(next) = after(&transition, rest, Outcome::Done) else {
                panic!("a deletion is recorded first")
            };
            let ended = matches!(request, Request::BoxExited { .. });
            prop_assert!(next == rest || boxed.contains(&rest) && (ended || boxed.contains(&next)));
        }
    }

    #[test]
    fn what_is_not_begun_changes_nothing(
        rest in rests(), lifetime in lifetimes(), request in requests(),
    ) {
        if let Decision::Begin(transition) = decide(Situation::At(rest), lifetime, &request) {
            prop_assert_eq!(after(&transition, rest, Outcome::NotBegun), Next::Rest(rest));
        }
    }

    #[test]
    fn what_is_asked_for_is_what_success_leads_to(
        rest in rests(), lifetime in lifetimes(), request in requests(),
    ) {
        let reached = match decide(Situation::At(rest), lifetime, &request) {
            Decision::Begin(transition) => after(&transition, rest, Outcome::Done),
            Decision::Done => Next::Rest(rest),
            Decision::Join
            | Decision::Wait
            | Decision::Hurry
            | Decision::Overrule
            | Decision::Refuse(_) => return Ok(()),
        };
        match request {
            Request::Start | Request::EnsureRunning => prop_assert_eq!(reached, Next::Rest(Rest::Running)),
            Request::Pause => {
                prop_assert!([Rest::Standby, Rest::Hibernated].map(Next::Rest).contains(&reached));
            }
            Request::Hibernate { .. } => prop_assert_eq!(reached, Next::Rest(Rest::Hibernated)),
            Request::Idle { .. } => prop_assert_ne!(reached, Next::Rest(Rest::Running)),
            Request::Retire { .. } => prop_assert_ne!(reached, Next::Rest(Rest::Standby)),
            Request::MakeDurable => prop_assert_eq!(reached, Next::Rest(rest)),
            Request::Snapshot { .. } => prop_assert_eq!(reached, Next::Rest(rest)),
            Request::RollBack { kind: SnapshotKind::Full, .. } => {
                prop_assert_eq!(reached, Next::Rest(Rest::Hibernated));
            }
            Request::RollBack { kind: SnapshotKind::Files, .. } => {
                prop_assert_eq!(reached, Next::Rest(Rest::Stopped));
            }
            Request::Stop { .. } if lifetime == Lifetime::Ephemeral && rest != Rest::Stopped => {
                prop_assert_eq!(reached, Next::Gone);
            }
            Request::Stop { .. } => prop_assert_eq!(reached, Next::Rest(Rest::Stopped)),
            Request::Convert { .. } => prop_assert_eq!(reached, Next::Rest(Rest::Stopped)),
            Request::Delete => prop_assert_eq!(reached, Next::Gone),
            Request::BoxExited { .. } => prop_assert_ne!(reached, Next::Rest(Rest::Running)),
        }
    }
}

#[test]
fn a_state_is_one_of_rest_or_one_that_is_passed_through() {
    for state in State::ALL {
        if let Some(rest) = Rest::of(state) {
            assert_eq!(rest.state(), state);
        }
    }
    assert_eq!(
        State::ALL.into_iter().filter_map(Rest::of).count(),
        Rest::ALL.len()
    );
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
        let decision = decide(Situation::At(Rest::Failed), Lifetime::Persistent, &request);
        assert!(
            matches!(decision, Decision::Begin(_)),
            "{request:?}: {decision:?}"
        );
    }
}
