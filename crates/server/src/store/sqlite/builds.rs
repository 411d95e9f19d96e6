//! Builds of templates through the E2B API.

use super::agents::json;
use super::{Result, SqliteStore, database, rows};
use crate::records::BuildRecord;

impl SqliteStore {
    pub(super) async fn do_save_build(&self, build: &BuildRecord) -> Result<()> {
        sqlx::query(
            "INSERT INTO builds (id, record) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record",
        )
        .bind(&build.id)
        .bind(json(build))
        .execute(&self.writer)
        .await
        .map_err(database("recorded a build"))?;
        Ok(())
    }

    pub(super) async fn all_builds(&self) -> Result<Vec<BuildRecord>> {
        let rows = sqlx::query("SELECT * FROM builds ORDER BY seq")
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the builds"))?;
        Ok(rows::readable(&rows, rows::build))
    }

    pub(super) async fn do_delete_build(&self, id: &str) -> Result<()> {
        sqlx::query("DELETE FROM builds WHERE id = ?")
            .bind(id)
            .execute(&self.writer)
            .await
            .map_err(database("forgot a build"))?;
        Ok(())
    }
}
