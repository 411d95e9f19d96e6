//! What every store must do. A test module names its store once, with [`conformance!`].

use std::collections::BTreeMap;

use dorm_engine::network::Policy;
use dorm_engine::{BoxRecord, Id, Isolation, Limits};

pub(super) use super::conformance_sandboxes::*;
pub(super) use super::conformance_sleep::*;
use super::{Store, StoreError};
use crate::records::{
    AgentSpec, BoxChange, Built, Change, ImageChange, KeyRecord, Lifetime, NewAgentRecord, Reach, Sleep,
    Slots, State, Status, TemplateDefaults, TemplateRecord, VolumeRecord, Workspace, now,
};

pub(super) const SLOTS: Slots = Slots {
    max: 4,
    first_uid: 1_000_000,
};

/// A new agent that is recorded.
pub(super) async fn inserted(store: &dyn Store, name: &str) -> Id {
    let made = store.insert_agent(&new_agent(name), SLOTS).await;
    made.unwrap().profile.id
}

pub(super) fn new_agent(name: &str) -> NewAgentRecord {
    NewAgentRecord {
        id: Id::random(),
        workspace: Workspace::default(),
        name: name.to_owned(),
        template_id: Id::random(),
        template_name: "base".to_owned(),
        lifetime: Lifetime::Persistent,
        spec: AgentSpec {
            isolation: Isolation::default(),
            limits: Limits {
                cpu_millis: 1500,
                memory: 1 << 30,
                pids: 512,
                disk: 1 << 34,
                io_bps: Some(7),
            },
            env: BTreeMap::from([("KEY".to_owned(), "välue".to_owned())]),
            sleep: Sleep {
                hibernate_after: Some(60_000),
                ..Sleep::default()
            },
            network: Default::default(),
            volumes: Vec::new(),
        },
        defaults: TemplateDefaults {
            user: Some("user".to_owned()),
            ..TemplateDefaults::default()
        },
        status: Status::now(State::Stopped, "created"),
        uid_base: None,
        image: None,
        reach: Reach::default(),
        sandbox: None,
    }
}

fn template(name: &str) -> TemplateRecord {
    TemplateRecord {
        id: Id::random(),
        workspace: Workspace::default(),
        name: name.to_owned(),
        recipe_hash: Some("abc".to_owned()),
        built: Built {
            build: Some("build".to_owned()),
            ..Built::default()
        },
        defaults: TemplateDefaults {
            workdir: Some("/srv".to_owned()),
            ..TemplateDefaults::default()
        },
        size: 123,
        created: now(),
    }
}

fn key(name: &str, hash: u8) -> KeyRecord {
    KeyRecord {
        id: Id::random(),
        workspace: Workspace::default(),
        name: name.to_owned(),
        prefix: "e2b_00000000".to_owned(),
        hash: [hash; 32],
        created: now(),
        last_used: None,
    }
}

fn box_record() -> BoxRecord {
    BoxRecord {
        pid: 42,
        pid_start: 7,
        host_boot_id: "boot".to_owned(),
        guest_hash: "hash".to_owned(),
        engine: "container".to_owned(),
    }
}

pub(super) async fn an_agent_is_read_back_as_it_was_written(store: &dyn Store) {
    let new = new_agent("one");
    let written = store.insert_agent(&new, SLOTS).await.unwrap();
    assert_eq!(written.profile.spec, new.spec);
    assert_eq!(written.profile.uid_base, 1_000_000);
    assert_eq!(store.agents().await.unwrap().readable, [written]);
}

pub(super) async fn a_name_is_taken_once_and_free_again_after_deletion(store: &dyn Store) {
    let first = new_agent("same");
    store.insert_agent(&first, SLOTS).await.unwrap();
    let refused = store.insert_agent(&new_agent("same"), SLOTS).await.unwrap_err();
    assert!(matches!(refused, StoreError::AlreadyExists { .. }), "{refused:?}");
    store.delete_agent(&first.id).await.unwrap();
    store.insert_agent(&new_agent("same"), SLOTS).await.unwrap();
}

