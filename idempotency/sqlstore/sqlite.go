package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// sqlite is the dialect of SQLite 3.37 and newer.
type sqlite struct {
	sql sqliteStatements
}

type sqliteStatements struct {
	claim, takeOver, read, finish, conclude, renew string
	insert, replace, resolve, cancelAbsent, sweep  string
}

const (
	// sqliteNow is the host's clock in milliseconds. SQLite reads it once per
	// statement, not once per transaction.
	sqliteNow = `CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)`

	// sqliteOver: see pgOver.
	sqliteOver = `(lease_until <= ` + sqliteNow + ` OR ` + sqliteNow + ` < leased_at - 1000)`

	// sqliteLife is the savepoint that is set when a transaction begins and must
	// still be there when it ends.
	sqliteLife = "belay_life"
)

func newSQLite(n names) *sqlite {
	fill := strings.NewReplacer("{table}", n.table, "{now}", sqliteNow, "{over}", sqliteOver).Replace
	return &sqlite{sql: sqliteStatements{
		claim: fill(`INSERT INTO {table}
	(id, state, owner, epoch, fingerprint, scope, method, created_at, leased_at, lease_until, expires_at)
VALUES (?1, 1, ?2, 1, ?3, ?4, ?5, {now}, {now}, {now} + ?6, {now} + ?7)
ON CONFLICT (id) DO NOTHING`),
		takeOver: fill(`UPDATE {table}
SET state = 1, owner = ?1, epoch = ?2, leased_at = {now}, lease_until = {now} + ?3, expires_at = {now} + ?4, completed_at = NULL
WHERE id = ?5 AND state = ?6 AND owner = ?7 AND epoch = ?8 AND (state <> 1 OR owner = ?1 OR {over})`),
		read: fill(`SELECT state, owner, epoch, fingerprint, outcome, created_at * 1000, (lease_until - {now}) * 1000, {over}
FROM {table} WHERE id = ?1`),
		finish: fill(`UPDATE {table}
SET state = 2, outcome = ?3, completed_at = {now}, expires_at = {now} + ?4
WHERE id = ?1 AND owner = ?2 AND state IN (1, 4)`),
		conclude: fill(`UPDATE {table}
SET state = ?3, outcome = ?4, completed_at = {now}, expires_at = {now} + ?5
WHERE id = ?1 AND owner = ?2 AND state IN (1, 4)`),
		renew: fill(`UPDATE {table}
SET state = 1, leased_at = {now}, lease_until = {now} + ?3
WHERE id = ?1 AND owner = ?2 AND state IN (1, 4)`),
		insert: fill(`INSERT INTO {table}
	(id, state, owner, epoch, fingerprint, scope, method, outcome, created_at, leased_at, lease_until, completed_at, expires_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, {now}, {now}, {now}, {now}, {now} + ?9)
ON CONFLICT (id) DO NOTHING`),
		replace: fill(`UPDATE {table}
SET state = ?5, owner = ?6, epoch = ?7, outcome = ?8, completed_at = {now}, expires_at = {now} + ?9
WHERE id = ?1 AND state = ?2 AND owner = ?3 AND epoch = ?4`),
		resolve: fill(`UPDATE {table}
SET state = ?2, owner = ?3, outcome = ?4, completed_at = {now}, expires_at = {now} + ?5
WHERE id = ?1 AND (state = 4 OR (state = 1 AND {over}) OR (state = 3 AND ?2 = 5))`),
		cancelAbsent: fill(`INSERT INTO {table}
	(id, state, owner, epoch, fingerprint, created_at, leased_at, lease_until, completed_at, expires_at)
VALUES (?1, 5, ?2, 0, x'', {now}, {now}, {now}, {now}, {now} + ?3)
ON CONFLICT (id) DO NOTHING`),
		sweep: fill(`DELETE FROM {table} WHERE id IN (
	SELECT id FROM {table} WHERE state IN (2, 3, 5) AND expires_at <= {now} ORDER BY expires_at LIMIT ?1)`),
	}}
}

