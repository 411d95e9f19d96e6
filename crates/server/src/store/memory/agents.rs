//! Agents that come, and change their state. Both leave an event.

use dorm_engine::Id;

use super::{Tables, missing};
use crate::records::{
    AgentRecord, BoxChange, Change, EventRecord, ImageChange, NewAgentRecord, Profile, Slots, State, Status,
};
use crate::store::{Result, StoreError};

impl Tables {
    pub(super) fn insert_agent(&mut self, new: &NewAgentRecord, slots: Slots) -> Result<AgentRecord> {
        let same =
            |agent: &AgentRecord| agent.profile.workspace == new.workspace && agent.profile.name == new.name;
        if self.agents.iter().any(same) {
            return Err(StoreError::AlreadyExists {
                kind: "an agent",
                name: new.name.clone(),
            });
        }
        let kept = || {
            self.snapshots
                .iter()
                .filter_map(|snapshot| snapshot.origin.as_ref())
        };
        let free = |slot: &u32| {
            let uids = slots.uid_base(*slot);
            let apart = |base: u32| base.abs_diff(uids) >= Slots::UIDS;
            let another = |agent: &AgentRecord| agent.profile.slot != *slot && apart(agent.profile.uid_base);
            self.agents.iter().all(another) && kept().all(|origin| apart(origin.uid_base))
        };
        let slot = (0..slots.max)
            .find(free)
            .ok_or(StoreError::NoSlot { max: slots.max })?;
        let new = new.clone();
        let profile = Profile {
            id: new.id,
            workspace: new.workspace,
            name: new.name,
            template_id: new.template_id,
            template_name: new.template_name,
            lifetime: new.lifetime,
            spec: new.spec,
            defaults: new.defaults,
            slot,
            uid_base: new.uid_base.unwrap_or_else(|| slots.uid_base(slot)),
            created: new.status.since,
            damage: None,
        };
        let record = AgentRecord {
            profile,
            status: new.status,
            box_record: None,
            image: new.image,
            snapshot: None,
            reach: new.reach,
            setback: None,
            goes_on: false,
        };
        self.agents.push(record.clone());
        self.agents.sort_by_key(|agent| agent.profile.slot);
        event(
            self,
            &record.profile.id,
            None,
            &record.status,
            record.status.since,
            None,
        );
        if let Some(sandbox) = new.sandbox {
            self.sandboxes.push((record.profile.id.clone(), sandbox));
        }
        Ok(record)
    }

    pub(super) fn change_state(&mut self, change: &Change<'_>) -> Result<()> {
        if self.fail_changes_to.contains(&change.to.state) {
            self.refusals += 1;
            let source = sqlx::Error::Io(std::io::Error::other("declared fault"));
            return Err(StoreError::Database {
                doing: "recorded a change of state",
                source,
            });
        }
        let found = self
            .agents
            .iter_mut()
            .find(|agent| agent.profile.id == *change.agent);
        let agent = found.ok_or_else(|| missing("agent", change.agent.as_str()))?;
        agent.status = change.to.clone();
        match change.box_record {
            BoxChange::Keep => {}
            BoxChange::Set(record) => agent.box_record = Some(record.clone()),
            BoxChange::Clear => agent.box_record = None,
        }
        match (change.image, &mut agent.image) {
            (ImageChange::Stale, Some(image)) => image.current = false,
            (ImageChange::Clear, image) => *image = None,
            (ImageChange::Keep, _) | (ImageChange::Stale, None) => {}
        }
        let (from, at) = (Some(change.from), change.at);
        event(self, change.agent, from, change.to, at, change.millis);
        Ok(())
    }
}

fn event(tables: &mut Tables, agent: &Id, from: Option<State>, to: &Status, at: i64, millis: Option<i64>) {
    tables.last_event += 1;
    let seq = tables.last_event;
    let (agent, reason) = (agent.clone(), to.reason.clone());
    tables.events.push(EventRecord {
        seq,
        agent,
        time: at,
        from,
        to: to.state,
        reason,
        millis,
    });
    tables.commits += 1;
}
