-- What last went wrong with putting an agent's memory to disk or bringing it back, as JSON.
ALTER TABLE agents ADD COLUMN setback TEXT;
