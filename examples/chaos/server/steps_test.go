package main

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"modernc.org/sqlite"

	"github.com/belayrpc/belay/examples/internal/sqltap"
	"github.com/belayrpc/belay/examples/internal/testpg"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// The points are found by the text of the store's statements. When that changes,
// this fails, and not the chaos run for want of kills.
func TestStepOf_KnowsTheStoresStatements(t *testing.T) {
	for name, open := range map[string]func(*testing.T, sqltap.Hook) (*sql.DB, sqlstore.Dialect){
		"sqlite":     openSQLite,
		"postgresql": openPostgreSQL,
	} {
		for _, mode := range []sqlstore.Mode{sqlstore.SameTransaction, sqlstore.Lease} {
			t.Run(name+"_"+mode.String(), func(t *testing.T) {
				var seen recorder
				db, dialect := open(t, seen.hook)
				if got, want := seen.execute(t, db, dialect, mode, nil), []string{"claim", "finish", "commit"}; !slices.Equal(got, want) {
					t.Errorf("a success passes %q, want %q", got, want)
				}
				declined := &idempotency.Outcome{Data: []byte("no"), Undo: true}
				if got, want := seen.execute(t, db, dialect, mode, declined), []string{"claim", "finish"}; !slices.Equal(got, want) {
					t.Errorf("a final error passes %q, want %q", got, want)
				}
			})
		}
	}
}

// recorder names the steps that pass.
type recorder struct {
	mu    sync.Mutex // guards steps
	steps []string
}

func (r *recorder) hook(_ context.Context, op sqltap.Op) func(error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := stepOf(op); s != nil {
		r.steps = append(r.steps, map[*step]string{claimStep: "claim", finishStep: "finish", commitStep: "commit"}[s])
	}
	return nil
}

// execute runs one execution by hand and returns the steps that it passed.
func (r *recorder) execute(t *testing.T, db *sql.DB, dialect sqlstore.Dialect, mode sqlstore.Mode, verdict *idempotency.Outcome) []string {
	t.Helper()
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: dialect, Mode: mode})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := store.Migrate(ctx); err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	r.steps = nil
	r.mu.Unlock()
	key := idempotency.NewKey()
	execution, record, err := store.Begin(ctx, idempotency.Claim{
		ID: idempotency.IDOf("s", "m", key.Value), Owner: idempotency.Owner{1}, Fingerprint: "f", Lease: time.Minute, Retention: time.Hour,
	})
	if err != nil || execution == nil {
		t.Fatalf("Begin = %v, %v, %v", execution, record, err)
	}
	_, txErr := store.Tx(execution.Context(ctx))
	if verdict == nil {
		verdict = &idempotency.Outcome{Data: []byte("yes")}
	}
	_, err = execution.Finish(ctx, verdict)
	if err := errors.Join(txErr, err); err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.steps
}

func openSQLite(t *testing.T, hook sqltap.Hook) (*sql.DB, sqlstore.Dialect) {
	t.Helper()
	c, err := sqlite.NewConnector("file:" + filepath.Join(t.TempDir(), "steps.db") + "?_pragma=busy_timeout(2000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		t.Fatal(err)
	}
	return tapped(t, sqltap.Wrap(c, hook)), sqlstore.SQLite
}

func openPostgreSQL(t *testing.T, hook sqltap.Hook) (*sql.DB, sqlstore.Dialect) {
	t.Helper()
	c, _, err := connectorOf(orderFor(testpg.Database(t)))
	if err != nil {
		t.Fatal(err)
	}
	return tapped(t, sqltap.Wrap(c, hook)), sqlstore.PostgreSQL
}