pub(super) async fn the_lowest_free_slot_is_given_and_there_is_an_end_to_them(store: &dyn Store) {
    let mut ids = Vec::new();
    for slot in 0..SLOTS.max {
        let agent = store
            .insert_agent(&new_agent(&format!("a{slot}")), SLOTS)
            .await
            .unwrap();
        assert_eq!(agent.profile.slot, slot);
        ids.push(agent.profile.id);
    }
    let refused = store.insert_agent(&new_agent("late"), SLOTS).await.unwrap_err();
    assert!(matches!(refused, StoreError::NoSlot { max: 4 }), "{refused:?}");
    for given_back in [2, 0] {
        store.delete_agent(&ids[given_back]).await.unwrap();
    }
    assert_eq!(
        store
            .insert_agent(&new_agent("b"), SLOTS)
            .await
            .unwrap()
            .profile
            .slot,
        0
    );
    assert_eq!(
        store
            .insert_agent(&new_agent("c"), SLOTS)
            .await
            .unwrap()
            .profile
            .slot,
        2
    );
}

pub(super) async fn a_change_of_state_comes_with_its_event_and_its_box(store: &dyn Store) {
    let id = inserted(store, "one").await;
    let record = box_record();
    let steps = [
        (State::Stopped, State::Starting, BoxChange::Keep, None),
        (
            State::Starting,
            State::Running,
            BoxChange::Set(&record),
            Some(&record),
        ),
        (State::Running, State::Stopping, BoxChange::Keep, Some(&record)),
        (State::Stopping, State::Stopped, BoxChange::Clear, None),
    ];
    for (from, to, box_record, expected) in steps {
        let status = Status::now(to, format!("now {to}"));
        let change = Change {
            agent: &id,
            from,
            to: &status,
            at: status.since,
            millis: Some(5),
            box_record,
            image: ImageChange::Keep,
        };
        store.change_state(&change).await.unwrap();
        let agent = store.agents().await.unwrap().readable.remove(0);
        assert_eq!(agent.status, status);
        assert_eq!(agent.box_record.as_ref(), expected);
    }
    let events = store.events(&id, 100).await.unwrap();
    let states: Vec<_> = events.iter().map(|event| event.to).collect();
    assert_eq!(
        states,
        [
            State::Stopped,
            State::Stopping,
            State::Running,
            State::Starting,
            State::Stopped
        ]
    );
    assert_eq!(events[0].from, Some(State::Stopping));
    assert_eq!(events[0].millis, Some(5));
    assert_eq!(events[4].from, None);
    assert!(events.windows(2).all(|pair| pair[0].seq > pair[1].seq));
    assert_eq!(store.events(&id, 2).await.unwrap(), events[..2]);
}

pub(super) async fn an_event_has_the_time_at_which_it_came_about(store: &dyn Store) {
    let id = inserted(store, "one").await;
    let status = |reason: &str| Status {
        since: 5,
        ..Status::now(State::Standby, reason)
    };
    for (from, to, at) in [
        (State::Running, status("idle"), 5),
        (State::Standby, status("not saved"), 7),
    ] {
        let change = Change {
            agent: &id,
            from,
            to: &to,
            at,
            millis: None,
            box_record: BoxChange::Keep,
            image: ImageChange::Keep,
        };
        store.change_state(&change).await.unwrap();
    }
    let agent = store.agents().await.unwrap().readable.remove(0);
    assert_eq!(agent.status, status("not saved"));
    let events = store.events(&id, 2).await.unwrap();
    let times: Vec<_> = events.iter().map(|event| event.time).collect();
    assert_eq!(times, [7, 5]);
}