func (d *sqlite) claim(c *idempotency.Claim, _ waits) statement {
	return statement{d.sql.claim, []any{
		c.ID[:], c.Owner[:], []byte(c.Fingerprint), c.Scope, c.Method, millis(c.Lease), millis(c.Retention),
	}}
}

func (d *sqlite) takeOver(c *idempotency.Claim, seen *row, epoch uint64, _ waits) statement {
	return statement{d.sql.takeOver, []any{
		c.Owner[:], int64(epoch), millis(c.Lease), millis(c.Retention), //nolint:gosec // an epoch counts executions
		c.ID[:], int64(seen.state), seen.owner[:], int64(seen.epoch), //nolint:gosec // it was read from a 64-bit column
	}}
}

// read needs no locking form: a writer has the whole database to itself, so what
// is read was committed and nothing is on its way.
func (d *sqlite) read(id idempotency.ID, _ bool) statement {
	return statement{d.sql.read, []any{id[:]}}
}

func (d *sqlite) finish(c *idempotency.Claim, data []byte, _ bool) statement {
	return statement{d.sql.finish, []any{c.ID[:], c.Owner[:], data, millis(c.Retention)}}
}

func (d *sqlite) conclude(c *idempotency.Claim, state idempotency.State, data []byte) statement {
	return statement{d.sql.conclude, []any{c.ID[:], c.Owner[:], int64(state), data, millis(c.Retention)}}
}

func (d *sqlite) renew(c *idempotency.Claim) statement {
	return statement{d.sql.renew, []any{c.ID[:], c.Owner[:], millis(c.Lease)}}
}

func (d *sqlite) insert(c *idempotency.Claim, epoch uint64, state idempotency.State, data []byte, _ waits) statement {
	return statement{d.sql.insert, []any{
		c.ID[:], int64(state), c.Owner[:], int64(epoch), //nolint:gosec // an epoch counts executions
		[]byte(c.Fingerprint), c.Scope, c.Method, data, millis(c.Retention),
	}}
}

func (d *sqlite) replace(c *idempotency.Claim, seen *row, epoch uint64, state idempotency.State, data []byte, _ waits) statement {
	return statement{d.sql.replace, []any{
		c.ID[:], int64(seen.state), seen.owner[:], int64(seen.epoch), int64(state), c.Owner[:], int64(epoch), //nolint:gosec // epochs count executions
		data, millis(c.Retention),
	}}
}

func (d *sqlite) resolve(id idempotency.ID, r *idempotency.Resolution) statement {
	var nobody idempotency.Owner
	return statement{d.sql.resolve, []any{id[:], int64(r.State), nobody[:], outcomeData(r.Outcome), millis(r.Retention)}}
}

func (d *sqlite) cancelAbsent(id idempotency.ID, r *idempotency.Resolution, _ waits) statement {
	var nobody idempotency.Owner
	return statement{d.sql.cancelAbsent, []any{id[:], nobody[:], millis(r.Retention)}}
}

func (d *sqlite) sweep(limit int) statement {
	return statement{d.sql.sweep, []any{int64(limit)}}
}

func (d *sqlite) oneWriter() bool { return true }

// SQLite's primary result codes (sqlite.org/rescode.html).
const (
	sqliteError      = 1
	sqliteBusy       = 5
	sqliteLocked     = 6
	sqliteConstraint = 19
	sqliteMismatch   = 20
)

// fault reads the result code where the driver's error has a method for it, and
// the text of SQLite's own messages where it has not.
func (d *sqlite) fault(err error) fault {
	if err == nil {
		return faultOther
	}
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		switch coded.Code() & 0xff {
		case sqliteBusy, sqliteLocked:
			return faultLocked
		case sqliteError, sqliteConstraint, sqliteMismatch:
			return faultRefused
		default:
			return faultOther
		}
	}
	switch text := err.Error(); {
	case strings.Contains(text, "database is locked"), strings.Contains(text, "database table is locked"), strings.Contains(text, "SQLITE_BUSY"):
		return faultLocked
	case strings.Contains(text, "constraint failed"), strings.Contains(text, "datatype mismatch"):
		return faultRefused
	default:
		return faultOther
	}
}

