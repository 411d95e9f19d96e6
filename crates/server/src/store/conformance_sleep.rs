//! What every store must do for agents that sleep, are held, followed and snapshotted.

use dorm_engine::{Id, Isolation};

use super::conformance::{SLOTS, inserted, new_agent};
use super::{Store, StoreError};
use crate::records::{
    BoxChange, Change, EventRecord, HoldRecord, ImageChange, ImageRecord, NewAgentRecord, Note, Reach,
    SnapshotKind, SnapshotRecord, State, Status, Workspace,
};

pub(super) async fn a_memory_image_is_kept_goes_stale_and_is_cleared_with_the_state(store: &dyn Store) {
    let id = inserted(store, "one").await;
    let image = ImageRecord {
        id: Id::random(),
        generation: 9,
        size: 10,
        made: 11,
        current: true,
        foreign: true,
        cpu_usec: Some(7),
    };
    let status = Status::now(State::Standby, "");
    let stale = ImageRecord {
        current: false,
        ..image.clone()
    };
    for (change, expected) in [
        (ImageChange::Keep, Some(&image)),
        (ImageChange::Stale, Some(&stale)),
        (ImageChange::Clear, None),
    ] {
        store.set_image(&id, Some(&image)).await.unwrap();
        let change = Change {
            agent: &id,
            from: State::Running,
            to: &status,
            at: status.since,
            millis: None,
            box_record: BoxChange::Keep,
            image: change,
        };
        store.change_state(&change).await.unwrap();
        let agent = store.agents().await.unwrap().readable.remove(0);
        assert_eq!(agent.image.as_ref(), expected);
    }
    let change = Change {
        agent: &id,
        from: State::Standby,
        to: &status,
        at: status.since,
        millis: None,
        box_record: BoxChange::Keep,
        image: ImageChange::Stale,
    };
    store.change_state(&change).await.unwrap();
    assert_eq!(store.agents().await.unwrap().readable[0].image, None);
    let missing = store.set_image(&Id::random(), Some(&image)).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
}

pub(super) async fn events_are_followed_of_one_agent_or_of_a_workspace(store: &dyn Store) {
    let mut ids = Vec::new();
    for name in ["one", "two", "three"] {
        ids.push(
            store
                .insert_agent(&new_agent(name), SLOTS)
                .await
                .unwrap()
                .profile
                .id,
        );
    }
    let workspace = Workspace::default();
    let of = |events: Vec<EventRecord>| -> Vec<Id> { events.into_iter().map(|event| event.agent).collect() };
    let all = store.events_after(&workspace, None, 0, 100).await.unwrap();
    let second = all[1].seq;
    assert_eq!(of(all), ids);
    assert_eq!(
        of(store.events_after(&workspace, None, second, 100).await.unwrap()),
        ids[2..]
    );
    assert_eq!(
        of(store.events_after(&workspace, None, 0, 1).await.unwrap()),
        ids[..1]
    );
    let one = store
        .events_after(&workspace, Some(&ids[1]), 0, 100)
        .await
        .unwrap();
    assert_eq!(of(one), ids[1..2]);
    ids.reverse();
    assert_eq!(of(store.newest_events(&workspace, 2).await.unwrap()), ids[..2]);
    let other = Workspace::new("other");
    assert!(store.events_after(&other, None, 0, 100).await.unwrap().is_empty());
    assert!(store.newest_events(&other, 100).await.unwrap().is_empty());
}

