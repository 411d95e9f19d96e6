//! What the E2B API adds to agents.

use dorm_engine::Id;
use sqlx::{Sqlite, Transaction};

use super::agents::json;
use super::{Result, SqliteStore, StoreError, database, rows};
use crate::records::SandboxRecord;

pub(super) async fn insert_sandbox(
    tx: &mut Transaction<'_, Sqlite>,
    agent: &Id,
    sandbox: &SandboxRecord,
) -> Result<()> {
    sqlx::query("INSERT INTO sandboxes (agent, record) VALUES (?, ?)")
        .bind(agent.as_str())
        .bind(json(sandbox))
        .execute(&mut **tx)
        .await
        .map_err(database("added a sandbox"))?;
    Ok(())
}

impl SqliteStore {
    pub(super) async fn all_sandboxes(&self) -> Result<Vec<(Id, SandboxRecord)>> {
        let rows = sqlx::query("SELECT * FROM sandboxes ORDER BY rowid")
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the sandboxes"))?;
        Ok(rows::readable(&rows, rows::sandbox))
    }

    pub(super) async fn do_set_sandbox(&self, agent: &Id, sandbox: &SandboxRecord) -> Result<()> {
        let updated = sqlx::query("UPDATE sandboxes SET record = ? WHERE agent = ?")
            .bind(json(sandbox))
            .bind(agent.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("changed a sandbox"))?;
        match updated.rows_affected() {
            0 => Err(StoreError::NotFound {
                kind: "sandbox",
                name: agent.to_string(),
            }),
            _ => Ok(()),
        }
    }
}
