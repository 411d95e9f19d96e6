//! What every store must do for agents that were made through the E2B API, and for snapshots that outlive theirs.

use std::collections::BTreeMap;

use dorm_engine::network::Policy;
use dorm_engine::{Id, Isolation};

use super::conformance::{SLOTS, new_agent};
use super::{Store, StoreError};
use crate::records::{
    BuildRecord, BuildStatus, NewAgentRecord, OnTimeout, Origin, PauseMode, Profile, Reach, SandboxRecord,
    SecretRecord, Slots, SnapshotKind, SnapshotRecord, TemplateLimits, VolumeMount, Workspace,
};

fn sandbox() -> SandboxRecord {
    SandboxRecord {
        template: "base".to_owned(),
        alias: Some("alias".to_owned()),
        metadata: BTreeMap::from([("k".to_owned(), "ü=&".to_owned())]),
        started: 1,
        end: Some(2),
        timeout: 300_000,
        on_timeout: OnTimeout::Pause(PauseMode::Files),
        auto_resume: true,
        paused: None,
        network: Some(serde_json::json!({"allowOut": ["1.2.3.4"]})),
        allow_internet: Some(false),
        volumes: vec![VolumeMount {
            name: "v".to_owned(),
            path: "/mnt/v".to_owned(),
        }],
        idempotency: Some("key".to_owned()),
    }
}

pub(super) async fn a_sandbox_comes_changes_and_goes_with_its_agent(store: &dyn Store) {
    store.insert_agent(&new_agent("plain"), SLOTS).await.unwrap();
    assert!(store.sandboxes().await.unwrap().is_empty());
    let new = NewAgentRecord {
        sandbox: Some(sandbox()),
        ..new_agent("one")
    };
    let id = store.insert_agent(&new, SLOTS).await.unwrap().profile.id;
    assert_eq!(store.sandboxes().await.unwrap(), [(id.clone(), sandbox())]);
    let paused = SandboxRecord {
        end: None,
        paused: Some(PauseMode::Full),
        ..sandbox()
    };
    store.set_sandbox(&id, &paused).await.unwrap();
    assert_eq!(store.sandboxes().await.unwrap(), [(id.clone(), paused.clone())]);
    let missing = store.set_sandbox(&Id::random(), &paused).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
    store.delete_agent(&id).await.unwrap();
    assert!(store.sandboxes().await.unwrap().is_empty());
}

pub(super) async fn a_kept_snapshot_outlives_its_agent(store: &dyn Store) {
    let profile = store
        .insert_agent(&new_agent("one"), SLOTS)
        .await
        .unwrap()
        .profile;
    let snapshot = |kept: bool| SnapshotRecord {
        id: Id::random(),
        agent: profile.id.clone(),
        made: 1,
        label: "name".to_owned(),
        kind: SnapshotKind::Full,
        parent: None,
        isolation: Isolation::default(),
        size: 9,
        origin: kept.then(|| Origin::of(&profile, &Reach::default(), &Policy::default())),
    };
    let (passing, kept, later) = (snapshot(false), snapshot(true), snapshot(false));
    for snapshot in [&passing, &kept, &later] {
        store.insert_snapshot(snapshot).await.unwrap();
    }
    store
        .keep_snapshot(
            &later.id,
            &Origin::of(&profile, &Reach::default(), &Policy::default()),
        )
        .await
        .unwrap();
    let missing = store
        .keep_snapshot(
            &Id::random(),
            &Origin::of(&profile, &Reach::default(), &Policy::default()),
        )
        .await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
    store.delete_agent(&profile.id).await.unwrap();
    let later = SnapshotRecord {
        origin: kept.origin.clone(),
        parent: Some(kept.id.clone()),
        ..later
    };
    let kept = SnapshotRecord {
        parent: Some(passing.id),
        ..kept
    };
    assert_eq!(store.snapshots().await.unwrap(), [kept.clone(), later]);
    assert_eq!(store.snapshots_of(&profile.id).await.unwrap().len(), 2);
    store.delete_snapshot(&kept.id).await.unwrap();
    assert_eq!(store.snapshots().await.unwrap().len(), 1);
}

fn kept_snapshot(agent: &Profile) -> SnapshotRecord {
    SnapshotRecord {
        id: Id::random(),
        agent: agent.id.clone(),
        made: 1,
        label: String::new(),
        kind: SnapshotKind::Full,
        parent: None,
        isolation: Isolation::default(),
        size: 9,
        origin: Some(Origin::of(agent, &Reach::default(), &Policy::default())),
    }
}

