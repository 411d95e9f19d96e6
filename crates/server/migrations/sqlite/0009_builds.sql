-- Builds of templates through the E2B API, oldest first, as JSON.
CREATE TABLE builds (
    seq    INTEGER PRIMARY KEY,
    id     TEXT NOT NULL UNIQUE,
    record TEXT NOT NULL
) STRICT;

-- What a template knows of its making, as JSON.
ALTER TABLE templates ADD COLUMN built TEXT NOT NULL DEFAULT '{}';
