-- One row per identity. Times are milliseconds since 1970 by the host's clock,
-- which all processes on one database file share.
CREATE TABLE IF NOT EXISTS {table} (
	id           BLOB    PRIMARY KEY,          -- 32 bytes: a hash, so no collation can fold two of them
	state        INTEGER NOT NULL,             -- 1 RUNNING 2 DONE 3 FREE 4 UNKNOWN 5 CANCELLED
	owner        BLOB    NOT NULL,             -- 16 random bytes: who may change the row
	epoch        INTEGER NOT NULL,             -- executions authorised so far
	fingerprint  BLOB    NOT NULL,             -- of the request; empty when nobody claimed
	scope        TEXT    NOT NULL DEFAULT '',  -- for people; nothing decides by it
	method       TEXT    NOT NULL DEFAULT '',  -- for people; nothing decides by it
	outcome      BLOB,                         -- DONE only, byte for byte
	created_at   INTEGER NOT NULL,
	leased_at    INTEGER NOT NULL,             -- with lease_until: a clock before it was set back
	lease_until  INTEGER NOT NULL,
	completed_at INTEGER,
	expires_at   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- For Sweep. RUNNING and UNKNOWN are never swept, so they are not in it.
CREATE INDEX IF NOT EXISTS {index_expires} ON {table} (expires_at) WHERE state IN (2, 3, 5);

-- For people: the oldest question that is still open.
CREATE INDEX IF NOT EXISTS {index_open} ON {table} (state, lease_until) WHERE state IN (1, 4);
