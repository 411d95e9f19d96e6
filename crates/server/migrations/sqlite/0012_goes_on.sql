-- Whether the next daemon is to bring the agent back, as it ran when the last one ended.
ALTER TABLE agents ADD COLUMN goes_on INTEGER NOT NULL DEFAULT 0;
