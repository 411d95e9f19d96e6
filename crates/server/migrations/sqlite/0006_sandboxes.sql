-- What the E2B API adds to an agent, as JSON.
CREATE TABLE sandboxes (
    agent  TEXT PRIMARY KEY NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
    record TEXT NOT NULL
) STRICT;

-- A snapshot may outlive its agent: then it has what an agent that is made of it needs, as JSON.
CREATE TABLE kept_snapshots (
    id     TEXT PRIMARY KEY NOT NULL,
    agent  TEXT NOT NULL,
    made   INTEGER NOT NULL,
    label  TEXT NOT NULL,
    kind   TEXT NOT NULL,
    parent TEXT,
    size   INTEGER NOT NULL,
    origin TEXT
) STRICT;
INSERT INTO kept_snapshots (id, agent, made, label, kind, parent, size)
    SELECT id, agent, made, label, kind, parent, size FROM snapshots ORDER BY made, rowid;
DROP TABLE snapshots;
ALTER TABLE kept_snapshots RENAME TO snapshots;
CREATE INDEX snapshots_by_agent ON snapshots (agent, made);
