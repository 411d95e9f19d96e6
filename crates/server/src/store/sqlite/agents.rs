//! Agents and their events.

use dorm_engine::network::Policy;
use dorm_engine::{Id, Isolation};
use sqlx::{Sqlite, Transaction};

use super::sandboxes::insert_sandbox;
use super::{AllAgents, Result, SqliteStore, StoreError, database, rows, taken};
use crate::records::{
    AgentRecord, BoxChange, Change, EventRecord, ImageChange, ImageRecord, NewAgentRecord, Note, Profile,
    Reach, Sleep, Slots, State, Status, Workspace,
};

/// Older events are removed now and then, so that no agent's history grows without end.
const KEPT_EVENTS: u32 = 1000;
const PRUNE_EVERY: i64 = 32;

impl SqliteStore {
    pub(super) async fn do_insert_agent(&self, new: &NewAgentRecord, slots: Slots) -> Result<AgentRecord> {
        const DOING: &str = "added an agent";
        let mut tx = self.writer.begin().await.map_err(database(DOING))?;
        let slot = lowest_free_slot(&mut tx, slots).await?;
        let profile = Profile {
            id: new.id.clone(),
            workspace: new.workspace.clone(),
            name: new.name.clone(),
            template_id: new.template_id.clone(),
            template_name: new.template_name.clone(),
            lifetime: new.lifetime,
            spec: new.spec.clone(),
            defaults: new.defaults.clone(),
            slot,
            uid_base: new.uid_base.unwrap_or_else(|| slots.uid_base(slot)),
            created: new.status.since,
            damage: None,
        };
        sqlx::query(
            "INSERT INTO agents (id, workspace, name, template_id, template_name, lifetime, spec, defaults, \
             slot, uid_base, state, reason, since, created, image, reach) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(profile.id.as_str())
        .bind(profile.workspace.as_str())
        .bind(&profile.name)
        .bind(profile.template_id.as_str())
        .bind(&profile.template_name)
        .bind(profile.lifetime.as_str())
        .bind(json(&profile.spec))
        .bind(json(&profile.defaults))
        .bind(profile.slot)
        .bind(profile.uid_base)
        .bind(new.status.state.as_str())
        .bind(&new.status.reason)
        .bind(new.status.since)
        .bind(profile.created)
        .bind(new.image.as_ref().map(json))
        .bind(json(&new.reach))
        .execute(&mut *tx)
        .await
        .map_err(taken(DOING, "an agent", &new.name))?;
        insert_event(&mut tx, &new.id, None, &new.status, new.status.since, None).await?;
        if let Some(sandbox) = &new.sandbox {
            insert_sandbox(&mut tx, &new.id, sandbox).await?;
        }
        tx.commit().await.map_err(database(DOING))?;
        Ok(AgentRecord {
            profile,
            status: new.status.clone(),
            box_record: None,
            image: new.image.clone(),
            snapshot: None,
            reach: new.reach.clone(),
            setback: None,
            goes_on: false,
        })
    }

    pub(super) async fn all_agents(&self) -> Result<AllAgents> {
        let rows = sqlx::query("SELECT * FROM agents ORDER BY slot")
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the agents"))?;
        let mut all = AllAgents::default();
        for row in &rows {
            match rows::agent(row) {
                Ok((agent, damage)) => {
                    all.damage
                        .extend(damage.map(|why| format!("agent {}: {why}", agent.profile.id)));
                    all.readable.push(agent);
                }
                Err(why) => all.damage.push(format!("an agent: {why}")),
            }
        }
        Ok(all)
    }

    pub(super) async fn do_change_state(&self, change: &Change<'_>) -> Result<()> {
        const DOING: &str = "recorded a change of state";
        let to = change.to;
        let mut tx = self.writer.begin().await.map_err(database(DOING))?;
        let (set, record) = match change.box_record {
            BoxChange::Keep => (false, None),
            BoxChange::Set(record) => (true, Some(json(record))),
            BoxChange::Clear => (true, None),
        };
        let updated = sqlx::query(
            "UPDATE agents SET state = ?, reason = ?, since = ?, \
             box_record = CASE WHEN ? THEN ? ELSE box_record END, \
             image = CASE ? WHEN 'clear' THEN NULL WHEN 'stale' THEN json_set(image, '$.current', json('false')) \
             ELSE image END WHERE id = ?",
        )
        .bind(to.state.as_str())
        .bind(&to.reason)
        .bind(to.since)
        .bind(set)
        .bind(record)
        .bind(match change.image {
            ImageChange::Keep => "keep",
            ImageChange::Stale => "stale",
            ImageChange::Clear => "clear",
        })
        .bind(change.agent.as_str())
        .execute(&mut *tx)
        .await
        .map_err(database(DOING))?;
        found(change.agent, updated.rows_affected())?;
        let (from, at) = (Some(change.from), change.at);
        insert_event(&mut tx, change.agent, from, to, at, change.millis).await?;
        tx.commit().await.map_err(database(DOING))
    }

    /// By a query with a place for `value` and one for the agent.
    async fn update(
        &self,
        query: &'static str,
        value: Option<String>,
        agent: &Id,
        doing: &'static str,
    ) -> Result<()> {
        let updated = sqlx::query(query)
            .bind(value)
            .bind(agent.as_str())
            .execute(&self.writer)
            .await
            .map_err(database(doing))?;
        found(agent, updated.rows_affected())
    }

    pub(super) async fn do_set_image(&self, agent: &Id, image: Option<&ImageRecord>) -> Result<()> {
        self.update(
            "UPDATE agents SET image = ? WHERE id = ?",
            image.map(json),
            agent,
            "recorded a memory image",
        )
        .await
    }

    pub(super) async fn do_set_setback(&self, agent: &Id, setback: &Note) -> Result<()> {
        self.update(
            "UPDATE agents SET setback = ? WHERE id = ?",
            Some(json(setback)),
            agent,
            "recorded a setback",
        )
        .await
    }

    pub(super) async fn do_set_goes_on(&self, agent: &Id, goes_on: bool) -> Result<()> {
        let updated = sqlx::query("UPDATE agents SET goes_on = ? WHERE id = ?")
            .bind(goes_on)
            .bind(agent.as_str())
            .execute(&self.writer)
            .await
            .map_err(database("recorded whether an agent goes on"))?;
        found(agent, updated.rows_affected())
    }

    pub(super) async fn do_set_reach(&self, agent: &Id, reach: &Reach) -> Result<()> {
        self.update(
            "UPDATE agents SET reach = ? WHERE id = ?",
            Some(json(reach)),
            agent,
            "recorded who may reach an agent",
        )
        .await
    }

    pub(super) async fn do_set_isolation(&self, agent: &Id, isolation: Isolation) -> Result<()> {
        self.update(
            "UPDATE agents SET spec = json_set(spec, '$.isolation', ?) WHERE id = ?",
            Some(isolation.to_string()),
            agent,
            "recorded an isolation",
        )
        .await
    }

    pub(super) async fn do_set_network(&self, agent: &Id, policy: &Policy) -> Result<()> {
        let updated =
            sqlx::query("UPDATE agents SET spec = json_set(spec, '$.network', json(?)) WHERE id = ?")
                .bind(json(policy))
                .bind(agent.as_str())
                .execute(&self.writer)
                .await
                .map_err(database("recorded a network policy"))?;
        found(agent, updated.rows_affected())
    }

    pub(super) async fn do_set_sleep(&self, agent: &Id, sleep: &Sleep) -> Result<()> {
        self.update(
            "UPDATE agents SET spec = json_set(spec, '$.sleep', json(?)) WHERE id = ?",
            Some(json(sleep)),
            agent,
            "recorded when an agent goes to sleep",
        )
        .await
    }

    pub(super) async fn do_delete_agent(&self, id: &Id) -> Result<()> {
        const DOING: &str = "deleted an agent";
        let mut tx = self.writer.begin().await.map_err(database(DOING))?;
        for statement in [
            "DELETE FROM snapshots WHERE agent = ? AND origin IS NULL",
            "DELETE FROM agents WHERE id = ?",
        ] {
            sqlx::query(statement)
                .bind(id.as_str())
                .execute(&mut *tx)
                .await
                .map_err(database(DOING))?;
        }
        tx.commit().await.map_err(database(DOING))
    }

    pub(super) async fn newest_events_of(&self, agent: &Id, limit: u32) -> Result<Vec<EventRecord>> {
        let rows = sqlx::query("SELECT * FROM events WHERE agent = ? ORDER BY seq DESC LIMIT ?")
            .bind(agent.as_str())
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(database("read the events"))?;
        Ok(rows::readable(&rows, rows::event))
    }

    pub(super) async fn newest_events_of_all(
        &self,
        workspace: &Workspace,
        limit: u32,
    ) -> Result<Vec<EventRecord>> {
        let rows = sqlx::query(
            "SELECT events.* FROM events JOIN agents ON agents.id = events.agent \
             WHERE agents.workspace = ? ORDER BY seq DESC LIMIT ?",
        )
        .bind(workspace.as_str())
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(database("read the events"))?;
        Ok(rows::readable(&rows, rows::event))
    }

    pub(super) async fn do_events_after(
        &self,
        workspace: &Workspace,
        agent: Option<&Id>,
        seq: i64,
        limit: u32,
    ) -> Result<Vec<EventRecord>> {
        let rows = sqlx::query(
            "SELECT events.* FROM events JOIN agents ON agents.id = events.agent \
             WHERE seq > ?1 AND agents.workspace = ?2 AND (?3 IS NULL OR agent = ?3) ORDER BY seq LIMIT ?4",
        )
        .bind(seq)
        .bind(workspace.as_str())
        .bind(agent.map(Id::as_str))
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(database("read the events"))?;
        Ok(rows::readable(&rows, rows::event))
    }

    pub(super) async fn count_agents_of_template(&self, id: &Id) -> Result<u64> {
        sqlx::query_scalar("SELECT count(*) FROM agents WHERE template_id = ?")
            .bind(id.as_str())
            .fetch_one(&self.readers)
            .await
            .map(|count: i64| count.unsigned_abs())
            .map_err(database("counted agents"))
    }
}

fn found(agent: &Id, rows: u64) -> Result<()> {
    match rows {
        0 => Err(StoreError::NotFound {
            kind: "agent",
            name: agent.to_string(),
        }),
        _ => Ok(()),
    }
}

/// One whose host uids nobody has: those of a fork, and those that a kept snapshot is bound to, are of a slot that may have
/// been free for long. Where the first uid is another than it was, theirs may be in part of one slot and in part of the next.
async fn lowest_free_slot(tx: &mut Transaction<'_, Sqlite>, slots: Slots) -> Result<u32> {
    let free: i64 = sqlx::query_scalar(
        "WITH bases(uid) AS (SELECT uid_base FROM agents UNION \
         SELECT json_extract(origin, '$.uid_base') FROM snapshots WHERE json_valid(origin)), \
         taken(slot) AS MATERIALIZED (SELECT slot FROM agents UNION \
         SELECT (uid - ?1) / ?2 FROM bases WHERE uid >= ?1 UNION \
         SELECT (uid - ?1 + ?2 - 1) / ?2 FROM bases WHERE uid > ?1 - ?2) \
         SELECT min(slot) + 1 FROM (SELECT -1 AS slot UNION ALL SELECT slot FROM taken) \
         WHERE slot + 1 NOT IN taken",
    )
    .bind(slots.first_uid)
    .bind(Slots::UIDS)
    .fetch_one(&mut **tx)
    .await
    .map_err(database("looked for a free slot"))?;
    let slot = u32::try_from(free).unwrap_or(u32::MAX);
    if slot < slots.max {
        Ok(slot)
    } else {
        Err(StoreError::NoSlot { max: slots.max })
    }
}

async fn insert_event(
    tx: &mut Transaction<'_, Sqlite>,
    agent: &Id,
    from: Option<State>,
    to: &Status,
    at: i64,
    millis: Option<i64>,
) -> Result<()> {
    const DOING: &str = "recorded an event";
    let inserted = sqlx::query(
        "INSERT INTO events (agent, time, from_state, to_state, reason, millis) VALUES (?, ?, ?, ?, ?, ?)",
    )
    .bind(agent.as_str())
    .bind(at)
    .bind(from.map(State::as_str))
    .bind(to.state.as_str())
    .bind(&to.reason)
    .bind(millis)
    .execute(&mut **tx)
    .await
    .map_err(database(DOING))?;
    if inserted.last_insert_rowid() % PRUNE_EVERY == 0 {
        sqlx::query(
            "DELETE FROM events WHERE agent = ?1 AND seq <= \
             (SELECT seq FROM events WHERE agent = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
        )
        .bind(agent.as_str())
        .bind(KEPT_EVENTS)
        .execute(&mut **tx)
        .await
        .map_err(database(DOING))?;
    }
    Ok(())
}

pub(super) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("records are plain data, which is always JSON")
}
