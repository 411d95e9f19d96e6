CREATE TABLE volumes (
    id        TEXT PRIMARY KEY NOT NULL,
    workspace TEXT NOT NULL,
    name      TEXT NOT NULL,
    created   INTEGER NOT NULL,
    UNIQUE (workspace, name)
) STRICT;
