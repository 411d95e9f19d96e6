//! Records in memory, for tests of what stands on a store. Writes can be made to fail.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use dorm_engine::network::Policy;
use dorm_engine::{Id, Isolation};

use super::{AllAgents, Result, Store, StoreError};
use crate::records::{
    AgentRecord, BuildRecord, Change, EventRecord, HoldRecord, ImageRecord, KeyRecord, NewAgentRecord, Note,
    Origin, Reach, SandboxRecord, SecretRecord, Sleep, Slots, SnapshotRecord, State, TemplateRecord,
    VolumeRecord, Workspace,
};

mod agents;

#[derive(Default)]
pub(crate) struct MemoryStore(Mutex<Tables>);

#[derive(Default)]
struct Tables {
    agents: Vec<AgentRecord>,
    events: Vec<EventRecord>,
    /// Its number, which no other has, also once it is gone.
    last_event: i64,
    templates: Vec<TemplateRecord>,
    keys: Vec<KeyRecord>,
    volumes: Vec<VolumeRecord>,
    holds: Vec<HoldRecord>,
    snapshots: Vec<SnapshotRecord>,
    secrets: BTreeMap<String, [u8; 32]>,
    sandboxes: Vec<(Id, SandboxRecord)>,
    workspace_secrets: Vec<SecretRecord>,
    builds: Vec<BuildRecord>,
    fail_changes_to: Vec<State>,
    refusals: u64,
    fail_images: bool,
    commits: u64,
}

impl Tables {
    fn is_of(&self, workspace: &Workspace, event: &EventRecord) -> bool {
        let agent = self.agents.iter().find(|agent| agent.profile.id == event.agent);
        agent.is_some_and(|agent| agent.profile.workspace == *workspace)
    }
}

impl MemoryStore {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes to these states, and to no others, are refused from now on.
    pub(crate) fn fail_changes_to(&self, states: impl IntoIterator<Item = State>) {
        self.tables().fail_changes_to = states.into_iter().collect();
    }

    /// Changes of state that were refused.
    pub(crate) fn refusals(&self) -> u64 {
        self.tables().refusals
    }

    /// Memory images cannot be recorded from now on, or can be again.
    pub(crate) fn fail_images(&self, fail: bool) {
        self.tables().fail_images = fail;
    }

    /// Each would be an fsync on a disk.
    pub(crate) fn commits(&self) -> u64 {
        self.tables().commits
    }

    pub(crate) fn damage(&self, id: &Id, what: &str) {
        let mut tables = self.tables();
        let agent = tables
            .agents
            .iter_mut()
            .find(|agent| agent.profile.id == *id)
            .expect("an agent to damage");
        agent.profile.damage = Some(what.to_owned());
    }
}

