//! Rows that cannot be read. Whoever lists records leaves them out; here they are told.

use sqlx::sqlite::SqliteRow;

use super::{Result, SqliteStore, database, rows};

type Look = fn(&SqliteRow) -> Result<()>;

/// What lies on disk beside agents: without its record nobody knows what it is.
const ON_DISK: [(&str, Look); 3] = [
    ("SELECT * FROM snapshots", |row| rows::snapshot(row).map(drop)),
    ("SELECT * FROM volumes", |row| rows::volume(row).map(drop)),
    ("SELECT * FROM templates", |row| rows::template(row).map(drop)),
];

const ELSE: [(&str, Look); 5] = [
    ("SELECT * FROM keys", |row| rows::key(row).map(drop)),
    ("SELECT * FROM holds", |row| rows::hold(row).map(drop)),
    ("SELECT * FROM sandboxes", |row| rows::sandbox(row).map(drop)),
    ("SELECT * FROM workspace_secrets", |row| {
        rows::secret(row).map(drop)
    }),
    ("SELECT * FROM builds", |row| rows::build(row).map(drop)),
];

impl SqliteStore {
    pub(super) async fn damage_on_disk(&self) -> Result<Vec<String>> {
        self.damage_of(&ON_DISK).await
    }

    pub(super) async fn find_all_damage(&self) -> Result<Vec<String>> {
        let mut damage = self.all_agents().await?.damage;
        damage.extend(self.damage_of(&ON_DISK).await?);
        damage.extend(self.damage_of(&ELSE).await?);
        Ok(damage)
    }

    async fn damage_of(&self, tables: &[(&'static str, Look)]) -> Result<Vec<String>> {
        let mut damage = Vec::new();
        for (query, look) in tables {
            let rows = sqlx::query(*query).fetch_all(&self.readers).await;
            let rows = rows.map_err(database("looked for damage"))?;
            damage.extend(
                rows.iter()
                    .filter_map(|row| look(row).err())
                    .map(|e| e.to_string()),
            );
        }
        Ok(damage)
    }
}