func (d *sqlite) missing(err error) bool {
	return err != nil && strings.Contains(err.Error(), "no such table")
}

// begin takes the write lock at once: a transaction that reads first and writes
// later fails when somebody wrote in between, without waiting for anything.
// Sent as text, it does not depend on how the driver begins a transaction. The
// life sign rides along.
func (d *sqlite) begin(ctx context.Context, db *sql.DB) (transaction, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	t := &sqliteTransaction{conn: conn}
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE; SAVEPOINT "+sqliteLife); err != nil {
		if d.fault(err) == faultLocked {
			t.release()
		} else {
			t.discard() // it may have begun
		}
		return nil, err
	}
	return t, nil
}

// sqliteTransaction is a transaction that is driven by statements on a
// connection of its own.
type sqliteTransaction struct {
	conn *sql.Conn

	mu      sync.Mutex // guards cancels
	cancels []context.CancelFunc
}

func (t *sqliteTransaction) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return t.conn.ExecContext(ctx, query, args...)
}

func (t *sqliteTransaction) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	return t.conn.PrepareContext(ctx, query)
}

func (t *sqliteTransaction) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return t.conn.QueryContext(t.bounded(ctx), query, args...)
}

func (t *sqliteTransaction) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	return t.conn.QueryRowContext(t.bounded(ctx), query, args...)
}

// bounded returns a context that ends with the transaction. Rows that a handler
// forgot to close would else keep the connection for ever (sql.Conn.Close waits
// for them; sql.Tx does this for itself).
func (t *sqliteTransaction) bounded(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	t.mu.Lock()
	t.cancels = append(t.cancels, cancel)
	t.mu.Unlock()
	return ctx
}

func (t *sqliteTransaction) closeRows() {
	t.mu.Lock()
	cancels := t.cancels
	t.cancels = nil
	t.mu.Unlock()
	for _, cancel := range cancels {
		cancel()
	}
}

// sqliteProbeTime bounds a question to a file on this host.
const sqliteProbeTime = 5 * time.Second

// probe asks whether a transaction is open by beginning one, which is refused
// inside of one. The savepoint is not asked here: looking at it means releasing
// it, and with it every savepoint that the handler has set since.
func (t *sqliteTransaction) probe(ctx context.Context) error {
	// The failed statement may have failed because ctx ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sqliteProbeTime)
	defer cancel()
	_, err := t.conn.ExecContext(ctx, "BEGIN")
	if err != nil && strings.Contains(err.Error(), "within a transaction") {
		return nil
	}
	if err == nil {
		_, _ = t.conn.ExecContext(ctx, "ROLLBACK") // of the probe itself
	}
	return errTxGone
}

func (t *sqliteTransaction) finishGuarded() bool { return false }

// intact releases the savepoint: it is there if, and only if, nothing has ended
// the transaction since begin.
//
// The answer must not depend on the caller's patience: an interrupted RELEASE
// says nothing about the savepoint.
func (t *sqliteTransaction) intact(ctx context.Context, _ *idempotency.Claim) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sqliteProbeTime)
	defer cancel()
	t.closeRows()
	_, err := t.conn.ExecContext(ctx, "RELEASE "+sqliteLife)
	switch {
	case err == nil:
		return nil
	case strings.Contains(err.Error(), "no such savepoint"):
		return fmt.Errorf("%w (%w)", errTxSevered, err)
	default:
		return fmt.Errorf("sqlstore: look at the transaction: %w", err)
	}
}

// commit tries again while readers are in its way, which happens without WAL:
// the transaction stays open meanwhile.
func (t *sqliteTransaction) commit(ctx context.Context) error {
	t.closeRows()
	_, err := t.conn.ExecContext(ctx, "COMMIT")
	for delay := busyDelay; err != nil && (&sqlite{}).fault(err) == faultLocked && sleep(ctx, delay) == nil; delay = nextDelay(delay) {
		_, err = t.conn.ExecContext(ctx, "COMMIT")
	}
	if err != nil {
		if noTransaction(err) {
			err = fmt.Errorf("%w (%w)", errTxSevered, err)
		}
		t.rollback(ctx)
		return err
	}
	t.release()
	return nil
}

