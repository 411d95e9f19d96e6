//! The records, behind a trait: SQLite on one machine, others later.
//!
//! A method that changes something returns when the change is durable. Each is one transaction, so
//! that an acknowledged transition costs one fsync. Every implementation passes `conformance`.

use async_trait::async_trait;
use dorm_engine::network::Policy;
use dorm_engine::{Id, Isolation};

use crate::records::{
    AgentRecord, BuildRecord, Change, EventRecord, HoldRecord, ImageRecord, KeyRecord, NewAgentRecord, Note,
    Origin, Reach, SandboxRecord, SecretRecord, Sleep, Slots, SnapshotRecord, TemplateRecord, VolumeRecord,
    Workspace,
};

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod conformance_sandboxes;
#[cfg(test)]
mod conformance_sleep;
#[cfg(test)]
pub(crate) mod memory;
mod sqlite;

pub use sqlite::SqliteStore;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("there is no {kind} {name:?}")]
    NotFound { kind: &'static str, name: String },
    #[error("there is already {kind} {name:?}")]
    AlreadyExists { kind: &'static str, name: String },
    #[error("all {max} slots for agents are taken")]
    NoSlot { max: u32 },
    #[error("the record of {kind} {name:?} cannot be read: {why}")]
    Damaged {
        kind: &'static str,
        name: String,
        why: String,
    },
    #[error("the database failed while it {doing}")]
    Database {
        doing: &'static str,
        #[source]
        source: sqlx::Error,
    },
    #[error("the database could not be brought to this version's form")]
    Migrate(#[source] sqlx::migrate::MigrateError),
}

impl StoreError {
    /// Whether the disk of the database is full.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Database {
                source: sqlx::Error::Database(error),
                ..
            } => error.code().is_some_and(|code| FULL.contains(&&*code)),
            Self::Database { source, .. } => dorm_engine::is_no_space(source),
            _ => false,
        }
    }
}

/// What SQLite calls a disk that is full: when it writes, and when it makes its index of the log longer.
const FULL: [&str; 2] = ["13", "4874"];

pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// All agents. A row that is damaged in part is among `readable`, with its damage named.
#[derive(Debug, Default)]
pub struct AllAgents {
    /// All of which at least the id could be read.
    pub readable: Vec<AgentRecord>,
    /// What could not be read, in words.
    pub damage: Vec<String>,
}