pub(super) async fn snapshots_are_kept_in_order_and_the_agent_is_at_the_last(store: &dyn Store) {
    let image = ImageRecord {
        id: Id::random(),
        generation: 1,
        size: 2,
        made: 3,
        current: true,
        foreign: true,
        cpu_usec: Some(7),
    };
    let new = NewAgentRecord {
        uid_base: Some(77),
        image: Some(image.clone()),
        ..new_agent("one")
    };
    let agent = store.insert_agent(&new, SLOTS).await.unwrap();
    assert_eq!((agent.profile.uid_base, agent.image.as_ref()), (77, Some(&image)));
    assert_eq!(
        store.agents().await.unwrap().readable,
        std::slice::from_ref(&agent)
    );
    let id = &agent.profile.id;
    let mut snapshots = Vec::new();
    for (made, kind) in [
        (1, SnapshotKind::Files),
        (2, SnapshotKind::Full),
        (3, SnapshotKind::Full),
        (4, SnapshotKind::Files),
    ] {
        let snapshot = SnapshotRecord {
            id: Id::random(),
            agent: id.clone(),
            made,
            label: "before".to_owned(),
            kind,
            parent: snapshots.last().map(|last: &SnapshotRecord| last.id.clone()),
            isolation: Isolation::default(),
            size: 9,
            origin: None,
        };
        store.insert_snapshot(&snapshot).await.unwrap();
        assert_eq!(
            store.agents().await.unwrap().readable[0].snapshot.as_ref(),
            Some(&snapshot.id)
        );
        snapshots.push(snapshot);
    }
    assert_eq!(store.snapshots().await.unwrap(), snapshots);
    assert_eq!(store.snapshots_of(id).await.unwrap(), snapshots);
    assert!(store.snapshots_of(&Id::random()).await.unwrap().is_empty());
    let setback = Note {
        time: 7,
        what: "its memory is lost".to_owned(),
    };
    store.set_setback(id, &setback).await.unwrap();
    assert_eq!(store.agents().await.unwrap().readable[0].setback, Some(setback));
    for goes_on in [true, false] {
        store.set_goes_on(id, goes_on).await.unwrap();
        assert_eq!(store.agents().await.unwrap().readable[0].goes_on, goes_on);
    }
    assert!(store.set_goes_on(&Id::random(), true).await.is_err());
    for image in [None, Some(&image)] {
        store.move_to_snapshot(id, &snapshots[0].id, image).await.unwrap();
        let moved = store.agents().await.unwrap().readable.remove(0);
        assert_eq!(moved.snapshot.as_ref(), Some(&snapshots[0].id));
        assert_eq!(moved.image.as_ref(), image);
    }
    let at = async || store.agents().await.unwrap().readable[0].snapshot.clone();
    let parents = async || -> Vec<Option<Id>> {
        let all = store.snapshots().await.unwrap();
        all.into_iter().map(|snapshot| snapshot.parent).collect()
    };
    let [first, second, third, fourth] = [0, 1, 2, 3].map(|n: usize| snapshots[n].id.clone());
    store.move_to_snapshot(id, &third, None).await.unwrap();
    store.delete_snapshot(&third).await.unwrap();
    assert_eq!(parents().await, [None, Some(first.clone()), Some(second.clone())]);
    assert_eq!(at().await, Some(second.clone()));
    store.delete_snapshot(&first).await.unwrap();
    store.delete_snapshot(&first).await.unwrap();
    assert_eq!(parents().await, [None, Some(second.clone())]);
    store.delete_snapshot(&second).await.unwrap();
    assert_eq!((parents().await, at().await), (vec![None], None));
    assert_eq!(store.snapshots().await.unwrap()[0].id, fourth);
    // Whoever still takes it for the one before cannot bring it back.
    store.move_to_snapshot(id, &second, None).await.unwrap();
    assert_eq!(at().await, None);
    let late = SnapshotRecord {
        id: Id::random(),
        parent: Some(second),
        ..snapshots[3].clone()
    };
    store.insert_snapshot(&late).await.unwrap();
    assert_eq!((parents().await, at().await), (vec![None, None], Some(late.id)));
    store.delete_agent(id).await.unwrap();
    assert!(store.snapshots().await.unwrap().is_empty());
}

pub(super) async fn holds_are_listed_and_go_with_their_agent(store: &dyn Store) {
    let mut holds = Vec::new();
    for (made, name) in (1..).zip(["one", "two"]) {
        let agent = store.insert_agent(&new_agent(name), SLOTS).await.unwrap();
        let hold = HoldRecord {
            id: Id::random(),
            agent: agent.profile.id,
            reason: "because".to_owned(),
            made,
            until: 99,
        };
        store.insert_hold(&hold).await.unwrap();
        holds.push(hold);
    }
    assert_eq!(store.holds().await.unwrap(), holds);
    store.delete_hold(&holds[0].id).await.unwrap();
    store.delete_hold(&holds[0].id).await.unwrap();
    assert_eq!(store.holds().await.unwrap(), holds[1..]);
    store.delete_agent(&holds[1].agent).await.unwrap();
    assert!(store.holds().await.unwrap().is_empty());
}

pub(super) async fn reach_is_kept_and_changes(store: &dyn Store) {
    let public = Reach {
        public: true,
        ..Reach::default()
    };
    let new = NewAgentRecord {
        reach: public.clone(),
        ..new_agent("one")
    };
    let agent = store.insert_agent(&new, SLOTS).await.unwrap();
    assert_eq!(agent.reach, public);
    let changed = Reach {
        public: false,
        host: Some("localhost:${PORT}".to_owned()),
    };
    store.set_reach(&agent.profile.id, &changed).await.unwrap();
    assert_eq!(store.agents().await.unwrap().readable[0].reach, changed);
    let missing = store.set_reach(&Id::random(), &changed).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
}

pub(super) async fn a_secret_of_the_server_is_made_once(store: &dyn Store) {
    assert_eq!(store.server_secret("one", [1; 32]).await.unwrap(), [1; 32]);
    assert_eq!(store.server_secret("one", [2; 32]).await.unwrap(), [1; 32]);
    assert_eq!(store.server_secret("two", [2; 32]).await.unwrap(), [2; 32]);
}