func noTransaction(err error) bool {
	return strings.Contains(err.Error(), "no transaction is active")
}

func (t *sqliteTransaction) rollback(ctx context.Context) {
	t.closeRows()
	// The lock on the file must go even when the caller's time is up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sqliteProbeTime)
	defer cancel()
	if _, err := t.conn.ExecContext(ctx, "ROLLBACK"); err != nil && !noTransaction(err) {
		t.discard()
		return
	}
	t.release()
}

func (t *sqliteTransaction) release() {
	t.closeRows()
	_ = t.conn.Close() // back into the pool; its only error is that it was closed before
}

// discard closes the connection itself, and with it whatever is open on it.
func (t *sqliteTransaction) discard() {
	t.closeRows()
	_ = t.conn.Raw(func(any) error { return driver.ErrBadConn })
	_ = t.conn.Close()
}

func (d *sqlite) migration(ctx context.Context, db *sql.DB, _ string, fn func(Tx) error) error {
	tx, err := d.begin(ctx, db)
	if err != nil {
		return err
	}
	if err := fn(tx); err != nil {
		tx.rollback(ctx)
		return err
	}
	return tx.commit(ctx)
}

// sqliteMaxBusyTimeout bounds how long a handler that writes past its own Tx
// waits for itself.
const sqliteMaxBusyTimeout = 30 * time.Second

func (d *sqlite) check(ctx context.Context, db *sql.DB, relaxed bool) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("sqlstore: open the database: %w", err)
	}
	defer func() { _ = conn.Close() }()
	var (
		version, file, journal string
		synchronous, busy      int64
	)
	for _, q := range []struct {
		query string
		into  any
	}{
		{`SELECT sqlite_version()`, &version},
		{`SELECT COALESCE(file, '') FROM pragma_database_list WHERE name = 'main'`, &file},
		{`PRAGMA journal_mode`, &journal},
		{`PRAGMA synchronous`, &synchronous},
		{`PRAGMA busy_timeout`, &busy},
	} {
		if err := conn.QueryRowContext(ctx, q.query).Scan(q.into); err != nil {
			return fmt.Errorf("sqlstore: %s: %w", q.query, err)
		}
	}
	const full = 2 // PRAGMA synchronous: OFF 0, NORMAL 1, FULL 2, EXTRA 3
	switch busyTimeout := time.Duration(busy) * time.Millisecond; {
	case !sqliteNewEnough(version):
		return fmt.Errorf("sqlstore: sqlite_version is %s: must be at least 3.37 (STRICT tables)", version)
	case file == "":
		return errors.New("sqlstore: the database is in memory: must be a file, since every connection has a memory of its own " +
			"(idempotency.NewMemoryStore needs no database)")
	case journal == "off" || journal == "memory":
		return fmt.Errorf("sqlstore: journal_mode is %s: must be wal, or another one that a rollback survives in", journal)
	case synchronous < full && !relaxed:
		return fmt.Errorf("sqlstore: synchronous is %d: must be FULL (2) on every connection, set in the data source name, "+
			"or a power cut forgets what was answered (Config.RelaxedDurability accepts that)", synchronous)
	case busyTimeout <= 0:
		return errors.New("sqlstore: busy_timeout is 0: must be positive on every connection, set in the data source name, " +
			"or a handler that meets another writer fails at once")
	case busyTimeout > sqliteMaxBusyTimeout:
		return fmt.Errorf("sqlstore: busy_timeout is %v: must be at most %v, since a handler that writes past its own Tx waits that long for itself",
			busyTimeout, sqliteMaxBusyTimeout)
	}
	return nil
}

func sqliteNewEnough(version string) bool {
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major > 3 || major == 3 && minor >= 37
}
