-- Who may reach the agent's ports, as JSON.
ALTER TABLE agents ADD COLUMN reach TEXT NOT NULL DEFAULT '{}';

-- What the server alone knows.
CREATE TABLE server_secrets (
    name  TEXT PRIMARY KEY NOT NULL,
    value BLOB NOT NULL
) STRICT;
