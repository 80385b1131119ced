package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// postgresql is the dialect of PostgreSQL 13 and newer.
//
// Every statement that may wait sets its own lock_timeout, in a subquery that is
// evaluated before the row is touched: a SET LOCAL would be one more round trip
// in every call. Clocks are clock_timestamp(), because now() stands still for as
// long as a transaction lasts.
type postgresql struct {
	mode      Mode
	isolation sql.IsolationLevel // that transactions are begun with
	sql       pgStatements
}

type pgStatements struct {
	claim, takeOver, read, readLocked, finishJoined, finishLeased, conclude, renew string
	aliveJoined, aliveLeased, insert, replace, resolve, cancelAbsent, sweep        string
}

// pgIsolation returns the level that transactions are begun with.
//
// In Lease mode READ COMMITTED is asked for as READ UNCOMMITTED. PostgreSQL
// documents that it treats the one as the other, but it remembers the name; so the
// finish statement can tell the handler's transaction from the nothing that a
// COMMIT in SQL leaves behind, without one more statement to mark it. In
// SameTransaction mode the claim marks its transaction (see pgOurs), and a BEGIN
// without a level is what costs both sides least.
func pgIsolation(mode Mode, level sql.IsolationLevel) sql.IsolationLevel {
	if mode == Lease && (level == sql.LevelDefault || level == sql.LevelReadCommitted) {
		return sql.LevelReadUncommitted
	}
	return level
}

// pgOurs is the condition that a record was written by the transaction that asks.
// xmin says which one wrote the row: it is ours as long as nobody ended the
// transaction that the claim began. pg_current_xact_id is an xid8, whose low half
// is what xmin holds.
const pgOurs = `xmin = pg_current_xact_id()::xid`

// pgOver is the condition that a record's lease is over: by the clock, or
// because the clock was set back to before the lease was given. The second of
// grace covers clocks that are merely slewed.
const pgOver = `(r.lease_until <= clock_timestamp() OR clock_timestamp() < r.leased_at - interval '1 second')`

// pgUnjudged is expires_at of a record that has no verdict yet; the lease and the
// retention are the parameters of those numbers.
//
// In Lease mode it stands for people to see, until there is a verdict: infinity
// is what makes it, and what is UNKNOWN, quick to find. In SameTransaction mode
// nobody sees it before its verdict, which then need not touch the column: an
// update that changes nothing in an index is a heap-only one, for which PostgreSQL
// writes half as much. The lease on top is how long a handler may take for that;
// a longer one moves expires_at, since retention runs from the finish (R3).
func pgUnjudged(mode Mode, lease, retention string) string {
	if mode == Lease {
		return `'infinity'::timestamptz`
	}
	return `c.t + (` + lease + `::bigint + ` + retention + `::bigint) {micro}`
}

