//! Records in one SQLite file.
//!
//! One connection writes, so that writers queue in the daemon and never meet `SQLITE_BUSY`; a few
//! others read, and WAL lets them do so meanwhile. No other process may. `synchronous = FULL` makes a commit wait for the disk.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use dorm_engine::network::Policy;
use dorm_engine::reserve::Reserve;
use dorm_engine::{Id, Isolation};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Connection as _, SqliteConnection, SqlitePool};

use self::room::making_room;
use super::{AllAgents, Result, Store, StoreError};
use crate::records::{
    AgentRecord, BuildRecord, Change, EventRecord, HoldRecord, ImageRecord, KeyRecord, NewAgentRecord, Note,
    Origin, Reach, SandboxRecord, SecretRecord, Sleep, Slots, SnapshotRecord, State, TemplateRecord,
    VolumeRecord, Workspace,
};

mod agents;
mod builds;
mod damage;
#[cfg(test)]
mod damage_tests;
mod holds;
mod keys;
mod room;
mod rows;
mod sandboxes;
mod secrets;
mod snapshots;
mod templates;
#[cfg(test)]
mod tests;
mod volumes;

const READERS: u32 = 2;
/// The daemon has the file for itself, and SQLite keeps its index of the log in memory of its own. Mapped from a file, it
/// would end the daemon by a signal when a disk that copies on write is full.
const OWN: &str = "unix-excl";

#[derive(Clone)]
pub struct SqliteStore {
    writer: SqlitePool,
    readers: SqlitePool,
    /// Beside the database.
    reserve: Reserve,
}

impl SqliteStore {
    /// Opens the database, which is made if there is none, and brings it to this version's form.
    pub async fn open(path: &Path) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .vfs(OWN)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(10));
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None);
        let writer = pool
            .after_release(|connection, _| Box::pin(is_at_rest(connection)))
            .connect_with(options.clone())
            .await
            .map_err(database("opened its file"))?;
        sqlx::migrate!("./migrations/sqlite")
            .run(&writer)
            .await
            .map_err(StoreError::Migrate)?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .max_lifetime(None)
            .connect_lazy_with(options.pragma("query_only", "on"));
        let store = Self {
            writer,
            readers,
            reserve: Reserve::of(path.parent().unwrap_or(Path::new("."))),
        };
        store.keep_room();
        Ok(store)
    }
}

/// Whether a connection is in no transaction once what was left of one is rolled back. On a full disk SQLite rolls back by itself, of which
/// sqlx knows nothing: it would take the next transactions for parts of that one, and the last of their commits would reach nobody.
async fn is_at_rest(connection: &mut SqliteConnection) -> sqlx::Result<bool> {
    connection.ping().await?;
    Ok(!connection.is_in_transaction())
}

fn database(doing: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
    move |source| StoreError::Database { doing, source }
}