pub(super) async fn host_uids_of_a_fork_or_a_kept_snapshot_are_given_to_nobody_else(store: &dyn Store) {
    let insert = async |new: NewAgentRecord| store.insert_agent(&new, SLOTS).await.unwrap().profile;
    let source = insert(new_agent("source")).await;
    let fork = NewAgentRecord {
        uid_base: Some(source.uid_base),
        ..new_agent("fork")
    };
    assert_eq!(insert(fork).await.slot, 1);
    store.delete_agent(&source.id).await.unwrap();
    let third = insert(new_agent("third")).await;
    assert_eq!(third.slot, 2, "slot 0 has the fork's host uids");
    let snapshot = kept_snapshot(&third);
    store.insert_snapshot(&snapshot).await.unwrap();
    store.delete_agent(&third.id).await.unwrap();
    assert_eq!(
        insert(new_agent("fourth")).await.slot,
        3,
        "slot 2 has those of the snapshot"
    );
    store.delete_snapshot(&snapshot.id).await.unwrap();
    assert_eq!(insert(new_agent("fifth")).await.slot, 2);
}

pub(super) async fn nobody_shares_a_host_uid_whatever_the_first_one_was_before(store: &dyn Store) {
    let from = |first_uid| Slots { first_uid, ..SLOTS };
    let old = store
        .insert_agent(&new_agent("old"), SLOTS)
        .await
        .unwrap()
        .profile;
    let below = store
        .insert_agent(&new_agent("below"), from(SLOTS.first_uid - 1))
        .await;
    assert_eq!(
        below.unwrap().profile.uid_base,
        SLOTS.first_uid - 1 + 2 * Slots::UIDS
    );
    store.insert_snapshot(&kept_snapshot(&old)).await.unwrap();
    store.delete_agent(&old.id).await.unwrap();
    let above = store
        .insert_agent(&new_agent("above"), from(SLOTS.first_uid + 1))
        .await;
    assert_eq!(
        above.unwrap().profile.uid_base,
        SLOTS.first_uid + 1 + 3 * Slots::UIDS
    );
}

pub(super) async fn host_uids_below_a_first_uid_that_was_raised_stand_in_nobodys_way(store: &dyn Store) {
    let raised = Slots {
        first_uid: SLOTS.first_uid + 3 * Slots::UIDS,
        ..SLOTS
    };
    let old = store
        .insert_agent(&new_agent("old"), SLOTS)
        .await
        .unwrap()
        .profile;
    let beside = store.insert_agent(&new_agent("beside"), raised).await;
    assert_eq!(
        beside.unwrap().profile.uid_base,
        raised.uid_base(1),
        "slot 0 is the old one's"
    );
    store.insert_snapshot(&kept_snapshot(&old)).await.unwrap();
    store.delete_agent(&old.id).await.unwrap();
    let later = store.insert_agent(&new_agent("later"), raised).await;
    assert_eq!(later.unwrap().profile.uid_base, raised.uid_base(0));
}

pub(super) async fn a_secret_is_kept_changed_and_deleted_in_its_workspace(store: &dyn Store) {
    let workspace = Workspace::default();
    let secret = SecretRecord {
        id: Id::random(),
        workspace: workspace.clone(),
        name: "token".to_owned(),
        value: "hush".to_owned(),
        version: 1,
        metadata: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
        created: 1,
        updated: 1,
    };
    assert!(!format!("{secret:?}").contains("hush"));
    store.insert_secret(&secret).await.unwrap();
    let twin = SecretRecord {
        id: Id::random(),
        ..secret.clone()
    };
    let taken = store.insert_secret(&twin).await;
    assert!(
        matches!(taken, Err(StoreError::AlreadyExists { .. })),
        "{taken:?}"
    );
    let changed = SecretRecord {
        value: "other".to_owned(),
        version: 2,
        updated: 5,
        ..secret.clone()
    };
    store.update_secret(&changed).await.unwrap();
    assert_eq!(store.secrets(&workspace).await.unwrap(), [changed]);
    let other = Workspace::new("other");
    assert!(store.secrets(&other).await.unwrap().is_empty());
    for (workspace, id) in [(&other, &secret.id), (&workspace, &twin.id)] {
        let missing = store.delete_secret(workspace, id).await;
        assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
    }
    store.delete_secret(&workspace, &secret.id).await.unwrap();
    assert!(store.secrets(&workspace).await.unwrap().is_empty());
}

pub(super) async fn a_build_is_recorded_changed_and_forgotten(store: &dyn Store) {
    let build = |id: &str| BuildRecord {
        id: id.to_owned(),
        workspace: Workspace::default(),
        name: "web".to_owned(),
        tags: vec!["default".to_owned()],
        limits: TemplateLimits {
            memory: Some(1 << 30),
            ..TemplateLimits::default()
        },
        status: BuildStatus::Building,
        step: None,
    };
    let (b, a) = (build("b"), build("a"));
    store.save_build(&b).await.unwrap();
    store.save_build(&a).await.unwrap();
    let failed = BuildRecord {
        status: BuildStatus::Failed("why".to_owned()),
        step: Some("2".to_owned()),
        ..b
    };
    store.save_build(&failed).await.unwrap();
    assert_eq!(store.builds().await.unwrap(), [failed, a.clone()]);
    store.delete_build("b").await.unwrap();
    store.delete_build("b").await.unwrap();
    assert_eq!(store.builds().await.unwrap(), [a]);
}
