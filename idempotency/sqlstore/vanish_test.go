package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// vanishing is a database whose record is in the way of the first claims and is
// gone whenever somebody looks: a sweeper, or a rollback, was in between. No real
// database can be made to do so at will.
type vanishing struct {
	mu        sync.Mutex
	conflicts int // claims that are still to meet the record
	claims    int // claims that were sent
	looks     int // reads that found nothing
}

func (v *vanishing) Connect(context.Context) (driver.Conn, error) { return vanishingConn{v}, nil }

func (v *vanishing) Driver() driver.Driver { return nil }

type vanishingConn struct{ v *vanishing }

func (c vanishingConn) ExecContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Result, error) {
	if !strings.HasPrefix(query, "INSERT INTO") {
		return driver.RowsAffected(0), nil
	}
	c.v.mu.Lock()
	defer c.v.mu.Unlock()
	c.v.claims++
	if c.v.conflicts > 0 {
		c.v.conflicts--
		return driver.RowsAffected(0), nil
	}
	return driver.RowsAffected(1), nil
}

func (c vanishingConn) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	c.v.mu.Lock()
	defer c.v.mu.Unlock()
	c.v.looks++
	return noRows{}, nil
}

func (c vanishingConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return c, nil }

func (c vanishingConn) Begin() (driver.Tx, error) { return c, nil }

func (vanishingConn) Prepare(string) (driver.Stmt, error) {
	return nil, errors.New("statements are not prepared here")
}

func (vanishingConn) Commit() error { return nil }

func (vanishingConn) Rollback() error { return nil }

func (vanishingConn) Close() error { return nil }

type noRows struct{}

func (noRows) Columns() []string { return make([]string, 8) }

func (noRows) Close() error { return nil }

func (noRows) Next([]driver.Value) error { return io.EOF }

// everyKind runs a test on a vanishing record for each dialect and mode.
func everyKind(t *testing.T, conflicts int, test func(t *testing.T, v *vanishing, store *sqlstore.Store)) {
	t.Helper()
	for _, d := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.SQLite} {
		for _, m := range []sqlstore.Mode{sqlstore.SameTransaction, sqlstore.Lease} {
			t.Run(d.String()+"/"+m.String(), func(t *testing.T) {
				v := &vanishing{conflicts: conflicts}
				db := sql.OpenDB(v)
				defer func() { _ = db.Close() }()
				store, err := sqlstore.New(db, sqlstore.Config{Dialect: d, Mode: m})
				if err != nil {
					t.Fatal(err)
				}
				test(t, v, store)
			})
		}
	}
}

// R7: what conflicted and is gone is claimed again, until the record is there.
func TestBegin_ClaimsAgainWhatVanished(t *testing.T) {
	const conflicts = 3
	everyKind(t, conflicts, func(t *testing.T, v *vanishing, store *sqlstore.Store) {
		exec, rec, err := store.Begin(t.Context(), claim())
		if err != nil || exec == nil {
			t.Fatalf("Begin returned %v, %+v, %v: want an execution", exec, rec, err)
		}
		if v.claims != conflicts+1 || v.looks != conflicts {
			t.Errorf("granted after %d claims and %d looks: want %d and %d, the last claim being the one that wrote the record",
				v.claims, v.looks, conflicts+1, conflicts)
		}
		if err := exec.Release(t.Context()); err != nil && !errors.Is(err, idempotency.ErrLost) {
			t.Errorf("Release: %v", err)
		}
	})
}

// R7: a claim that is never granted ends, and nothing runs.
func TestBegin_GivesUpOnWhatKeepsVanishing(t *testing.T) {
	everyKind(t, 1000, func(t *testing.T, v *vanishing, store *sqlstore.Store) {
		exec, rec, err := store.Begin(t.Context(), claim())
		if exec != nil || rec != nil || !errors.Is(err, idempotency.ErrBusy) {
			t.Errorf("Begin returned %v, %+v, %v: want ErrBusy alone", exec, rec, err)
		}
		if v.claims != 16 {
			t.Errorf("%d claims were sent: want 16", v.claims)
		}
	})
}
