CREATE TABLE snapshots (
    id     TEXT PRIMARY KEY NOT NULL,
    agent  TEXT NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
    made   INTEGER NOT NULL,
    label  TEXT NOT NULL,
    kind   TEXT NOT NULL,
    parent TEXT,
    size   INTEGER NOT NULL
) STRICT;

CREATE INDEX snapshots_by_agent ON snapshots (agent, made);

-- The snapshot that the agent was made at, or rolled back to, last.
ALTER TABLE agents ADD COLUMN snapshot TEXT;
