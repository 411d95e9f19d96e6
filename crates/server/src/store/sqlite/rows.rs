//! From rows to records. What cannot be read of a row is named, and hurts no other row.

use std::str::FromStr;

use dorm_engine::{Id, Isolation, Limits};
use serde::de::DeserializeOwned;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::{Result, StoreError};
use crate::records::{
    AgentRecord, AgentSpec, BuildRecord, EventRecord, HoldRecord, KeyRecord, Lifetime, Profile,
    SandboxRecord, SecretRecord, SnapshotRecord, State, Status, TemplateRecord, VolumeRecord, Workspace,
};

/// Reads the columns of one row and collects what is wrong with them.
struct Columns<'r> {
    row: &'r SqliteRow,
    damage: Vec<String>,
}

impl<'r> Columns<'r> {
    fn of(row: &'r SqliteRow) -> Self {
        Self {
            row,
            damage: Vec::new(),
        }
    }

    fn get<T>(&mut self, column: &'static str) -> Option<T>
    where
        T: sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
    {
        self.row
            .try_get(column)
            .map_err(|error| self.damage.push(error.to_string()))
            .ok()
    }

    fn parse<T: FromStr<Err: ToString>>(&mut self, column: &'static str) -> Option<T> {
        let text: String = self.get(column)?;
        text.parse()
            .map_err(|error: T::Err| self.note(column, &error.to_string()))
            .ok()
    }

    fn json<T: DeserializeOwned>(&mut self, column: &'static str) -> Option<T> {
        let text: String = self.get(column)?;
        serde_json::from_str(&text)
            .map_err(|error| self.note(column, &error.to_string()))
            .ok()
    }

    fn unsigned<T: TryFrom<i64>>(&mut self, column: &'static str) -> Option<T> {
        let number: i64 = self.get(column)?;
        T::try_from(number)
            .map_err(|_| self.note(column, &format!("{number} is out of range")))
            .ok()
    }

    fn note(&mut self, column: &str, error: &str) {
        self.damage.push(format!("{column}: {error}"));
    }

    fn damage(self) -> Option<String> {
        (!self.damage.is_empty()).then(|| self.damage.join("; "))
    }
}

/// An agent as far as its row can be read. An error if there is not even an id.
/// An agent, and what of it could not be read.
pub(super) fn agent(row: &SqliteRow) -> Result<(AgentRecord, Option<String>), String> {
    let mut columns = Columns::of(row);
    let Some(id) = columns.parse::<Id>("id") else {
        return Err(columns.damage().unwrap_or_default());
    };
    let workspace: Option<String> = columns.get("workspace");
    let template_id = columns.parse("template_id").unwrap_or_else(|| id.clone());
    let nothing = Limits {
        cpu_millis: 0,
        memory: 0,
        pids: 0,
        disk: 0,
        io_bps: None,
    };
    let reason: String = columns.get("reason").unwrap_or_default();
    let box_json: Option<String> = columns.get("box_record").flatten();
    let snapshot: Option<String> = columns.get("snapshot").flatten();
    let setback: Option<String> = columns.get("setback").flatten();
    let image_json: Option<String> = columns.get("image").flatten();
    let goes_on: bool = columns.get("goes_on").unwrap_or_default();
    let mut status = Status {
        state: State::Failed,
        reason,
        since: columns.get("since").unwrap_or_default(),
    };
    let profile = Profile {
        workspace: workspace.map_or_else(Workspace::default, |id| Workspace::new(&id)),
        name: columns.get("name").unwrap_or_else(|| id.to_string()),
        template_id,
        template_name: columns.get("template_name").unwrap_or_default(),
        lifetime: columns.parse("lifetime").unwrap_or(Lifetime::Persistent),
        spec: columns.json("spec").unwrap_or(AgentSpec {
            isolation: Isolation::default(),
            limits: nothing,
            env: Default::default(),
            sleep: Default::default(),
            network: Default::default(),
            volumes: Vec::new(),
        }),
        defaults: columns.json("defaults").unwrap_or_default(),
        slot: columns.unsigned("slot").unwrap_or(u32::MAX),
        uid_base: columns.unsigned("uid_base").unwrap_or(u32::MAX),
        created: columns.get("created").unwrap_or_default(),
        damage: columns.damage(),
        id,
    };
    // State, box and image are of the moment: if they cannot be read, the agent starts anew from its
    // files. The rest is what it starts from.
    let mut columns = Columns::of(row);
    let box_record = box_json.and_then(|json| {
        serde_json::from_str(&json)
            .map_err(|error| columns.note("box_record", &error.to_string()))
            .ok()
    });
    let image = image_json.and_then(|json| {
        serde_json::from_str(&json)
            .map_err(|error| columns.note("image", &error.to_string()))
            .ok()
    });
    let reach = columns.json("reach").unwrap_or_default();
    if let Some(state) = columns.parse("state") {
        status.state = state;
    }
    let momentary = columns.damage();
    let damage: Vec<&str> = profile
        .damage
        .iter()
        .chain(&momentary)
        .map(String::as_str)
        .collect();
    let damage = (!damage.is_empty()).then(|| damage.join("; "));
    if let Some(why) = &damage {
        status.state = if status.state == State::Deleting {
            State::Deleting
        } else {
            State::Failed
        };
        status.reason = format!("its record is damaged: {why}");
    }
    let record = AgentRecord {
        profile,
        status,
        box_record,
        image,
        snapshot: snapshot.and_then(|id| id.parse().ok()),
        reach,
        setback: setback.and_then(|json| serde_json::from_str(&json).ok()),
        goes_on,
    };
    Ok((record, damage))
}

pub(super) fn event(row: &SqliteRow) -> Result<EventRecord> {
    let mut columns = Columns::of(row);
    let from: Option<Option<String>> = columns.get("from_state");
    let record = (|| {
        Some(EventRecord {
            seq: columns.get("seq")?,
            agent: columns.parse("agent")?,
            time: columns.get("time")?,
            from: from?.and_then(|state| state.parse().ok()),
            to: columns.parse("to_state")?,
            reason: columns.get("reason")?,
            millis: columns.get("millis")?,
        })
    })();
    record.ok_or_else(|| damaged("event", row, columns))
}

pub(super) fn snapshot(row: &SqliteRow) -> Result<SnapshotRecord> {
    let mut columns = Columns::of(row);
    let parent: Option<Option<String>> = columns.get("parent");
    let origin: Option<Option<String>> = columns.get("origin");
    let kept = origin.clone().flatten().is_some();
    let record = (|| {
        Some(SnapshotRecord {
            id: columns.parse("id")?,
            agent: columns.parse("agent")?,
            made: columns.get("made")?,
            label: columns.get("label")?,
            kind: columns.parse("kind")?,
            parent: parent?.and_then(|id| id.parse().ok()),
            isolation: columns.parse("isolation")?,
            size: columns.unsigned("size")?,
            origin: if kept {
                Some(columns.json("origin")?)
            } else {
                origin.map(|_| None)?
            },
        })
    })();
    record.ok_or_else(|| damaged("snapshot", row, columns))
}

pub(super) fn sandbox(row: &SqliteRow) -> Result<(Id, SandboxRecord)> {
    let mut columns = Columns::of(row);
    let record = (|| Some((columns.parse("agent")?, columns.json("record")?)))();
    record.ok_or_else(|| damaged("sandbox", row, columns))
}

pub(super) fn build(row: &SqliteRow) -> Result<BuildRecord> {
    let mut columns = Columns::of(row);
    let record = columns.json("record");
    record.ok_or_else(|| damaged("build", row, columns))
}

pub(super) fn hold(row: &SqliteRow) -> Result<HoldRecord> {
    let mut columns = Columns::of(row);
    let record = (|| {
        Some(HoldRecord {
            id: columns.parse("id")?,
            agent: columns.parse("agent")?,
            reason: columns.get("reason")?,
            made: columns.get("made")?,
            until: columns.get("until")?,
        })
    })();
    record.ok_or_else(|| damaged("hold", row, columns))
}

pub(super) fn template(row: &SqliteRow) -> Result<TemplateRecord> {
    let mut columns = Columns::of(row);
    let record = (|| {
        Some(TemplateRecord {
            id: columns.parse("id")?,
            workspace: Workspace::new(&columns.get::<String>("workspace")?),
            name: columns.get("name")?,
            recipe_hash: columns.get("recipe_hash")?,
            defaults: columns.json("defaults")?,
            built: columns.json("built")?,
            size: columns.unsigned("size")?,
            created: columns.get("created")?,
        })
    })();
    record.ok_or_else(|| damaged("template", row, columns))
}

pub(super) fn secret(row: &SqliteRow) -> Result<SecretRecord> {
    let mut columns = Columns::of(row);
    let record = (|| {
        Some(SecretRecord {
            id: columns.parse("id")?,
            workspace: Workspace::new(&columns.get::<String>("workspace")?),
            name: columns.get("name")?,
            value: columns.get("value")?,
            version: columns.get("version")?,
            metadata: columns.json("metadata")?,
            created: columns.get("created")?,
            updated: columns.get("updated")?,
        })
    })();
    record.ok_or_else(|| damaged("secret", row, columns))
}

pub(super) fn volume(row: &SqliteRow) -> Result<VolumeRecord> {
    let mut columns = Columns::of(row);
    let record = (|| {
        Some(VolumeRecord {
            id: columns.parse("id")?,
            workspace: Workspace::new(&columns.get::<String>("workspace")?),
            name: columns.get("name")?,
            created: columns.get("created")?,
        })
    })();
    record.ok_or_else(|| damaged("volume", row, columns))
}

pub(super) fn key(row: &SqliteRow) -> Result<KeyRecord> {
    let mut columns = Columns::of(row);
    let record = (|| {
        Some(KeyRecord {
            id: columns.parse("id")?,
            workspace: Workspace::new(&columns.get::<String>("workspace")?),
            name: columns.get("name")?,
            prefix: columns.get("prefix")?,
            hash: columns.get::<Vec<u8>>("hash")?.try_into().ok()?,
            created: columns.get("created")?,
            last_used: columns.get("last_used")?,
        })
    })();
    record.ok_or_else(|| damaged("key", row, columns))
}

fn damaged(kind: &'static str, row: &SqliteRow, columns: Columns<'_>) -> StoreError {
    let names = ["name", "id", "agent"].into_iter();
    let name = names.filter_map(|column| row.try_get(column).ok()).next();
    StoreError::Damaged {
        kind,
        name: name.unwrap_or_default(),
        why: columns.damage().unwrap_or_else(|| "wrong length".to_owned()),
    }
}

/// Those that can be read; the rest is only logged, so that one bad row does not hide the others.
pub(super) fn readable<T>(rows: &[SqliteRow], read: impl Fn(&SqliteRow) -> Result<T>) -> Vec<T> {
    let logged = |error: &StoreError| tracing::error!(%error, "left out a damaged row");
    rows.iter()
        .filter_map(|row| read(row).inspect_err(logged).ok())
        .collect()
}