func newPostgreSQL(n names, mode Mode, isolation sql.IsolationLevel) *postgresql {
	isolation = pgIsolation(mode, isolation)
	fill := strings.NewReplacer("{table}", n.table, "{over}", pgOver, "{ours}", pgOurs,
		"{life}", strings.ToLower(isolation.String()), "{micro}", "* interval '1 microsecond'").Replace
	return &postgresql{mode: mode, isolation: isolation, sql: pgStatements{
		claim: fill(`INSERT INTO {table}
	(id, state, owner, epoch, fingerprint, scope, method, created_at, leased_at, lease_until, expires_at)
SELECT $3::bytea, 1, $4::bytea, 1, $5::bytea, $6::text, $7::text,
	/* created */ c.t, /* leased */ c.t, c.t + $8::bigint {micro}, ` + pgUnjudged(mode, "$8", "$9") + `
FROM (SELECT clock_timestamp() AS t,
	set_config('lock_timeout', $1::text, true) AS a,
	set_config('idle_in_transaction_session_timeout', $2::text, true) AS b) AS c
ON CONFLICT (id) DO NOTHING`),
		takeOver: fill(`UPDATE {table} AS r
SET state = 1, owner = $3::bytea, epoch = $4::bigint, leased_at = c.t, lease_until = c.t + $9::bigint {micro},
	expires_at = ` + pgUnjudged(mode, "$9", "$10") + `, completed_at = NULL
FROM (SELECT clock_timestamp() AS t,
	set_config('lock_timeout', $1::text, true) AS a,
	set_config('idle_in_transaction_session_timeout', $2::text, true) AS b) AS c
WHERE r.id = $5::bytea AND r.state = $6::smallint AND r.owner = $7::bytea AND r.epoch = $8::bigint
	AND (r.state <> 1 OR r.owner = $3::bytea OR {over})`),
		read:       fill(pgRead),
		readLocked: fill(pgRead + " FOR UPDATE"),
		finishJoined: fill(`UPDATE {table}
SET state = 2, outcome = $3::bytea, completed_at = clock_timestamp(),
	expires_at = greatest(expires_at, clock_timestamp() + $4::bigint {micro})
WHERE id = $1::bytea AND owner = $2::bytea AND state = 1 AND {ours}`),
		finishLeased: fill(`UPDATE {table}
SET state = 2, outcome = $3::bytea, completed_at = clock_timestamp(), expires_at = clock_timestamp() + $4::bigint {micro}
WHERE id = $1::bytea AND owner = $2::bytea AND state IN (1, 4) AND current_setting('transaction_isolation') = '{life}'`),
		aliveJoined: fill(`SELECT count(*) = 1 FROM {table} WHERE id = $1::bytea AND owner = $2::bytea AND {ours}`),
		aliveLeased: fill(`SELECT current_setting('transaction_isolation') = '{life}'`),
		conclude: fill(`UPDATE {table}
SET state = $3::smallint, outcome = $4::bytea, completed_at = clock_timestamp(),
	expires_at = CASE WHEN $3::smallint = 4 THEN 'infinity' ELSE clock_timestamp() + $5::bigint {micro} END
WHERE id = $1::bytea AND owner = $2::bytea AND state IN (1, 4)`),
		renew: fill(`UPDATE {table}
SET state = 1, leased_at = clock_timestamp(), lease_until = clock_timestamp() + $3::bigint {micro}
WHERE id = $1::bytea AND owner = $2::bytea AND state IN (1, 4)`),
		insert: fill(`INSERT INTO {table}
	(id, state, owner, epoch, fingerprint, scope, method, outcome, created_at, leased_at, lease_until, completed_at, expires_at)
SELECT $2::bytea, $3::smallint, $4::bytea, $5::bigint, $6::bytea, $7::text, $8::text, $9::bytea,
	/* created */ c.t, /* leased */ c.t, /* until */ c.t, /* completed */ c.t,
	CASE WHEN $3::smallint = 4 THEN 'infinity' ELSE c.t + $10::bigint {micro} END
FROM (SELECT clock_timestamp() AS t, set_config('lock_timeout', $1::text, true) AS a) AS c
ON CONFLICT (id) DO NOTHING`),
		replace: fill(`UPDATE {table} AS r
SET state = $5::smallint, owner = $6::bytea, epoch = $7::bigint, outcome = $8::bytea, completed_at = c.t,
	expires_at = CASE WHEN $5::smallint = 4 THEN 'infinity' ELSE c.t + $9::bigint {micro} END
FROM (SELECT clock_timestamp() AS t, set_config('lock_timeout', $10::text, true) AS a) AS c
WHERE r.id = $1::bytea AND r.state = $2::smallint AND r.owner = $3::bytea AND r.epoch = $4::bigint`),
		resolve: fill(`UPDATE {table} AS r
SET state = $2::smallint, owner = $3::bytea, outcome = $4::bytea, completed_at = clock_timestamp(),
	expires_at = clock_timestamp() + $5::bigint {micro}
WHERE r.id = $1::bytea AND (r.state = 4 OR (r.state = 1 AND {over}) OR (r.state = 3 AND $2::smallint = 5))`),
		cancelAbsent: fill(`INSERT INTO {table}
	(id, state, owner, epoch, fingerprint, created_at, leased_at, lease_until, completed_at, expires_at)
SELECT $2::bytea, 5, $3::bytea, 0, ''::bytea,
	/* created */ c.t, /* leased */ c.t, /* until */ c.t, /* completed */ c.t, c.t + $4::bigint {micro}
FROM (SELECT clock_timestamp() AS t, set_config('lock_timeout', $1::text, true) AS a) AS c
ON CONFLICT (id) DO NOTHING`),
		// Materialized, so that the LIMIT is applied once however the DELETE is
		// planned. SKIP LOCKED: several sweepers share the work, and none waits
		// for a FREE record that is just being claimed. The clock is read once, in a
		// subquery: an index is not searched for what may change from row to row.
		sweep: fill(`WITH old AS MATERIALIZED (
	SELECT id FROM {table} WHERE state IN (2, 3, 5) AND expires_at <= (SELECT clock_timestamp())
	ORDER BY expires_at LIMIT $1::bigint FOR UPDATE SKIP LOCKED)
DELETE FROM {table} AS r USING old WHERE r.id = old.id`),
	}}
}

