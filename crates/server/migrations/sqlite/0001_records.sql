CREATE TABLE workspaces (
    id   TEXT PRIMARY KEY NOT NULL,
    name TEXT NOT NULL UNIQUE
) STRICT;

INSERT INTO workspaces (id, name) VALUES ('default', 'default');

CREATE TABLE agents (
    id            TEXT PRIMARY KEY NOT NULL,
    workspace     TEXT NOT NULL REFERENCES workspaces (id),
    name          TEXT NOT NULL,
    template_id   TEXT NOT NULL,
    template_name TEXT NOT NULL,
    lifetime      TEXT NOT NULL,
    spec          TEXT NOT NULL,
    defaults      TEXT NOT NULL,
    slot          INTEGER NOT NULL UNIQUE,
    uid_base      INTEGER NOT NULL,
    state         TEXT NOT NULL,
    reason        TEXT NOT NULL,
    since         INTEGER NOT NULL,
    created       INTEGER NOT NULL,
    box_record    TEXT,
    UNIQUE (workspace, name)
) STRICT;

CREATE INDEX agents_by_template ON agents (template_id);

CREATE TABLE events (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    agent      TEXT NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
    time       INTEGER NOT NULL,
    from_state TEXT,
    to_state   TEXT NOT NULL,
    reason     TEXT NOT NULL,
    millis     INTEGER
) STRICT;

CREATE INDEX events_by_agent ON events (agent, seq);

CREATE TABLE templates (
    id          TEXT PRIMARY KEY NOT NULL,
    workspace   TEXT NOT NULL REFERENCES workspaces (id),
    name        TEXT NOT NULL,
    recipe_hash TEXT,
    defaults    TEXT NOT NULL,
    size        INTEGER NOT NULL,
    created     INTEGER NOT NULL,
    UNIQUE (workspace, name)
) STRICT;

CREATE TABLE keys (
    id        TEXT PRIMARY KEY NOT NULL,
    workspace TEXT NOT NULL REFERENCES workspaces (id),
    name      TEXT NOT NULL,
    prefix    TEXT NOT NULL,
    hash      BLOB NOT NULL UNIQUE,
    created   INTEGER NOT NULL,
    last_used INTEGER
) STRICT;

CREATE INDEX keys_by_prefix ON keys (prefix);