fn missing(kind: &'static str, name: &str) -> StoreError {
    StoreError::NotFound {
        kind,
        name: name.to_owned(),
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn insert_agent(&self, new: &NewAgentRecord, slots: Slots) -> Result<AgentRecord> {
        self.tables().insert_agent(new, slots)
    }

    async fn agents(&self) -> Result<AllAgents> {
        Ok(AllAgents {
            readable: self.tables().agents.clone(),
            damage: Vec::new(),
        })
    }

    async fn damage(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    async fn all_damage(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    async fn change_state(&self, change: &Change<'_>) -> Result<()> {
        self.tables().change_state(change)
    }

    async fn set_image(&self, agent: &Id, image: Option<&ImageRecord>) -> Result<()> {
        let mut tables = self.tables();
        if tables.fail_images {
            let source = sqlx::Error::Io(std::io::Error::other("declared fault"));
            return Err(StoreError::Database {
                doing: "recorded a memory image",
                source,
            });
        }
        let found = tables.agents.iter_mut().find(|known| known.profile.id == *agent);
        found.ok_or_else(|| missing("agent", agent.as_str()))?.image = image.cloned();
        tables.commits += 1;
        Ok(())
    }

    async fn set_setback(&self, agent: &Id, setback: &Note) -> Result<()> {
        let mut tables = self.tables();
        let found = tables.agents.iter_mut().find(|known| known.profile.id == *agent);
        found.ok_or_else(|| missing("agent", agent.as_str()))?.setback = Some(setback.clone());
        Ok(())
    }

    async fn set_goes_on(&self, agent: &Id, goes_on: bool) -> Result<()> {
        let mut tables = self.tables();
        let found = tables.agents.iter_mut().find(|known| known.profile.id == *agent);
        found.ok_or_else(|| missing("agent", agent.as_str()))?.goes_on = goes_on;
        Ok(())
    }

    async fn set_reach(&self, agent: &Id, reach: &Reach) -> Result<()> {
        let mut tables = self.tables();
        let found = tables.agents.iter_mut().find(|known| known.profile.id == *agent);
        found.ok_or_else(|| missing("agent", agent.as_str()))?.reach = reach.clone();
        Ok(())
    }

    async fn set_isolation(&self, id: &Id, isolation: Isolation) -> Result<()> {
        let mut tables = self.tables();
        let agent = tables.agents.iter_mut().find(|agent| agent.profile.id == *id);
        let agent = agent.ok_or_else(|| missing("agent", id.as_str()))?;
        agent.profile.spec.isolation = isolation;
        tables.commits += 1;
        Ok(())
    }

    async fn set_network(&self, id: &Id, policy: &Policy) -> Result<()> {
        let mut tables = self.tables();
        let agent = tables.agents.iter_mut().find(|agent| agent.profile.id == *id);
        let agent = agent.ok_or_else(|| missing("agent", id.as_str()))?;
        agent.profile.spec.network = policy.clone();
        tables.commits += 1;
        Ok(())
    }

    async fn set_sleep(&self, id: &Id, sleep: &Sleep) -> Result<()> {
        let mut tables = self.tables();
        let agent = tables.agents.iter_mut().find(|agent| agent.profile.id == *id);
        let agent = agent.ok_or_else(|| missing("agent", id.as_str()))?;
        agent.profile.spec.sleep = *sleep;
        tables.commits += 1;
        Ok(())
    }

    async fn delete_agent(&self, id: &Id) -> Result<()> {
        let mut tables = self.tables();
        tables.agents.retain(|agent| agent.profile.id != *id);
        tables.events.retain(|event| event.agent != *id);
        tables.holds.retain(|hold| hold.agent != *id);
        let kept = |snapshot: &SnapshotRecord| snapshot.agent != *id || snapshot.origin.is_some();
        tables.snapshots.retain(kept);
        tables.sandboxes.retain(|(agent, _)| agent != id);
        tables.commits += 1;
        Ok(())
    }

    async fn events(&self, agent: &Id, limit: u32) -> Result<Vec<EventRecord>> {
        let tables = self.tables();
        let newest = tables.events.iter().rev().filter(|event| event.agent == *agent);
        Ok(newest.take(limit as usize).cloned().collect())
    }

    async fn events_after(
        &self,
        workspace: &Workspace,
        agent: Option<&Id>,
        seq: i64,
        limit: u32,
    ) -> Result<Vec<EventRecord>> {
        let tables = self.tables();
        let of = |event: &&EventRecord| {
            tables.is_of(workspace, event) && agent.is_none_or(|id| event.agent == *id)
        };
        let after = tables.events.iter().filter(|event| event.seq > seq).filter(of);
        Ok(after.take(limit as usize).cloned().collect())
    }

    async fn newest_events(&self, workspace: &Workspace, limit: u32) -> Result<Vec<EventRecord>> {
        let tables = self.tables();
        let newest = tables
            .events
            .iter()
            .rev()
            .filter(|event| tables.is_of(workspace, event));
        Ok(newest.take(limit as usize).cloned().collect())
    }

    async fn insert_snapshot(&self, snapshot: &SnapshotRecord) -> Result<()> {
        let mut tables = self.tables();
        let found = tables
            .agents
            .iter_mut()
            .find(|agent| agent.profile.id == snapshot.agent);
        let agent = found.ok_or_else(|| missing("agent", snapshot.agent.as_str()))?;
        let parent = agent.snapshot.replace(snapshot.id.clone());
        tables.snapshots.push(SnapshotRecord {
            parent,
            ..snapshot.clone()
        });
        tables.commits += 1;
        Ok(())
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotRecord>> {
        Ok(self.tables().snapshots.clone())
    }

    async fn snapshots_of(&self, agent: &Id) -> Result<Vec<SnapshotRecord>> {
        let tables = self.tables();
        let of = tables
            .snapshots
            .iter()
            .filter(|snapshot| snapshot.agent == *agent);
        Ok(of.cloned().collect())
    }

    async fn move_to_snapshot(&self, agent: &Id, snapshot: &Id, image: Option<&ImageRecord>) -> Result<()> {
        let mut tables = self.tables();
        let is_there = tables.snapshots.iter().any(|known| known.id == *snapshot);
        let found = tables.agents.iter_mut().find(|known| known.profile.id == *agent);
        let agent = found.ok_or_else(|| missing("agent", agent.as_str()))?;
        agent.snapshot = is_there.then(|| snapshot.clone());
        agent.image = image.cloned();
        Ok(())
    }

    async fn keep_snapshot(&self, id: &Id, origin: &Origin) -> Result<()> {
        let mut tables = self.tables();
        let found = tables.snapshots.iter_mut().find(|snapshot| snapshot.id == *id);
        found.ok_or_else(|| missing("snapshot", id.as_str()))?.origin = Some(origin.clone());
        Ok(())
    }

    async fn sandboxes(&self) -> Result<Vec<(Id, SandboxRecord)>> {
        Ok(self.tables().sandboxes.clone())
    }

    async fn set_sandbox(&self, agent: &Id, sandbox: &SandboxRecord) -> Result<()> {
        // As a disk does, it lets others go on meanwhile.
        tokio::task::yield_now().await;
        let mut tables = self.tables();
        let found = tables.sandboxes.iter_mut().find(|(known, _)| known == agent);
        found.ok_or_else(|| missing("sandbox", agent.as_str()))?.1 = sandbox.clone();
        Ok(())
    }

    async fn insert_secret(&self, secret: &SecretRecord) -> Result<()> {
        let mut tables = self.tables();
        let same = |known: &&SecretRecord| known.workspace == secret.workspace && known.name == secret.name;
        if tables.workspace_secrets.iter().any(|known| same(&known)) {
            return Err(StoreError::AlreadyExists {
                kind: "a secret",
                name: secret.name.clone(),
            });
        }
        tables.workspace_secrets.push(secret.clone());
        Ok(())
    }

    async fn secrets(&self, workspace: &Workspace) -> Result<Vec<SecretRecord>> {
        let tables = self.tables();
        let of = tables
            .workspace_secrets
            .iter()
            .filter(|one| one.workspace == *workspace);
        Ok(of.cloned().collect())
    }

    async fn update_secret(&self, secret: &SecretRecord) -> Result<()> {
        let mut tables = self.tables();
        let found = tables
            .workspace_secrets
            .iter_mut()
            .find(|one| one.id == secret.id);
        *found.ok_or_else(|| missing("secret", secret.id.as_str()))? = secret.clone();
        Ok(())
    }

    async fn delete_secret(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let mut tables = self.tables();
        let all = &mut tables.workspace_secrets;
        let found = all
            .iter()
            .position(|one| one.id == *id && one.workspace == *workspace);
        all.remove(found.ok_or_else(|| missing("secret", id.as_str()))?);
        Ok(())
    }

    async fn delete_snapshot(&self, id: &Id) -> Result<()> {
        let mut tables = self.tables();
        let Some(at) = tables.snapshots.iter().position(|snapshot| snapshot.id == *id) else {
            return Ok(());
        };
        let parent = tables.snapshots.remove(at).parent;
        for snapshot in &mut tables.snapshots {
            if snapshot.parent.as_ref() == Some(id) {
                snapshot.parent.clone_from(&parent);
            }
        }
        for agent in &mut tables.agents {
            if agent.snapshot.as_ref() == Some(id) {
                agent.snapshot.clone_from(&parent);
            }
        }
        Ok(())
    }

    async fn insert_hold(&self, hold: &HoldRecord) -> Result<()> {
        self.tables().holds.push(hold.clone());
        Ok(())
    }

    async fn holds(&self) -> Result<Vec<HoldRecord>> {
        Ok(self.tables().holds.clone())
    }

    async fn delete_hold(&self, id: &Id) -> Result<()> {
        self.tables().holds.retain(|hold| hold.id != *id);
        Ok(())
    }

    async fn insert_template(&self, template: &TemplateRecord) -> Result<Option<Id>> {
        let mut tables = self.tables();
        let same = |old: &TemplateRecord| old.workspace == template.workspace && old.name == template.name;
        let old = tables
            .templates
            .iter()
            .position(same)
            .map(|index| tables.templates.remove(index).id);
        tables.templates.push(template.clone());
        tables.templates.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(old)
    }

    async fn template_by_name_or_id(
        &self,
        workspace: &Workspace,
        name_or_id: &str,
    ) -> Result<TemplateRecord> {
        let tables = self.tables();
        let ours = || {
            tables
                .templates
                .iter()
                .filter(|template| template.workspace == *workspace)
        };
        let found = ours()
            .find(|template| template.name == name_or_id)
            .or_else(|| ours().find(|template| template.id.as_str() == name_or_id));
        found.cloned().ok_or_else(|| missing("template", name_or_id))
    }

    async fn list_templates(&self, workspace: &Workspace) -> Result<Vec<TemplateRecord>> {
        let tables = self.tables();
        Ok(tables
            .templates
            .iter()
            .filter(|template| template.workspace == *workspace)
            .cloned()
            .collect())
    }

    async fn template_ids(&self) -> Result<Vec<Id>> {
        Ok(self
            .tables()
            .templates
            .iter()
            .map(|template| template.id.clone())
            .collect())
    }

    async fn delete_template(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let mut tables = self.tables();
        let found = tables
            .templates
            .iter()
            .position(|old| old.workspace == *workspace && old.id == *id);
        tables
            .templates
            .remove(found.ok_or_else(|| missing("template", id.as_str()))?);
        Ok(())
    }

    async fn agents_of_template(&self, id: &Id) -> Result<u64> {
        Ok(self
            .tables()
            .agents
            .iter()
            .filter(|agent| agent.profile.template_id == *id)
            .count() as u64)
    }

    async fn save_build(&self, build: &BuildRecord) -> Result<()> {
        let mut tables = self.tables();
        match tables.builds.iter_mut().find(|known| known.id == build.id) {
            Some(known) => known.clone_from(build),
            None => tables.builds.push(build.clone()),
        }
        Ok(())
    }

    async fn builds(&self) -> Result<Vec<BuildRecord>> {
        Ok(self.tables().builds.clone())
    }

    async fn delete_build(&self, id: &str) -> Result<()> {
        self.tables().builds.retain(|known| known.id != id);
        Ok(())
    }

    async fn insert_volume(&self, volume: &VolumeRecord) -> Result<()> {
        let mut tables = self.tables();
        let same = |known: &VolumeRecord| known.workspace == volume.workspace && known.name == volume.name;
        if tables.volumes.iter().any(same) {
            return Err(StoreError::AlreadyExists {
                kind: "a volume",
                name: volume.name.clone(),
            });
        }
        tables.volumes.push(volume.clone());
        tables.volumes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(())
    }

    async fn volumes(&self) -> Result<Vec<VolumeRecord>> {
        Ok(self.tables().volumes.clone())
    }

    async fn delete_volume(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let mut tables = self.tables();
        let before = tables.volumes.len();
        tables
            .volumes
            .retain(|volume| volume.id != *id || volume.workspace != *workspace);
        if tables.volumes.len() == before {
            return Err(missing("volume", id.as_str()));
        }
        Ok(())
    }

    async fn insert_key(&self, key: &KeyRecord) -> Result<()> {
        self.tables().keys.push(key.clone());
        Ok(())
    }

    async fn list_keys(&self, workspace: &Workspace) -> Result<Vec<KeyRecord>> {
        Ok(self
            .tables()
            .keys
            .iter()
            .filter(|key| key.workspace == *workspace)
            .cloned()
            .collect())
    }

    async fn keys_by_prefix(&self, prefix: &str) -> Result<Vec<KeyRecord>> {
        Ok(self
            .tables()
            .keys
            .iter()
            .filter(|key| key.prefix == prefix)
            .cloned()
            .collect())
    }

    async fn delete_key(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let mut tables = self.tables();
        let found = tables
            .keys
            .iter()
            .position(|key| key.workspace == *workspace && key.id == *id);
        tables
            .keys
            .remove(found.ok_or_else(|| missing("key", id.as_str()))?);
        Ok(())
    }

    async fn touch_keys(&self, used: &[(Id, i64)]) -> Result<()> {
        for key in &mut self.tables().keys {
            let time = used.iter().find(|(id, _)| *id == key.id).map(|(_, time)| *time);
            key.last_used = key.last_used.max(time);
        }
        Ok(())
    }

    async fn server_secret(&self, name: &str, new: [u8; 32]) -> Result<[u8; 32]> {
        Ok(*self.tables().secrets.entry(name.to_owned()).or_insert(new))
    }

    async fn is_new(&self) -> Result<bool> {
        let tables = self.tables();
        Ok(tables.agents.is_empty() && tables.templates.is_empty() && tables.keys.is_empty())
    }

    async fn close(&self) {}
}

mod tests {
    use super::MemoryStore;
    use crate::store::conformance::conformance;

    async fn open() -> (MemoryStore, ()) {
        (MemoryStore::default(), ())
    }

    conformance!(open);
}