const pgRead = `SELECT r.state, r.owner, r.epoch, r.fingerprint, r.outcome,
	(extract(epoch FROM r.created_at) * 1000000)::bigint,
	(extract(epoch FROM r.lease_until - clock_timestamp()) * 1000000)::bigint,
	{over}
FROM {table} AS r WHERE r.id = $1::bytea`

func (p *postgresql) claim(c *idempotency.Claim, w waits) statement {
	return p.unjudged(p.sql.claim, c, []any{
		pgMillis(w.lock), pgMillis(w.idle), c.ID[:], c.Owner[:], []byte(c.Fingerprint), pgText(c.Scope), pgText(c.Method),
		c.Lease.Microseconds(),
	})
}

func (p *postgresql) takeOver(c *idempotency.Claim, seen *row, epoch uint64, w waits) statement {
	return p.unjudged(p.sql.takeOver, c, []any{
		pgMillis(w.lock), pgMillis(w.idle), c.Owner[:], int64(epoch), //nolint:gosec // an epoch counts executions
		c.ID[:], int64(seen.state), seen.owner[:], int64(seen.epoch), //nolint:gosec // it was read from a bigint
		c.Lease.Microseconds(),
	})
}

// unjudged adds what pgUnjudged asks for.
func (p *postgresql) unjudged(query string, c *idempotency.Claim, args []any) statement {
	if p.mode != Lease {
		args = append(args, c.Retention.Microseconds())
	}
	return statement{query, args}
}

func (p *postgresql) read(id idempotency.ID, lock bool) statement {
	if lock {
		return statement{p.sql.readLocked, []any{id[:]}}
	}
	return statement{p.sql.read, []any{id[:]}}
}

func (p *postgresql) finish(c *idempotency.Claim, data []byte, joined bool) statement {
	query := p.sql.finishLeased
	if joined {
		query = p.sql.finishJoined
	}
	return statement{query, []any{c.ID[:], c.Owner[:], data, c.Retention.Microseconds()}}
}

// alive asks for the mark that finish sees for itself.
func (p *postgresql) alive(c *idempotency.Claim) statement {
	if p.mode == SameTransaction {
		return statement{p.sql.aliveJoined, []any{c.ID[:], c.Owner[:]}}
	}
	return statement{p.sql.aliveLeased, nil}
}

func (p *postgresql) conclude(c *idempotency.Claim, state idempotency.State, data []byte) statement {
	return statement{p.sql.conclude, []any{c.ID[:], c.Owner[:], int64(state), data, c.Retention.Microseconds()}}
}