pub(super) async fn a_change_of_an_agent_that_is_not_there_is_refused(store: &dyn Store) {
    let id = Id::random();
    let status = Status::now(State::Running, "");
    let box_record = BoxChange::Keep;
    let change = Change {
        agent: &id,
        from: State::Stopped,
        to: &status,
        at: status.since,
        millis: None,
        box_record,
        image: ImageChange::Keep,
    };
    assert!(matches!(
        store.change_state(&change).await,
        Err(StoreError::NotFound { .. })
    ));
    assert!(store.events(&id, 1).await.unwrap().is_empty());
}

pub(super) async fn events_go_with_their_agent_and_their_numbers_are_not_given_again(store: &dyn Store) {
    let id = inserted(store, "one").await;
    let events = store.events(&id, 10).await.unwrap();
    assert_eq!(events.len(), 1);
    store.delete_agent(&id).await.unwrap();
    assert!(store.events(&id, 10).await.unwrap().is_empty());
    store.delete_agent(&id).await.unwrap();
    let other = inserted(store, "one").await;
    assert!(store.events(&other, 1).await.unwrap()[0].seq > events[0].seq);
}

pub(super) async fn agents_made_at_once_get_different_slots(store: &dyn Store) {
    let news = ["a", "b", "c", "d"].map(new_agent);
    let made = futures_util::future::join_all(news.iter().map(|new| store.insert_agent(new, SLOTS))).await;
    let mut slots: Vec<_> = made
        .into_iter()
        .map(|agent| agent.unwrap().profile.slot)
        .collect();
    slots.sort_unstable();
    assert_eq!(slots, [0, 1, 2, 3]);
}

pub(super) async fn a_rebuilt_template_replaces_the_one_of_its_name(store: &dyn Store) {
    let workspace = Workspace::default();
    let (old, new) = (template("base"), template("base"));
    assert_eq!(store.insert_template(&old).await.unwrap(), None);
    assert_eq!(store.insert_template(&new).await.unwrap(), Some(old.id.clone()));
    assert_eq!(
        store.list_templates(&workspace).await.unwrap(),
        std::slice::from_ref(&new)
    );
    assert_eq!(
        store.template_by_name_or_id(&workspace, "base").await.unwrap(),
        new
    );
    assert_eq!(
        store
            .template_by_name_or_id(&workspace, new.id.as_str())
            .await
            .unwrap(),
        new
    );
    let gone = store
        .template_by_name_or_id(&workspace, old.id.as_str())
        .await
        .unwrap_err();
    assert!(
        matches!(gone, StoreError::NotFound { kind: "template", .. }),
        "{gone:?}"
    );
}

pub(super) async fn templates_are_listed_by_name_and_deleted_once(store: &dyn Store) {
    let workspace = Workspace::default();
    let (b, a) = (template("b"), template("a"));
    store.insert_template(&b).await.unwrap();
    store.insert_template(&a).await.unwrap();
    assert_eq!(
        store.list_templates(&workspace).await.unwrap(),
        [a.clone(), b.clone()]
    );
    let mut ids = store.template_ids().await.unwrap();
    ids.sort();
    let mut expected = [a.id.clone(), b.id.clone()];
    expected.sort();
    assert_eq!(ids, expected);
    store.delete_template(&workspace, &a.id).await.unwrap();
    assert!(matches!(
        store.delete_template(&workspace, &a.id).await,
        Err(StoreError::NotFound { .. })
    ));
    assert_eq!(store.list_templates(&workspace).await.unwrap(), [b]);
}

pub(super) async fn agents_are_counted_by_their_template(store: &dyn Store) {
    let mut one = new_agent("one");
    let template = Id::random();
    one.template_id = template.clone();
    store.insert_agent(&one, SLOTS).await.unwrap();
    store.insert_agent(&new_agent("two"), SLOTS).await.unwrap();
    assert_eq!(store.agents_of_template(&template).await.unwrap(), 1);
    assert_eq!(store.agents_of_template(&Id::random()).await.unwrap(), 0);
}

