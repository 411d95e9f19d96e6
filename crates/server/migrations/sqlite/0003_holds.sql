CREATE TABLE holds (
    id     TEXT PRIMARY KEY NOT NULL,
    agent  TEXT NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
    reason TEXT NOT NULL,
    made   INTEGER NOT NULL,
    until  INTEGER NOT NULL
) STRICT;

CREATE INDEX holds_by_agent ON holds (agent);