func (p *postgresql) renew(c *idempotency.Claim) statement {
	return statement{p.sql.renew, []any{c.ID[:], c.Owner[:], c.Lease.Microseconds()}}
}

func (p *postgresql) insert(c *idempotency.Claim, epoch uint64, state idempotency.State, data []byte, w waits) statement {
	return statement{p.sql.insert, []any{
		pgMillis(w.lock), c.ID[:], int64(state), c.Owner[:], int64(epoch), //nolint:gosec // an epoch counts executions
		[]byte(c.Fingerprint), pgText(c.Scope), pgText(c.Method), data, c.Retention.Microseconds(),
	}}
}

func (p *postgresql) replace(c *idempotency.Claim, seen *row, epoch uint64, state idempotency.State, data []byte, w waits) statement {
	return statement{p.sql.replace, []any{
		c.ID[:], int64(seen.state), seen.owner[:], int64(seen.epoch), int64(state), c.Owner[:], int64(epoch), //nolint:gosec // epochs count executions
		data, c.Retention.Microseconds(), pgMillis(w.lock),
	}}
}

func (p *postgresql) resolve(id idempotency.ID, r *idempotency.Resolution) statement {
	var nobody idempotency.Owner
	return statement{p.sql.resolve, []any{id[:], int64(r.State), nobody[:], outcomeData(r.Outcome), r.Retention.Microseconds()}}
}

func (p *postgresql) cancelAbsent(id idempotency.ID, r *idempotency.Resolution, w waits) statement {
	var nobody idempotency.Owner
	return statement{p.sql.cancelAbsent, []any{pgMillis(w.lock), id[:], nobody[:], r.Retention.Microseconds()}}
}

func (p *postgresql) sweep(limit int) statement {
	return statement{p.sql.sweep, []any{int64(limit)}}
}

func (p *postgresql) oneWriter() bool { return false }

// pgMillis writes a time-out as the setting wants it.
func pgMillis(d time.Duration) string { return strconv.FormatInt(millis(d), 10) }

// pgText makes a name fit for a text column, which takes neither NUL nor invalid
// UTF-8. Names are for people: nothing is lost that decides.
func pgText(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// fault reads the SQLSTATE, which pgx's and lib/pq's errors have.
func (p *postgresql) fault(err error) fault {
	state := sqlState(err)
	switch state {
	case "55P03": // lock_not_available
		return faultLocked
	case "40001", "40P01": // serialization_failure, deadlock_detected
		return faultRetry
	case "25P02": // in_failed_sql_transaction
		return faultAborted
	case "57014": // query_canceled: the statement is undone
		return faultRefused
	case "", "40003": // statement_completion_unknown
		return faultOther
	}
	switch state[:2] {
	case "08", "53", "57", "58", "XX":
		// The server is going down, out of resources or out of its mind: what it
		// says then is about itself, not about a COMMIT that was on its way.
		return faultOther
	default:
		return faultRefused
	}
}

func (p *postgresql) missing(err error) bool {
	state := sqlState(err)
	return state == "42P01" || state == "3F000"
}

func sqlState(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) && len(coded.SQLState()) == 5 {
		return coded.SQLState()
	}
	return ""
}

func (p *postgresql) begin(ctx context.Context, db *sql.DB) (transaction, error) {
	// database/sql rolls a transaction back when the context it was begun with
	// ends. The caller of a keyed call may go while the call goes on, so the
	// transaction has a context of its own.
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	tx, err := db.BeginTx(own, &sql.TxOptions{Isolation: p.isolation})
	if err != nil {
		stop()
		cancel()
		return nil, contextCause(ctx, err)
	}
	if !stop() {
		// ctx ended while the transaction began, and took it along.
		_ = tx.Rollback()
		cancel()
		return nil, contextCause(ctx, context.Canceled)
	}
	return &pgTransaction{Tx: tx, dialect: p, cancel: cancel}, nil
}

