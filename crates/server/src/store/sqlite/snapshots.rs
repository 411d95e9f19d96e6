//! Snapshots of agents.

use dorm_engine::Id;

use super::agents::json;
use super::{Result, SqliteStore, StoreError, database, rows};
use crate::records::{ImageRecord, Origin, SnapshotRecord};

impl SqliteStore {
    pub(super) async fn do_insert_snapshot(&self, snapshot: &SnapshotRecord) -> Result<()> {
        const DOING: &str = "added a snapshot";
        let mut tx = self.writer.begin().await.map_err(database(DOING))?;
        sqlx::query(
            "INSERT INTO snapshots (id, agent, made, label, kind, parent, isolation, size, origin) \
             VALUES (?1, ?2, ?3, ?4, ?5, (SELECT snapshot FROM agents WHERE id = ?2), ?6, ?7, ?8)",
        )
        .bind(snapshot.id.as_str())
        .bind(snapshot.agent.as_str())
        .bind(snapshot.made)
        .bind(&snapshot.label)
        .bind(snapshot.kind.as_str())
        .bind(snapshot.isolation.as_str())
        .bind(i64::try_from(snapshot.size).unwrap_or(i64::MAX))
        .bind(snapshot.origin.as_ref().map(json))
        .execute(&mut *tx)
        .await
        .map_err(database(DOING))?;
        sqlx::query("UPDATE agents SET snapshot = ? WHERE id = ?")
            .bind(snapshot.id.as_str())
            .bind(snapshot.agent.as_str())
            .execute(&mut *tx)
            .await
            .map_err(database(DOING))?;
        tx.commit().await.map_err(database(DOING))
    }

    pub(super) async fn find_snapshots(&self, agent: Option<&Id>) -> Result<Vec<SnapshotRecord>> {
        let rows = sqlx::query("SELECT * FROM snapshots WHERE ?1 IS NULL OR agent = ?1 ORDER BY made, rowid")
            .bind(agent.map(Id::as_str))
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the snapshots"))?;
        Ok(rows::readable(&rows, rows::snapshot))
    }

    pub(super) async fn do_move_to_snapshot(
        &self,
        agent: &Id,
        snapshot: &Id,
        image: Option<&ImageRecord>,
    ) -> Result<()> {
        const MOVE: &str =
            "UPDATE agents SET snapshot = (SELECT id FROM snapshots WHERE id = ?), image = ? WHERE id = ?";
        let updated = sqlx::query(MOVE)
            .bind(snapshot.as_str())
            .bind(image.map(json))
            .bind(agent.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("recorded where an agent is"))?;
        match updated.rows_affected() {
            0 => Err(StoreError::NotFound {
                kind: "agent",
                name: agent.to_string(),
            }),
            _ => Ok(()),
        }
    }

    pub(super) async fn do_keep_snapshot(&self, id: &Id, origin: &Origin) -> Result<()> {
        let updated = sqlx::query("UPDATE snapshots SET origin = ? WHERE id = ?")
            .bind(json(origin))
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("recorded that a snapshot is kept"))?;
        match updated.rows_affected() {
            0 => Err(StoreError::NotFound {
                kind: "snapshot",
                name: id.to_string(),
            }),
            _ => Ok(()),
        }
    }

    pub(super) async fn do_delete_snapshot(&self, id: &Id) -> Result<()> {
        const DOING: &str = "deleted a snapshot";
        let mut tx = self.writer.begin().await.map_err(database(DOING))?;
        for change in [
            "UPDATE snapshots SET parent = (SELECT parent FROM snapshots WHERE id = ?1) WHERE parent = ?1",
            "UPDATE agents SET snapshot = (SELECT parent FROM snapshots WHERE id = ?1) WHERE snapshot = ?1",
            "DELETE FROM snapshots WHERE id = ?1",
        ] {
            sqlx::query(change)
                .bind(id.as_str())
                .execute(&mut *tx)
                .await
                .map_err(database(DOING))?;
        }
        tx.commit().await.map_err(database(DOING))
    }
}
