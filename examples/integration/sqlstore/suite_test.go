package sqlstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
	"github.com/belayrpc/belay/idempotency/storetest"
)

func suiteOptions(k kind) []storetest.Option {
	opts := []storetest.Option{storetest.Atomic()}
	if k.mode == sqlstore.SameTransaction {
		opts = append(opts, storetest.NoLease())
	}
	return opts
}

// SQLite in SameTransaction mode is not here: the suite holds two executions at
// once, and there the first one is the one writer. What it does with one is in
// TestCases and in all other tests.
func TestStore(t *testing.T) {
	for _, k := range []kind{pgSame, pgLease, sqliteLease} {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			// A claim that meets another execution waits this long to be told so.
			store, _ := k.fresh(t, func(cfg *sqlstore.Config) { cfg.LockTimeout = 100 * time.Millisecond })
			storetest.Run(t, func(*testing.T) idempotency.Store { return store }, suiteOptions(k)...)
		})
	}
}

func TestCases(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, _ := k.fresh(t, func(cfg *sqlstore.Config) {
			if k.mode == sqlstore.SameTransaction {
				// Shorter than the cases' patience, which want to be told of an
				// execution rather than to wait for it.
				cfg.LockTimeout = 20 * time.Millisecond
			}
		})
		opts := suiteOptions(k)
		if k.dialect == sqlstore.PostgreSQL {
			// Not on SQLite: a handler that writes first keeps every rival out, so
			// no lease is ever overtaken (TestLease_OneWriterIsNotOvertaken).
			opts = append(opts, storetest.Effect(func(ctx context.Context) error { return effect(ctx, store, "suite", "") }))
		}
		storetest.Cases(t, func(*testing.T) idempotency.Store { return store }, opts...)
	})
}