pub(super) async fn nothing_of_another_workspace_is_seen(store: &dyn Store) {
    let other = Workspace::new("other");
    let (template, key) = (template("base"), key("k", 1));
    store.insert_template(&template).await.unwrap();
    store.insert_key(&key).await.unwrap();
    assert!(store.list_templates(&other).await.unwrap().is_empty());
    assert!(store.list_keys(&other).await.unwrap().is_empty());
    for error in [
        store.template_by_name_or_id(&other, "base").await.unwrap_err(),
        store.delete_template(&other, &template.id).await.unwrap_err(),
        store.delete_key(&other, &key.id).await.unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::NotFound { .. }), "{error:?}");
    }
}

pub(super) async fn keys_are_found_by_prefix_and_remember_their_last_use(store: &dyn Store) {
    let workspace = Workspace::default();
    let (first, second) = (key("first", 1), key("second", 2));
    store.insert_key(&first).await.unwrap();
    store.insert_key(&second).await.unwrap();
    assert_eq!(store.keys_by_prefix(&first.prefix).await.unwrap().len(), 2);
    assert!(store.keys_by_prefix("e2b_ffffffff").await.unwrap().is_empty());
    store
        .touch_keys(&[(first.id.clone(), 99), (second.id.clone(), 5)])
        .await
        .unwrap();
    store.touch_keys(&[(first.id.clone(), 50)]).await.unwrap();
    let used: Vec<_> = store
        .list_keys(&workspace)
        .await
        .unwrap()
        .iter()
        .map(|key| key.last_used)
        .collect();
    assert_eq!(used, [Some(99), Some(5)]);
    store.delete_key(&workspace, &first.id).await.unwrap();
    assert!(matches!(
        store.delete_key(&workspace, &first.id).await,
        Err(StoreError::NotFound { .. })
    ));
    assert_eq!(store.list_keys(&workspace).await.unwrap().len(), 1);
}

pub(super) async fn a_network_policy_is_replaced(store: &dyn Store) {
    let agent = store
        .insert_agent(&new_agent("one"), SLOTS)
        .await
        .unwrap()
        .profile;
    assert_eq!(agent.spec.network, Policy::default());
    let policy = Policy {
        internet: false,
        allow: vec![
            "*.example.org".parse().unwrap(),
            "198.51.100.0/24".parse().unwrap(),
        ],
        deny: vec!["203.0.113.1".parse().unwrap()],
    };
    store.set_network(&agent.id, &policy).await.unwrap();
    let found = store.agents().await.unwrap().readable.remove(0).profile;
    let expected = AgentSpec {
        network: policy.clone(),
        ..agent.spec
    };
    assert_eq!(found.spec, expected, "and nothing else of it changes");
    let missing = store.set_network(&Id::random(), &policy).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
}

pub(super) async fn an_isolation_is_changed_alone(store: &dyn Store) {
    let agent = store
        .insert_agent(&new_agent("one"), SLOTS)
        .await
        .unwrap()
        .profile;
    for isolation in [Isolation::Vm, Isolation::Container] {
        store.set_isolation(&agent.id, isolation).await.unwrap();
        let found = store.agents().await.unwrap().readable.remove(0).profile;
        let expected = AgentSpec {
            isolation,
            ..agent.spec.clone()
        };
        assert_eq!(found.spec, expected, "and nothing else of it changes");
    }
    let missing = store.set_isolation(&Id::random(), Isolation::Vm).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
}

pub(super) async fn times_to_sleep_are_changed_alone(store: &dyn Store) {
    let agent = store
        .insert_agent(&new_agent("one"), SLOTS)
        .await
        .unwrap()
        .profile;
    let own = Sleep {
        standby_after: Some(30_000),
        durable_after: None,
        hibernate_after: Some(0),
        keep_awake: true,
    };
    for sleep in [own, Sleep::default()] {
        store.set_sleep(&agent.id, &sleep).await.unwrap();
        let found = store.agents().await.unwrap().readable.remove(0).profile;
        let expected = AgentSpec {
            sleep,
            ..agent.spec.clone()
        };
        assert_eq!(found.spec, expected, "and nothing else of it changes");
    }
    let missing = store.set_sleep(&Id::random(), &own).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
}

