-- Values that the clients of a workspace keep here. The database is readable by the daemon alone.
CREATE TABLE workspace_secrets (
    id        TEXT PRIMARY KEY NOT NULL,
    workspace TEXT NOT NULL REFERENCES workspaces (id),
    name      TEXT NOT NULL,
    value     TEXT NOT NULL,
    version   INTEGER NOT NULL,
    metadata  TEXT NOT NULL,
    created   INTEGER NOT NULL,
    updated   INTEGER NOT NULL,
    UNIQUE (workspace, name)
) STRICT;
