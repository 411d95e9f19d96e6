//! A damaged row of every table: it is told, and whoever else has rows there keeps them.

use std::collections::BTreeSet;

use dorm_engine::Id;
use sqlx::{AssertSqlSafe, Executor as _};

use super::SqliteStore;
use crate::records::{State, Workspace};
use crate::store::Store as _;
use crate::store::conformance::{SLOTS, new_agent};

/// Tables in which a row can be damaged, with a whole row and a damaged one. `HURT` and `WHOLE` are agents.
const ROWS: [(&str, &[&str]); 11] = [
    ("agents", &["UPDATE agents SET spec = '{' WHERE id = 'HURT'"]),
    (
        "events",
        &["UPDATE events SET to_state = 'dreaming' WHERE agent = 'HURT'"],
    ),
    (
        "snapshots",
        &[
            "INSERT INTO snapshots VALUES ('aaaaaaaaaaaaaaaaaaaa', 'WHOLE', 1, '', 'full', NULL, 1, NULL, 'container')",
            "INSERT INTO snapshots VALUES ('bbbbbbbbbbbbbbbbbbbb', 'HURT', 1, '', 'half', NULL, 1, NULL, 'container')",
        ],
    ),
    (
        "holds",
        &[
            "INSERT INTO holds VALUES ('aaaaaaaaaaaaaaaaaaaa', 'WHOLE', '', 1, 2)",
            "INSERT INTO holds VALUES ('../../etc', 'HURT', '', 1, 2)",
        ],
    ),
    (
        "templates",
        &[
            "INSERT INTO templates (id, workspace, name, defaults, size, created) \
             VALUES ('aaaaaaaaaaaaaaaaaaaa', 'default', 'whole', '{}', 1, 1)",
            "INSERT INTO templates (id, workspace, name, defaults, size, created) \
             VALUES ('bbbbbbbbbbbbbbbbbbbb', 'default', 'hurt', '{', 1, 1)",
        ],
    ),
    (
        "keys",
        &[
            "INSERT INTO keys VALUES ('aaaaaaaaaaaaaaaaaaaa', 'default', 'whole', 'p', zeroblob(32), 1, NULL)",
            "INSERT INTO keys VALUES ('bbbbbbbbbbbbbbbbbbbb', 'default', 'hurt', 'p', zeroblob(3), 1, NULL)",
        ],
    ),
    ("sandboxes", &["INSERT INTO sandboxes VALUES ('HURT', '{')"]),
    (
        "workspace_secrets",
        &[
            "INSERT INTO workspace_secrets VALUES ('aaaaaaaaaaaaaaaaaaaa', 'default', 'whole', '', 1, '{}', 1, 1)",
            "INSERT INTO workspace_secrets VALUES ('bbbbbbbbbbbbbbbbbbbb', 'default', 'hurt', '', 1, '{', 1, 1)",
        ],
    ),
    (
        "volumes",
        &[
            "INSERT INTO volumes VALUES ('aaaaaaaaaaaaaaaaaaaa', 'default', 'whole', 1)",
            "INSERT INTO volumes VALUES ('../../etc', 'default', 'hurt', 1)",
        ],
    ),
    ("builds", &["INSERT INTO builds VALUES (1, 'hurt', '{')"]),
    (
        "server_secrets",
        &["INSERT INTO server_secrets VALUES ('hurt', zeroblob(3))"],
    ),
];
/// Nothing is read of these but by the database itself.
const UNREAD: [&str; 2] = ["workspaces", "_sqlx_migrations"];

#[tokio::test]
async fn a_damaged_row_of_any_table_hurts_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("dorm.db")).await.unwrap();
    let tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'";
    let tables: Vec<String> = sqlx::query_scalar(tables).fetch_all(&store.writer).await.unwrap();
    let known = ROWS.iter().map(|(table, _)| *table).chain(UNREAD);
    assert_eq!(
        tables.iter().map(String::as_str).collect::<BTreeSet<_>>(),
        known.collect()
    );

    let insert = async |name| {
        store
            .insert_agent(&new_agent(name), SLOTS)
            .await
            .unwrap()
            .profile
            .id
    };
    let (whole, hurt) = (insert("whole").await, insert("hurt").await);
    for sql in ROWS.iter().flat_map(|(_, rows)| *rows) {
        let sql = sql
            .replace("WHOLE", whole.as_str())
            .replace("HURT", hurt.as_str());
        let done = store.writer.execute(AssertSqlSafe(sql.clone())).await;
        assert!(done.is_ok_and(|done| done.rows_affected() == 1), "{sql}");
    }

    let all = store.agents().await.unwrap();
    let states: Vec<_> = all
        .readable
        .iter()
        .map(|agent| (&agent.profile.id, agent.status.state))
        .collect();
    assert_eq!(states, [(&whole, State::Stopped), (&hurt, State::Failed)]);
    assert_eq!(all.damage.len(), 1, "{:?}", all.damage);
    assert!(all.damage[0].contains(hurt.as_str()));

    let ours = Workspace::default();
    let first = "aaaaaaaaaaaaaaaaaaaa".parse::<Id>().unwrap();
    assert_eq!(store.events(&whole, 9).await.unwrap().len(), 1);
    assert_eq!(store.events(&hurt, 9).await.unwrap(), []);
    assert_eq!(store.newest_events(&ours, 9).await.unwrap().len(), 1);
    let snapshots = store.snapshots().await.unwrap();
    assert_eq!(snapshots.iter().map(|one| &one.id).collect::<Vec<_>>(), [&first]);
    assert_eq!(store.holds().await.unwrap().len(), 1);
    assert_eq!(store.list_templates(&ours).await.unwrap().len(), 1);
    assert_eq!(store.list_keys(&ours).await.unwrap().len(), 1);
    assert_eq!(store.keys_by_prefix("p").await.unwrap().len(), 1);
    assert_eq!(store.sandboxes().await.unwrap().len(), 0);
    assert_eq!(store.secrets(&ours).await.unwrap().len(), 1);
    assert_eq!(store.volumes().await.unwrap().len(), 1);
    assert_eq!(store.builds().await.unwrap().len(), 0);
    assert_eq!(store.server_secret("hurt", [7; 32]).await.unwrap(), [7; 32]);
    assert_eq!(store.server_secret("hurt", [8; 32]).await.unwrap(), [7; 32]);

    let on_disk = ["snapshot", "volume", "template"];
    let all = [
        &on_disk[..],
        &["agent", "key", "hold", "sandbox", "secret", "build"],
    ]
    .concat();
    for (told, kinds) in [
        (store.damage().await.unwrap(), on_disk.to_vec()),
        (store.all_damage().await.unwrap(), all),
    ] {
        assert_eq!(told.len(), kinds.len(), "{told:?}");
        for kind in kinds {
            assert!(told.iter().any(|why| why.contains(kind)), "{kind}: {told:?}");
        }
    }
}