pub(super) async fn volumes_have_names_of_their_own_and_are_deleted_once(store: &dyn Store) {
    let volume = |workspace: &str, name: &str| VolumeRecord {
        id: Id::random(),
        workspace: Workspace::new(workspace),
        name: name.to_owned(),
        created: 7,
    };
    let (b, a, other) = (
        volume("default", "b"),
        volume("default", "a"),
        volume("other", "a"),
    );
    for one in [&b, &a, &other] {
        store.insert_volume(one).await.unwrap();
    }
    let again = store.insert_volume(&volume("default", "a")).await;
    assert!(matches!(again, Err(StoreError::AlreadyExists { .. })));
    let names: Vec<String> = store
        .volumes()
        .await
        .unwrap()
        .into_iter()
        .map(|v| v.name)
        .collect();
    assert_eq!(names, ["a", "a", "b"]);
    let elsewhere = store.delete_volume(&Workspace::new("other"), &a.id).await;
    assert!(matches!(elsewhere, Err(StoreError::NotFound { .. })));
    store.delete_volume(&Workspace::default(), &a.id).await.unwrap();
    assert!(store.delete_volume(&Workspace::default(), &a.id).await.is_err());
    assert_eq!(store.volumes().await.unwrap(), [other, b]);
}

pub(super) async fn a_store_is_new_until_something_is_put_into_it(store: &dyn Store) {
    assert!(store.is_new().await.unwrap());
    store.insert_key(&key("k", 1)).await.unwrap();
    assert!(!store.is_new().await.unwrap());
}

/// Runs the whole suite; `$open` gives a new, empty store and whatever must live as long as it.
macro_rules! conformance {
    ($open:path) => {
        conformance!(@ $open:
            an_agent_is_read_back_as_it_was_written
            a_name_is_taken_once_and_free_again_after_deletion
            the_lowest_free_slot_is_given_and_there_is_an_end_to_them
            host_uids_of_a_fork_or_a_kept_snapshot_are_given_to_nobody_else
            nobody_shares_a_host_uid_whatever_the_first_one_was_before
            host_uids_below_a_first_uid_that_was_raised_stand_in_nobodys_way
            a_change_of_state_comes_with_its_event_and_its_box
            a_memory_image_is_kept_goes_stale_and_is_cleared_with_the_state
            a_network_policy_is_replaced
            an_isolation_is_changed_alone
            times_to_sleep_are_changed_alone
            a_change_of_an_agent_that_is_not_there_is_refused
            an_event_has_the_time_at_which_it_came_about
            events_go_with_their_agent_and_their_numbers_are_not_given_again
            events_are_followed_of_one_agent_or_of_a_workspace
            snapshots_are_kept_in_order_and_the_agent_is_at_the_last
            holds_are_listed_and_go_with_their_agent
            reach_is_kept_and_changes
            a_secret_of_the_server_is_made_once
            a_sandbox_comes_changes_and_goes_with_its_agent
            a_kept_snapshot_outlives_its_agent
            a_secret_is_kept_changed_and_deleted_in_its_workspace
            a_build_is_recorded_changed_and_forgotten
            agents_made_at_once_get_different_slots
            a_rebuilt_template_replaces_the_one_of_its_name
            templates_are_listed_by_name_and_deleted_once
            agents_are_counted_by_their_template
            nothing_of_another_workspace_is_seen
            volumes_have_names_of_their_own_and_are_deleted_once
            keys_are_found_by_prefix_and_remember_their_last_use
            a_store_is_new_until_something_is_put_into_it
        );
    };
    (@ $open:path: $($name:ident)*) => {
        $(#[tokio::test]
        async fn $name() {
            let (store, _keep) = $open().await;
            crate::store::conformance::$name(&store).await;
        })*
    };
}
pub(super) use conformance;
