//! Templates.

use dorm_engine::Id;

use super::agents::json;
use super::{Result, SqliteStore, StoreError, database, rows, taken};
use crate::records::{TemplateRecord, Workspace};

impl SqliteStore {
    pub(super) async fn do_insert_template(&self, template: &TemplateRecord) -> Result<Option<Id>> {
        const DOING: &str = "added a template";
        let mut tx = self.writer.begin().await.map_err(database(DOING))?;
        let replaced: Option<String> =
            sqlx::query_scalar("DELETE FROM templates WHERE workspace = ? AND name = ? RETURNING id")
                .bind(template.workspace.as_str())
                .bind(&template.name)
                .fetch_optional(&mut *tx)
                .await
                .map_err(database(DOING))?;
        sqlx::query(
            "INSERT INTO templates (id, workspace, name, recipe_hash, defaults, built, size, created) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(template.id.as_str())
        .bind(template.workspace.as_str())
        .bind(&template.name)
        .bind(&template.recipe_hash)
        .bind(json(&template.defaults))
        .bind(json(&template.built))
        .bind(i64::try_from(template.size).unwrap_or(i64::MAX))
        .bind(template.created)
        .execute(&mut *tx)
        .await
        .map_err(taken(DOING, "a template", &template.name))?;
        tx.commit().await.map_err(database(DOING))?;
        Ok(replaced.and_then(|id| id.parse().ok()))
    }

    pub(super) async fn find_template(
        &self,
        workspace: &Workspace,
        name_or_id: &str,
    ) -> Result<TemplateRecord> {
        let row = sqlx::query(
            "SELECT * FROM templates WHERE workspace = ?1 AND (name = ?2 OR id = ?2) \
             ORDER BY name = ?2 DESC LIMIT 1",
        )
        .bind(workspace.as_str())
        .bind(name_or_id)
        .fetch_optional(&self.readers)
        .await
        .map_err(database("read a template"))?;
        let missing = || StoreError::NotFound {
            kind: "template",
            name: name_or_id.to_owned(),
        };
        rows::template(&row.ok_or_else(missing)?)
    }

    pub(super) async fn all_templates(&self, workspace: &Workspace) -> Result<Vec<TemplateRecord>> {
        let rows = sqlx::query("SELECT * FROM templates WHERE workspace = ? ORDER BY name")
            .bind(workspace.as_str())
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the templates"))?;
        Ok(rows::readable(&rows, rows::template))
    }

    pub(super) async fn all_template_ids(&self) -> Result<Vec<Id>> {
        let ids: Vec<String> = sqlx::query_scalar("SELECT id FROM templates")
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the templates"))?;
        Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
    }

    pub(super) async fn do_delete_template(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let deleted = sqlx::query("DELETE FROM templates WHERE workspace = ? AND id = ?")
            .bind(workspace.as_str())
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("deleted a template"))?;
        if deleted.rows_affected() == 0 {
            return Err(StoreError::NotFound {
                kind: "template",
                name: id.to_string(),
            });
        }
        Ok(())
    }
}