/// Like [`database`], but a broken unique constraint means that the name is taken.
fn taken<'a>(
    doing: &'static str,
    kind: &'static str,
    name: &'a str,
) -> impl FnOnce(sqlx::Error) -> StoreError + 'a {
    move |source| match &source {
        sqlx::Error::Database(error) if error.is_unique_violation() => StoreError::AlreadyExists {
            kind,
            name: name.to_owned(),
        },
        _ => StoreError::Database { doing, source },
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn insert_agent(&self, new: &NewAgentRecord, slots: Slots) -> Result<AgentRecord> {
        self.do_insert_agent(new, slots).await
    }

    async fn agents(&self) -> Result<AllAgents> {
        self.all_agents().await
    }

    async fn change_state(&self, change: &Change<'_>) -> Result<()> {
        match (change.from, change.to.state) {
            // There is no way back from there: the box is gone, or about to be, or has gone on from an image that is old now, or memory is lost.
            (_, State::Deleting)
            | (State::Stopping, _)
            | (State::Hibernating, State::Hibernated)
            | (State::Waking, State::Running | State::Stopped) => {
                making_room!(self, self.do_change_state(change))
            }
            _ => self.do_change_state(change).await,
        }
    }

    async fn set_image(&self, agent: &Id, image: Option<&ImageRecord>) -> Result<()> {
        match image {
            Some(_) => self.do_set_image(agent, image).await,
            // It is of no use any more, or not there, whatever is recorded.
            None => making_room!(self, self.do_set_image(agent, None)),
        }
    }

    async fn set_setback(&self, agent: &Id, setback: &Note) -> Result<()> {
        self.do_set_setback(agent, setback).await
    }

    async fn set_goes_on(&self, agent: &Id, goes_on: bool) -> Result<()> {
        self.do_set_goes_on(agent, goes_on).await
    }

    async fn set_reach(&self, agent: &Id, reach: &Reach) -> Result<()> {
        self.do_set_reach(agent, reach).await
    }

    async fn set_isolation(&self, agent: &Id, isolation: Isolation) -> Result<()> {
        self.do_set_isolation(agent, isolation).await
    }

    async fn set_network(&self, agent: &Id, policy: &Policy) -> Result<()> {
        self.do_set_network(agent, policy).await
    }

    async fn set_sleep(&self, agent: &Id, sleep: &Sleep) -> Result<()> {
        self.do_set_sleep(agent, sleep).await
    }

    async fn delete_agent(&self, id: &Id) -> Result<()> {
        making_room!(self, self.do_delete_agent(id))
    }

    async fn events(&self, agent: &Id, limit: u32) -> Result<Vec<EventRecord>> {
        self.newest_events_of(agent, limit).await
    }

    async fn events_after(
        &self,
        workspace: &Workspace,
        agent: Option<&Id>,
        seq: i64,
        limit: u32,
    ) -> Result<Vec<EventRecord>> {
        self.do_events_after(workspace, agent, seq, limit).await
    }

    async fn newest_events(&self, workspace: &Workspace, limit: u32) -> Result<Vec<EventRecord>> {
        self.newest_events_of_all(workspace, limit).await
    }

    async fn insert_snapshot(&self, snapshot: &SnapshotRecord) -> Result<()> {
        self.do_insert_snapshot(snapshot).await
    }

    async fn damage(&self) -> Result<Vec<String>> {
        self.damage_on_disk().await
    }

    async fn all_damage(&self) -> Result<Vec<String>> {
        self.find_all_damage().await
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotRecord>> {
        self.find_snapshots(None).await
    }

    async fn snapshots_of(&self, agent: &Id) -> Result<Vec<SnapshotRecord>> {
        self.find_snapshots(Some(agent)).await
    }

    async fn move_to_snapshot(&self, agent: &Id, snapshot: &Id, image: Option<&ImageRecord>) -> Result<()> {
        making_room!(self, self.do_move_to_snapshot(agent, snapshot, image))
    }

    async fn keep_snapshot(&self, id: &Id, origin: &Origin) -> Result<()> {
        self.do_keep_snapshot(id, origin).await
    }

    async fn delete_snapshot(&self, id: &Id) -> Result<()> {
        making_room!(self, self.do_delete_snapshot(id))
    }

    async fn sandboxes(&self) -> Result<Vec<(Id, SandboxRecord)>> {
        self.all_sandboxes().await
    }

    async fn set_sandbox(&self, agent: &Id, sandbox: &SandboxRecord) -> Result<()> {
        self.do_set_sandbox(agent, sandbox).await
    }

    async fn insert_secret(&self, secret: &SecretRecord) -> Result<()> {
        self.do_insert_secret(secret).await
    }

    async fn secrets(&self, workspace: &Workspace) -> Result<Vec<SecretRecord>> {
        self.all_secrets(workspace).await
    }

    async fn update_secret(&self, secret: &SecretRecord) -> Result<()> {
        self.do_update_secret(secret).await
    }

    async fn delete_secret(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        self.do_delete_secret(workspace, id).await
    }

    async fn insert_hold(&self, hold: &HoldRecord) -> Result<()> {
        self.do_insert_hold(hold).await
    }

    async fn holds(&self) -> Result<Vec<HoldRecord>> {
        self.all_holds().await
    }

    async fn delete_hold(&self, id: &Id) -> Result<()> {
        self.do_delete_hold(id).await
    }

    async fn insert_template(&self, template: &TemplateRecord) -> Result<Option<Id>> {
        self.do_insert_template(template).await
    }

    async fn template_by_name_or_id(
        &self,
        workspace: &Workspace,
        name_or_id: &str,
    ) -> Result<TemplateRecord> {
        self.find_template(workspace, name_or_id).await
    }

    async fn list_templates(&self, workspace: &Workspace) -> Result<Vec<TemplateRecord>> {
        self.all_templates(workspace).await
    }

    async fn template_ids(&self) -> Result<Vec<Id>> {
        self.all_template_ids().await
    }

    async fn delete_template(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        making_room!(self, self.do_delete_template(workspace, id))
    }

    async fn agents_of_template(&self, id: &Id) -> Result<u64> {
        self.count_agents_of_template(id).await
    }

    async fn save_build(&self, build: &BuildRecord) -> Result<()> {
        self.do_save_build(build).await
    }

    async fn builds(&self) -> Result<Vec<BuildRecord>> {
        self.all_builds().await
    }

    async fn delete_build(&self, id: &str) -> Result<()> {
        self.do_delete_build(id).await
    }

    async fn insert_volume(&self, volume: &VolumeRecord) -> Result<()> {
        self.do_insert_volume(volume).await
    }

    async fn volumes(&self) -> Result<Vec<VolumeRecord>> {
        self.all_volumes().await
    }

    async fn delete_volume(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        making_room!(self, self.do_delete_volume(workspace, id))
    }

    async fn insert_key(&self, key: &KeyRecord) -> Result<()> {
        self.do_insert_key(key).await
    }

    async fn list_keys(&self, workspace: &Workspace) -> Result<Vec<KeyRecord>> {
        self.all_keys(workspace).await
    }

    async fn keys_by_prefix(&self, prefix: &str) -> Result<Vec<KeyRecord>> {
        self.find_keys(prefix).await
    }

    async fn delete_key(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        self.do_delete_key(workspace, id).await
    }

    async fn touch_keys(&self, used: &[(Id, i64)]) -> Result<()> {
        self.do_touch_keys(used).await
    }

    async fn server_secret(&self, name: &str, new: [u8; 32]) -> Result<[u8; 32]> {
        self.find_or_insert_secret(name, new).await
    }

    async fn is_new(&self) -> Result<bool> {
        let any: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM keys) OR EXISTS (SELECT 1 FROM agents) \
             OR EXISTS (SELECT 1 FROM templates)",
        )
        .fetch_one(&self.readers)
        .await
        .map_err(database("looked whether it is new"))?;
        Ok(!any)
    }

    async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}
