//! What is kept secret for a workspace.

use dorm_engine::Id;

use super::agents::json;
use super::{Result, SqliteStore, StoreError, database, rows, taken};
use crate::records::{SecretRecord, Workspace};

impl SqliteStore {
    pub(super) async fn do_insert_secret(&self, secret: &SecretRecord) -> Result<()> {
        sqlx::query(
            "INSERT INTO workspace_secrets (id, workspace, name, value, version, metadata, created, updated) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(secret.id.as_str())
        .bind(secret.workspace.as_str())
        .bind(&secret.name)
        .bind(&secret.value)
        .bind(secret.version)
        .bind(json(&secret.metadata))
        .bind(secret.created)
        .bind(secret.updated)
        .execute(&self.writer)
        .await
        .map_err(taken("added a secret", "a secret", &secret.name))?;
        Ok(())
    }

    pub(super) async fn all_secrets(&self, workspace: &Workspace) -> Result<Vec<SecretRecord>> {
        let rows = sqlx::query("SELECT * FROM workspace_secrets WHERE workspace = ? ORDER BY created, rowid")
            .bind(workspace.as_str())
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the secrets"))?;
        Ok(rows::readable(&rows, rows::secret))
    }

    pub(super) async fn do_update_secret(&self, secret: &SecretRecord) -> Result<()> {
        let updated = sqlx::query(
            "UPDATE workspace_secrets SET value = ?, version = ?, metadata = ?, updated = ? WHERE id = ?",
        )
        .bind(&secret.value)
        .bind(secret.version)
        .bind(json(&secret.metadata))
        .bind(secret.updated)
        .bind(secret.id.as_str())
        .execute(&self.writer)
        .await
        .map_err(database("changed a secret"))?;
        gone(updated.rows_affected(), &secret.id)
    }

    pub(super) async fn do_delete_secret(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let deleted = sqlx::query("DELETE FROM workspace_secrets WHERE workspace = ? AND id = ?")
            .bind(workspace.as_str())
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("deleted a secret"))?;
        gone(deleted.rows_affected(), id)
    }
}

fn gone(rows: u64, id: &Id) -> Result<()> {
    match rows {
        0 => Err(StoreError::NotFound {
            kind: "secret",
            name: id.to_string(),
        }),
        _ => Ok(()),
    }
}
