//! What keeps agents from going to sleep.

use dorm_engine::Id;

use super::{Result, SqliteStore, database, rows};
use crate::records::HoldRecord;

impl SqliteStore {
    pub(super) async fn do_insert_hold(&self, hold: &HoldRecord) -> Result<()> {
        sqlx::query("INSERT INTO holds (id, agent, reason, made, until) VALUES (?, ?, ?, ?, ?)")
            .bind(hold.id.as_str())
            .bind(hold.agent.as_str())
            .bind(&hold.reason)
            .bind(hold.made)
            .bind(hold.until)
            .execute(&self.writer)
            .await
            .map_err(database("added a hold"))?;
        Ok(())
    }

    pub(super) async fn all_holds(&self) -> Result<Vec<HoldRecord>> {
        let rows = sqlx::query("SELECT * FROM holds ORDER BY made, id")
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the holds"))?;
        Ok(rows::readable(&rows, rows::hold))
    }

    pub(super) async fn do_delete_hold(&self, id: &Id) -> Result<()> {
        sqlx::query("DELETE FROM holds WHERE id = ?")
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("deleted a hold"))?;
        Ok(())
    }
}
