//! API keys, of which only hashes come here, and the server's own secrets.

use dorm_engine::Id;

use super::{Result, SqliteStore, StoreError, database, rows, taken};
use crate::records::{KeyRecord, Workspace};

impl SqliteStore {
    pub(super) async fn do_insert_key(&self, key: &KeyRecord) -> Result<()> {
        sqlx::query(
            "INSERT INTO keys (id, workspace, name, prefix, hash, created, last_used) \
             VALUES (?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(key.id.as_str())
        .bind(key.workspace.as_str())
        .bind(&key.name)
        .bind(&key.prefix)
        .bind(key.hash.as_slice())
        .bind(key.created)
        .bind(key.last_used)
        .execute(&self.writer)
        .await
        .map_err(taken("added a key", "a key", &key.name))?;
        Ok(())
    }

    pub(super) async fn all_keys(&self, workspace: &Workspace) -> Result<Vec<KeyRecord>> {
        let rows = sqlx::query("SELECT * FROM keys WHERE workspace = ? ORDER BY created, rowid")
            .bind(workspace.as_str())
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the keys"))?;
        Ok(rows::readable(&rows, rows::key))
    }

    pub(super) async fn find_keys(&self, prefix: &str) -> Result<Vec<KeyRecord>> {
        let rows = sqlx::query("SELECT * FROM keys WHERE prefix = ?")
            .bind(prefix)
            .fetch_all(&self.readers)
            .await
            .map_err(database("looked for a key"))?;
        Ok(rows::readable(&rows, rows::key))
    }

    pub(super) async fn do_delete_key(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let deleted = sqlx::query("DELETE FROM keys WHERE workspace = ? AND id = ?")
            .bind(workspace.as_str())
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("deleted a key"))?;
        if deleted.rows_affected() == 0 {
            return Err(StoreError::NotFound {
                kind: "key",
                name: id.to_string(),
            });
        }
        Ok(())
    }

    pub(super) async fn do_touch_keys(&self, used: &[(Id, i64)]) -> Result<()> {
        const DOING: &str = "recorded the use of keys";
        let mut tx = self.writer.begin().await.map_err(database(DOING))?;
        for (id, time) in used {
            sqlx::query("UPDATE keys SET last_used = max(coalesce(last_used, 0), ?) WHERE id = ?")
                .bind(time)
                .bind(id.as_str())
                .execute(&mut *tx)
                .await
                .map_err(database(DOING))?;
        }
        tx.commit().await.map_err(database(DOING))
    }

    pub(super) async fn find_or_insert_secret(&self, name: &str, new: [u8; 32]) -> Result<[u8; 32]> {
        const DOING: &str = "read a secret of the server";
        sqlx::query("INSERT INTO server_secrets (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING")
            .bind(name)
            .bind(new.as_slice())
            .execute(&self.writer)
            .await
            .map_err(database(DOING))?;
        let value: Vec<u8> = sqlx::query_scalar("SELECT value FROM server_secrets WHERE name = ?")
            .bind(name)
            .fetch_one(&self.writer)
            .await
            .map_err(database(DOING))?;
        if let Ok(value) = value.try_into() {
            return Ok(value);
        }
        tracing::error!(
            name,
            "a secret of this server is damaged, and made anew; what was made with it is refused from now on"
        );
        sqlx::query("UPDATE server_secrets SET value = ? WHERE name = ?")
            .bind(new.as_slice())
            .bind(name)
            .execute(&self.writer)
            .await
            .map_err(database(DOING))?;
        Ok(new)
    }
}