// contextCause prefers ctx's own end to the one that was made of it.
func contextCause(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return context.Cause(ctx)
	}
	return err
}

type pgTransaction struct {
	*sql.Tx

	dialect *postgresql
	cancel  context.CancelFunc
}

// probe: a failed statement aborts a PostgreSQL transaction, and every later
// statement is refused, so none can be committed by itself.
func (t *pgTransaction) probe(context.Context) error { return nil }

func (t *pgTransaction) finishGuarded() bool { return true }

func (t *pgTransaction) intact(ctx context.Context, c *idempotency.Claim) error {
	var alive bool
	st := t.dialect.alive(c)
	err := t.QueryRowContext(ctx, st.query, st.args...).Scan(&alive)
	switch {
	case err != nil && sqlState(err) == "25P02":
		return nil
	case err != nil:
		return fmt.Errorf("sqlstore: look at the transaction: %w", err)
	case !alive:
		return errTxSevered
	default:
		return nil
	}
}

// commit ends the transaction within ctx, which sql.Tx.Commit does not take: a
// connection that has gone half open would hold the call for as long as the
// kernel believes in it.
func (t *pgTransaction) commit(ctx context.Context) error {
	defer t.cancel()
	defer context.AfterFunc(ctx, t.cancel)()
	return t.Commit()
}

func (t *pgTransaction) rollback(ctx context.Context) {
	defer t.cancel()
	defer context.AfterFunc(ctx, t.cancel)()
	// An error means that the connection is gone or unusable; the driver says so
	// to the pool, and the server rolls back what nobody commits.
	_ = t.Rollback()
}

// migration is serialised by an advisory lock that ends with its transaction: a
// session's lock would be left behind by a pooler in transaction mode.
func (p *postgresql) migration(ctx context.Context, db *sql.DB, table string, fn func(Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // without effect after a commit
	if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(hashtext($1::text))`, "belay sqlstore "+table); err != nil {
		return err
	}
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

const pgMinVersion = 130000 // pg_current_xact_id

func (p *postgresql) check(ctx context.Context, db *sql.DB, relaxed bool) error {
	var (
		version                              int64
		replica                              bool
		readOnly, fsync, syncMode, isolation string
	)
	err := db.QueryRowContext(ctx, `SELECT current_setting('server_version_num')::bigint, pg_is_in_recovery(),
	current_setting('transaction_read_only'), current_setting('fsync'), current_setting('synchronous_commit'),
	current_setting('default_transaction_isolation')`).
		Scan(&version, &replica, &readOnly, &fsync, &syncMode, &isolation)
	switch {
	case err != nil:
		return fmt.Errorf("sqlstore: read the server's settings: %w", err)
	case version < pgMinVersion:
		return fmt.Errorf("sqlstore: server_version_num is %d: must be at least %d (PostgreSQL 13)", version, pgMinVersion)
	case replica:
		return errors.New("sqlstore: pg_is_in_recovery is true: must be the primary, since records are read where they are written")
	case readOnly != "off":
		return fmt.Errorf("sqlstore: default_transaction_read_only is %s: must be off", readOnly)
	case p.mode == Lease && isolation == strings.ToLower(p.isolation.String()):
		return fmt.Errorf("sqlstore: default_transaction_isolation is %q: must be another one in Lease mode, "+
			"since it tells the store's transactions from statements outside of them", isolation)
	case fsync == "off" && !relaxed:
		return errors.New("sqlstore: fsync is off: must be on, or a crash forgets what was answered (Config.RelaxedDurability accepts that)")
	case syncMode == "off" && !relaxed:
		return errors.New("sqlstore: synchronous_commit is off: must be local or stronger, " +
			"or a crash forgets what was answered (Config.RelaxedDurability accepts that)")
	}
	return nil
}
