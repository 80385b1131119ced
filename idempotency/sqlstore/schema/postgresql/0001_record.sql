-- One row per identity. Times are the server's (clock_timestamp), never a client's.
-- Half-filled pages and no index over what a finish changes in SameTransaction
-- mode: so it updates the row where it lies, and no index (a heap-only update).
CREATE TABLE IF NOT EXISTS {table} (
	id           bytea       PRIMARY KEY,           -- 32 bytes: a hash, so no collation can fold two of them
	state        smallint    NOT NULL,              -- 1 RUNNING 2 DONE 3 FREE 4 UNKNOWN 5 CANCELLED
	owner        bytea       NOT NULL,              -- 16 random bytes: who may change the row
	epoch        bigint      NOT NULL,              -- executions authorised so far
	fingerprint  bytea       NOT NULL,              -- of the request; empty when nobody claimed
	scope        text        NOT NULL DEFAULT '',   -- for people; nothing decides by it
	method       text        NOT NULL DEFAULT '',   -- for people; nothing decides by it
	outcome      bytea,                             -- DONE only, byte for byte
	created_at   timestamptz NOT NULL,
	leased_at    timestamptz NOT NULL,              -- with lease_until: a clock before it was set back
	lease_until  timestamptz NOT NULL,
	completed_at timestamptz,
	expires_at   timestamptz NOT NULL               -- Sweep takes no RUNNING and no UNKNOWN, whatever it is
) WITH (fillfactor = 50);

-- For Sweep, and for people: what has no verdict (a claim in Lease mode, and
-- UNKNOWN) expires at infinity, so the oldest question that is still open is
--   WHERE expires_at = 'infinity' ORDER BY created_at
-- but for a RUNNING that a handler in SameTransaction mode let out, by a COMMIT in
-- SQL, before its process was killed.
CREATE INDEX IF NOT EXISTS {index_expires} ON {table} (expires_at);
