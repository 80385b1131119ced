package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// Store is an idempotency.Store in a SQL database. Make it with [New]. All
// methods may be called concurrently. It starts no goroutine; closing the
// *sql.DB is its owner's.
type Store struct {
	db      *sql.DB
	cfg     Config
	names   names
	dialect dialect
	turns   chan struct{} // one token for each transaction that may be open
	queue   queue
}

var (
	_ idempotency.Store     = (*Store)(nil)
	_ idempotency.Described = (*Store)(nil)
)

// New returns a store in db, or an error that names the field, its value and its
// rule. It does not touch the database: see [Store.Migrate] and [Store.Check].
//
// It reads db's limit of open connections, so call SetMaxOpenConns before.
func New(db *sql.DB, cfg Config) (*Store, error) {
	if db == nil {
		return nil, errors.New("sqlstore: db is nil: must be an open database")
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	turns, err := cfg.concurrency(db.Stats().MaxOpenConnections)
	if err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	n, err := parseTable(cfg.Table, cfg.Dialect)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, cfg: cfg, names: n, turns: make(chan struct{}, turns)}
	switch cfg.Dialect {
	case PostgreSQL:
		s.dialect = newPostgreSQL(n, cfg.Mode, cfg.Isolation)
	case SQLite:
		s.dialect = newSQLite(n)
	}
	return s, nil
}

// Traits tells the engine that there is no lease to renew in SameTransaction
// mode: there the connection is the lease.
func (s *Store) Traits() idempotency.Traits {
	return idempotency.Traits{NoLease: s.cfg.Mode == SameTransaction}
}

// begin waits for a turn and begins a transaction, which gives the turn back
// when it ends.
func (s *Store) begin(ctx context.Context) (transaction, error) {
	give, err := s.turn(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := s.beginNow(ctx)
	if err != nil {
		give()
		return nil, err
	}
	return &turned{transaction: tx, give: give}, nil
}

// beginNow begins a transaction, for as long as LockTimeout lasts.
func (s *Store) beginNow(ctx context.Context) (transaction, error) {
	var tx transaction
	err := s.patiently(ctx, func() (err error) {
		tx, err = s.dialect.begin(ctx, s.db)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("sqlstore: begin a transaction: %w", err)
	}
	return tx, nil
}

// turn waits for one of the transactions that may be open at a time.
func (s *Store) turn(ctx context.Context) (give func(), err error) {
	give = func() { <-s.turns }
	select {
	case s.turns <- struct{}{}:
		return give, nil
	default:
	}
	timer := time.NewTimer(s.cfg.LockTimeout)
	defer timer.Stop()
	select {
	case s.turns <- struct{}{}:
		return give, nil
	case <-timer.C:
		return nil, s.busy("no turn within Config.LockTimeout (%v): %d transactions are open (Config.MaxConcurrent)", s.cfg.LockTimeout, cap(s.turns))
	case <-ctx.Done():
		return nil, s.busy("no turn: %d transactions are open (Config.MaxConcurrent): %w", cap(s.turns), context.Cause(ctx))
	}
}

func (s *Store) busy(format string, args ...any) error {
	return fmt.Errorf("sqlstore: %w: %w", idempotency.ErrBusy, fmt.Errorf(format, args...))
}

// write runs one statement in a transaction of its own and returns how many rows
// it changed.
func (s *Store) write(ctx context.Context, st statement) (int64, error) {
	if s.dialect.oneWriter() {
		// In turn with this process's own transactions, which hold the write lock:
		// waiting in a line is fair and cheap, SQLite's busy handler is neither.
		give, err := s.turn(ctx)
		if err != nil {
			return 0, err
		}
		defer give()
	}
	var n int64
	err := s.patiently(ctx, func() (err error) {
		n, err = affected(s.db.ExecContext(ctx, st.query, st.args...))
		return err
	})
	return n, err
}

func affected(res sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// patiently repeats fn while the database says that others are in the way: a
// locked file, a serialization failure of a single statement. It gives up with
// ErrBusy after LockTimeout, or with ctx.
func (s *Store) patiently(ctx context.Context, fn func() error) error {
	start := time.Now()
	for delay := busyDelay; ; delay = nextDelay(delay) {
		err := fn()
		switch f := s.dialect.fault(err); {
		case err == nil:
			return nil
		case f == faultLocked && !s.dialect.oneWriter():
			return err // the server has waited for lock_timeout already
		case f != faultLocked && f != faultRetry:
			return err
		case time.Since(start) >= s.cfg.LockTimeout, sleep(ctx, delay) != nil:
			return s.busy("%w", err)
		}
	}
}

// Delays between two tries at a lock: short at first, for most locks are.
const (
	busyDelay    = time.Millisecond
	busyDelayMax = 50 * time.Millisecond
)

func nextDelay(d time.Duration) time.Duration { return min(2*d, busyDelayMax) }

// sleep waits for about d, never in step with others, or returns why ctx ended.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d/2 + rand.N(d)) //nolint:gosec // jitter
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// waits returns what a statement under ctx may wait for. Where ctx ends sooner
// than LockTimeout, so does the wait, a little earlier: a time-out that the
// server tells of costs nothing, while most drivers close the connection of a
// statement that they give up. It is not made shorter than a second, since the
// claim's lock_timeout stays with the handler, who is bounded otherwise.
func (s *Store) waits(ctx context.Context, lease time.Duration) waits {
	w := waits{lock: s.cfg.LockTimeout, idle: s.cfg.IdleTimeout}
	if w.idle == 0 {
		w.idle = max(DefaultIdleTimeout, lease)
	}
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		w.lock = min(w.lock, max(left-left/8, min(w.lock, time.Second)))
	}
	return w
}

// turned gives its turn back when it ends, whichever way.
type turned struct {
	transaction

	give func()
}

func (t *turned) commit(ctx context.Context) error {
	defer t.give()
	return t.transaction.commit(ctx)
}

func (t *turned) rollback(ctx context.Context) {
	defer t.give()
	t.transaction.rollback(ctx)
}
