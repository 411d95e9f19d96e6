use std::time::Duration;

use dorm_engine::{Id, Isolation};
use sqlx::Executor as _;
use tempfile::TempDir;

use super::SqliteStore;
use crate::records::{
    BoxChange, Change, ImageChange, ImageRecord, SnapshotKind, SnapshotRecord, State, Status,
};
use crate::store::Store as _;
use crate::store::conformance::{SLOTS, conformance, inserted, new_agent};

async fn open() -> (SqliteStore, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("dorm.db")).await.unwrap();
    (store, dir)
}

conformance!(open);

#[tokio::test]
async fn records_outlive_the_store_that_wrote_them() {
    let (store, dir) = open().await;
    let agent = store.insert_agent(&new_agent("one"), SLOTS).await.unwrap();
    store.close().await;
    let store = SqliteStore::open(&dir.path().join("dorm.db")).await.unwrap();
    assert_eq!(store.agents().await.unwrap().readable, [agent]);
}

#[tokio::test]
async fn what_is_written_after_sqlite_has_rolled_back_by_itself_is_there_for_all() {
    let (store, dir) = open().await;
    let mut given_up = store.writer.begin().await.unwrap();
    // As a full disk makes it do.
    given_up.execute("ROLLBACK").await.unwrap();
    drop(given_up);
    drop(store.writer.begin().await.unwrap());
    let agent = store.insert_agent(&new_agent("one"), SLOTS).await.unwrap();
    let agents = async |store: &SqliteStore| store.agents().await.unwrap().readable;
    assert_eq!(agents(&store).await, std::slice::from_ref(&agent));
    store.close().await;
    let store = SqliteStore::open(&dir.path().join("dorm.db")).await.unwrap();
    assert_eq!(agents(&store).await, [agent]);
}

#[tokio::test]
async fn damaged_rows_of_what_lies_on_disk_are_told() {
    let (store, _dir) = open().await;
    let agent = store.insert_agent(&new_agent("one"), SLOTS).await.unwrap();
    let snapshot = SnapshotRecord {
        id: Id::random(),
        agent: agent.profile.id.clone(),
        made: 1,
        label: String::new(),
        kind: SnapshotKind::Full,
        parent: None,
        isolation: Isolation::default(),
        size: 1,
        origin: None,
    };
    store.insert_snapshot(&snapshot).await.unwrap();
    assert!(store.agents().await.unwrap().damage.is_empty());
    assert!(store.damage().await.unwrap().is_empty());
    for damage in [
        "UPDATE snapshots SET kind = 'half'",
        "UPDATE agents SET image = '{'",
    ] {
        store.writer.execute(damage).await.unwrap();
    }
    assert!(store.damage().await.unwrap()[0].contains("snapshot"));
    assert!(store.agents().await.unwrap().damage[0].contains("image: "));
}

#[tokio::test]
async fn a_damaged_row_is_named_and_hurts_no_other() {
    let (store, _dir) = open().await;
    for name in ["whole", "no-spec", "no-state", "no-box", "no-id"] {
        store
            .insert_agent(&new_agent(name), crate::records::Slots { max: 9, ..SLOTS })
            .await
            .unwrap();
    }
    for damage in [
        "UPDATE agents SET spec = '{' WHERE name = 'no-spec'",
        "UPDATE agents SET state = 'dreaming' WHERE name = 'no-state'",
        "UPDATE agents SET state = 'running', box_record = 'x' WHERE name = 'no-box'",
        "PRAGMA foreign_keys = off",
        "UPDATE agents SET id = '../../etc' WHERE name = 'no-id'",
    ] {
        store.writer.execute(damage).await.unwrap();
    }
    let all = store.agents().await.unwrap();
    assert_eq!(all.damage.len(), 4, "{:?}", all.damage);
    let [whole, no_spec, no_state, no_box] = &all.readable[..] else {
        panic!("{all:?}")
    };
    assert_eq!(whole.status.reason, "created");
    assert!(
        no_spec.profile.damage.as_ref().unwrap().starts_with("spec: "),
        "{no_spec:?}"
    );
    for agent in [no_spec, no_state, no_box] {
        assert_eq!(agent.status.state, State::Failed);
        assert!(
            agent.status.reason.starts_with("its record is damaged: "),
            "{agent:?}"
        );
    }
    // State and box are of the moment, and can be written anew.
    assert_eq!((&no_state.profile.damage, &no_box.profile.damage), (&None, &None));
    let status = Status::now(State::Stopped, "mended");
    let id = &no_state.profile.id;
    let change = Change {
        agent: id,
        from: State::Failed,
        to: &status,
        at: status.since,
        millis: None,
        box_record: BoxChange::Clear,
        image: ImageChange::Keep,
    };
    store.change_state(&change).await.unwrap();
    assert_eq!(store.agents().await.unwrap().readable[2].status, status);
}

#[tokio::test]
async fn an_acknowledged_change_waits_for_the_disk() {
    let (store, _dir) = open().await;
    let pragma = |name: &'static str| sqlx::query_scalar::<_, String>(name).fetch_one(&store.writer);
    assert_eq!(
        pragma("SELECT journal_mode FROM pragma_journal_mode")
            .await
            .unwrap(),
        "wal"
    );
    let full = pragma("SELECT CAST(synchronous AS TEXT) FROM pragma_synchronous")
        .await
        .unwrap();
    assert_eq!(full, "2");
}

#[tokio::test]
async fn that_there_is_no_memory_any_more_is_recorded_in_the_room_that_is_kept() {
    let (store, dir) = open().await;
    let id = inserted(&store, "one").await;
    let reserve = dir.path().join("dorm.reserve");
    let kept = async || {
        while !reserve.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    kept().await;
    for statement in [
        "CREATE TABLE filler (bytes BLOB)",
        "CREATE TRIGGER fill AFTER UPDATE OF image ON agents BEGIN INSERT INTO filler VALUES (zeroblob(1000000)); END",
        "PRAGMA max_page_count = 1",
    ] {
        store.writer.execute(statement).await.unwrap();
    }
    let image = ImageRecord {
        id: Id::random(),
        generation: 1,
        size: 1,
        made: 1,
        current: true,
        foreign: false,
        cpu_usec: None,
    };
    let full = store.set_image(&id, Some(&image)).await.unwrap_err();
    assert!(full.is_full() && reserve.exists(), "{full:?}");
    // A limit of the database is none of the disk's, and there is no more room than before.
    let full = store.set_image(&id, None).await.unwrap_err();
    assert!(full.is_full() && !reserve.exists(), "{full:?}");
}

#[tokio::test]
async fn old_events_are_forgotten_and_a_thousand_kept() {
    let (store, _dir) = open().await;
    let id = inserted(&store, "one").await;
    let many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) \
                INSERT INTO events (agent, time, to_state, reason) SELECT agents.id, i, 'stopped', '' FROM n, agents";
    store.writer.execute(many).await.unwrap();
    let status = Status::now(State::Running, "");
    let change = Change {
        agent: &id,
        from: State::Stopped,
        to: &status,
        at: status.since,
        millis: None,
        box_record: BoxChange::Keep,
        image: ImageChange::Keep,
    };
    for _ in 0..64 {
        store.change_state(&change).await.unwrap();
    }
    let kept = store.events(&id, 5000).await.unwrap().len();
    assert!((1000..1100).contains(&kept), "{kept}");
}