#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Adds an agent in the lowest free slot, with its first event.
    async fn insert_agent(&self, new: &NewAgentRecord, slots: Slots) -> Result<AgentRecord>;
    /// Of all workspaces, by slot.
    async fn agents(&self) -> Result<AllAgents>;
    /// Records a change of state and its event.
    async fn change_state(&self, change: &Change<'_>) -> Result<()>;
    /// Records the memory image of an agent, or that there is none.
    async fn set_image(&self, agent: &Id, image: Option<&ImageRecord>) -> Result<()>;
    /// Records what last went wrong with an agent's memory.
    async fn set_setback(&self, agent: &Id, setback: &Note) -> Result<()>;
    async fn set_goes_on(&self, agent: &Id, goes_on: bool) -> Result<()>;
    async fn set_reach(&self, agent: &Id, reach: &Reach) -> Result<()>;
    async fn set_isolation(&self, agent: &Id, isolation: Isolation) -> Result<()>;
    async fn set_network(&self, agent: &Id, policy: &Policy) -> Result<()>;
    async fn set_sleep(&self, agent: &Id, sleep: &Sleep) -> Result<()>;
    /// Removes an agent, its events, and its snapshots that do not outlive it. Removing what is not there is no error.
    async fn delete_agent(&self, id: &Id) -> Result<()>;
    /// Newest first. A store keeps the newest thousand of each agent, and may forget older ones.
    async fn events(&self, agent: &Id, limit: u32) -> Result<Vec<EventRecord>>;

    /// Of one agent or of a whole workspace, oldest first: the first `limit` after `seq`.
    async fn events_after(
        &self,
        workspace: &Workspace,
        agent: Option<&Id>,
        seq: i64,
        limit: u32,
    ) -> Result<Vec<EventRecord>>;
    /// Of a whole workspace, newest first.
    async fn newest_events(&self, workspace: &Workspace, limit: u32) -> Result<Vec<EventRecord>>;

    /// What cannot be read of the records of things that lie on disk beside agents: snapshots, volumes and templates.
    async fn damage(&self) -> Result<Vec<String>>;
    /// What cannot be read of any record, in words, for people.
    async fn all_damage(&self) -> Result<Vec<String>>;

    /// Adds a snapshot, at which its agent then is. Its parent is the one that its agent was at, whatever the record says: another may have been
    /// deleted just now.
    async fn insert_snapshot(&self, snapshot: &SnapshotRecord) -> Result<()>;
    /// Of all agents, oldest first.
    async fn snapshots(&self) -> Result<Vec<SnapshotRecord>>;
    /// Of one agent, oldest first.
    async fn snapshots_of(&self, agent: &Id) -> Result<Vec<SnapshotRecord>>;
    /// The agent is at another of its snapshots, or at none if that is gone, and has its memory.
    async fn move_to_snapshot(&self, agent: &Id, snapshot: &Id, image: Option<&ImageRecord>) -> Result<()>;
    /// From now on the snapshot outlives its agent.
    async fn keep_snapshot(&self, id: &Id, origin: &Origin) -> Result<()>;
    /// What it was the parent of, or where an agent was at it, its own parent takes its place.
    async fn delete_snapshot(&self, id: &Id) -> Result<()>;

    /// What the E2B API added to agents.
    async fn sandboxes(&self) -> Result<Vec<(Id, SandboxRecord)>>;
    async fn set_sandbox(&self, agent: &Id, sandbox: &SandboxRecord) -> Result<()>;

    async fn insert_secret(&self, secret: &SecretRecord) -> Result<()>;
    /// Oldest first.
    async fn secrets(&self, workspace: &Workspace) -> Result<Vec<SecretRecord>>;
    /// Gives it the value, version, metadata and time of `secret`.
    async fn update_secret(&self, secret: &SecretRecord) -> Result<()>;
    async fn delete_secret(&self, workspace: &Workspace, id: &Id) -> Result<()>;

    async fn insert_hold(&self, hold: &HoldRecord) -> Result<()>;
    /// Of all agents, oldest first.
    async fn holds(&self) -> Result<Vec<HoldRecord>>;
    async fn delete_hold(&self, id: &Id) -> Result<()>;

    /// Adds a template. One of the same name is replaced; its id is returned, for its files to be removed.
    async fn insert_template(&self, template: &TemplateRecord) -> Result<Option<Id>>;
    /// A name is looked for before an id.
    async fn template_by_name_or_id(&self, workspace: &Workspace, name_or_id: &str)
    -> Result<TemplateRecord>;
    /// By name.
    async fn list_templates(&self, workspace: &Workspace) -> Result<Vec<TemplateRecord>>;
    /// Of all workspaces.
    async fn template_ids(&self) -> Result<Vec<Id>>;
    async fn delete_template(&self, workspace: &Workspace, id: &Id) -> Result<()>;
    /// How many agents were made from the template.
    async fn agents_of_template(&self, id: &Id) -> Result<u64>;

    /// Adds a build, or records what became of it.
    async fn save_build(&self, build: &BuildRecord) -> Result<()>;
    /// Of all workspaces, oldest first.
    async fn builds(&self) -> Result<Vec<BuildRecord>>;
    /// Deleting what is not there is no error.
    async fn delete_build(&self, id: &str) -> Result<()>;

    async fn insert_volume(&self, volume: &VolumeRecord) -> Result<()>;
    /// Of all workspaces, by name.
    async fn volumes(&self) -> Result<Vec<VolumeRecord>>;
    async fn delete_volume(&self, workspace: &Workspace, id: &Id) -> Result<()>;

    async fn insert_key(&self, key: &KeyRecord) -> Result<()>;
    /// Oldest first.
    async fn list_keys(&self, workspace: &Workspace) -> Result<Vec<KeyRecord>>;
    /// Of all workspaces.
    async fn keys_by_prefix(&self, prefix: &str) -> Result<Vec<KeyRecord>>;
    async fn delete_key(&self, workspace: &Workspace, id: &Id) -> Result<()>;
    /// Records when keys were last used.
    async fn touch_keys(&self, used: &[(Id, i64)]) -> Result<()>;

    /// The secret of this name. `new` becomes it if there is none.
    async fn server_secret(&self, name: &str, new: [u8; 32]) -> Result<[u8; 32]>;

    /// Whether nothing was ever put into the store.
    async fn is_new(&self) -> Result<bool>;
    /// Ends all connections. What was acknowledged is on disk already.
    async fn close(&self);
}
