//! Volumes.

use dorm_engine::Id;

use super::{Result, SqliteStore, StoreError, database, rows, taken};
use crate::records::{VolumeRecord, Workspace};

impl SqliteStore {
    pub(super) async fn do_insert_volume(&self, volume: &VolumeRecord) -> Result<()> {
        sqlx::query("INSERT INTO volumes (id, workspace, name, created) VALUES (?, ?, ?, ?)")
            .bind(volume.id.as_str())
            .bind(volume.workspace.as_str())
            .bind(&volume.name)
            .bind(volume.created)
            .execute(&self.writer)
            .await
            .map_err(taken("added a volume", "a volume", &volume.name))?;
        Ok(())
    }

    pub(super) async fn all_volumes(&self) -> Result<Vec<VolumeRecord>> {
        let rows = sqlx::query("SELECT * FROM volumes ORDER BY name")
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the volumes"))?;
        Ok(rows::readable(&rows, rows::volume))
    }

    pub(super) async fn do_delete_volume(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let deleted = sqlx::query("DELETE FROM volumes WHERE workspace = ? AND id = ?")
            .bind(workspace.as_str())
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("deleted a volume"))?;
        match deleted.rows_affected() {
            0 => Err(StoreError::NotFound {
                kind: "volume",
                name: id.to_string(),
            }),
            _ => Ok(()),
        }
    }
}
