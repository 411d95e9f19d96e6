-- What the agent had when the snapshot was taken. Until now it could not be changed.
ALTER TABLE snapshots ADD COLUMN isolation TEXT NOT NULL DEFAULT 'container';
UPDATE snapshots SET isolation = coalesce(
    (SELECT json_extract(agents.spec, '$.isolation') FROM agents WHERE agents.id = snapshots.agent),
    json_extract(origin, '$.spec.isolation'),
    'container');
