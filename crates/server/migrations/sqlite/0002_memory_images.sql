-- What is known of the memory image of an agent, as JSON.
ALTER TABLE agents ADD COLUMN image TEXT;
