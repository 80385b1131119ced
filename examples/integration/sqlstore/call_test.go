package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/belayrpc/belay/examples/internal/testpg"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

func TestTx_BelongsToACall(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		ctx := testContext(t)
		if tx, err := store.Tx(ctx); !errors.Is(err, sqlstore.ErrNoCall) {
			t.Errorf("Tx outside a call returned %v, %v: want ErrNoCall", tx, err)
		}
		other := k.newStore(t, db, func(cfg *sqlstore.Config) { cfg.Table = "other" })
		exec := grant(t, store, newClaim())
		if tx, err := other.Tx(exec.Context(ctx)); !errors.Is(err, sqlstore.ErrNoCall) {
			t.Errorf("Tx of another store returned %v, %v: want ErrNoCall", tx, err)
		}
		hctx := exec.Context(ctx)
		tx, err := store.Tx(hctx)
		must(t, err)
		must(t, insertEffect(hctx, tx, "call", "1"))
		mustFinish(t, exec, "done")

		if err := insertEffect(hctx, tx, "call", "2"); !errors.Is(err, sqlstore.ErrCallOver) {
			t.Errorf("Exec after the call returned %v: want ErrCallOver", err)
		}
		if _, err := tx.QueryContext(hctx, `SELECT 1`); !errors.Is(err, sqlstore.ErrCallOver) { //nolint:rowserrcheck,sqlclosecheck // there are none
			t.Errorf("Query after the call returned %v: want ErrCallOver", err)
		}
		if err := tx.QueryRowContext(hctx, `SELECT 1`).Scan(new(int)); !errors.Is(err, sqlstore.ErrCallOver) {
			t.Errorf("QueryRow after the call returned %v: want ErrCallOver", err)
		}
		if _, err := tx.PrepareContext(hctx, `SELECT 1`); !errors.Is(err, sqlstore.ErrCallOver) { //nolint:sqlclosecheck // there is none
			t.Errorf("Prepare after the call returned %v: want ErrCallOver", err)
		}
		if _, err := store.Tx(hctx); !errors.Is(err, sqlstore.ErrCallOver) {
			t.Errorf("Tx after the call returned %v: want ErrCallOver", err)
		}
		wantEffects(t, db, "call", 1)
	})
}

func TestTx_QueriesAndPreparedStatements(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		exec := grant(t, store, newClaim())
		ctx := exec.Context(testContext(t))
		tx, err := store.Tx(ctx)
		must(t, err)
		stmt, err := tx.PrepareContext(ctx, `INSERT INTO effects (what, token) VALUES ('prepared', $1)`)
		must(t, err)
		for _, token := range []string{"1", "2"} {
			_, err := stmt.ExecContext(ctx, token)
			must(t, err)
		}
		must(t, stmt.Close()) //nolint:sqlclosecheck // before the transaction ends, as a handler does
		tokens := column[string](t, tx, `SELECT token FROM effects WHERE what = 'prepared' ORDER BY token`)
		if got := strings.Join(tokens, " "); got != "1 2" {
			t.Errorf("the transaction reads %q of what it wrote: want 1 2", got)
		}
		wantEffects(t, db, "prepared", 0) // nobody else does, yet
		mustFinish(t, exec, "done")
		wantEffects(t, db, "prepared", 2)
	})
}

func TestRun(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		ctx := testContext(t)
		must(t, store.Run(ctx, func(ctx context.Context) error {
			must(t, effect(ctx, store, "run", "outer"))
			return store.Run(ctx, func(ctx context.Context) error { return effect(ctx, store, "run", "inner") })
		}))
		wantEffects(t, db, "run", 2)

		refusal := errors.New("no")
		if err := store.Run(ctx, func(ctx context.Context) error {
			must(t, effect(ctx, store, "run", "error"))
			return refusal
		}); !errors.Is(err, refusal) {
			t.Errorf("Run returned %v: want the function's error", err)
		}
		func() {
			defer func() {
				if p := recover(); p != "boom" {
					t.Errorf("Run let %v through: want the function's panic", p)
				}
			}()
			_ = store.Run(ctx, func(ctx context.Context) error {
				must(t, effect(ctx, store, "run", "panic"))
				panic("boom")
			})
		}()
		wantEffects(t, db, "run", 2)

		// A caller that goes does not take the transaction along.
		gone, cancel := context.WithCancel(ctx)
		must(t, store.Run(gone, func(ctx context.Context) error {
			err := effect(ctx, store, "run", "gone")
			cancel()
			return err
		}))
		wantEffects(t, db, "run", 3)
		must(t, store.Run(ctx, func(context.Context) error { return nil })) // no Tx, nothing to commit
	})
}

func TestPlain_FinishesOnce(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		ctx, finish := store.Plain(testContext(t))
		must(t, effect(ctx, store, "plain", "1"))
		must(t, finish(nil))
		if err := finish(nil); !errors.Is(err, sqlstore.ErrCallOver) {
			t.Errorf("the second finish returned %v: want ErrCallOver", err)
		}
		wantEffects(t, db, "plain", 1)

		// Within a keyed call it is that call's transaction.
		exec := grant(t, store, newClaim())
		ctx, finish = store.Plain(exec.Context(testContext(t)))
		must(t, effect(ctx, store, "plain", "2"))
		must(t, finish(nil))
		must(t, exec.Release(testContext(t)))
		wantEffects(t, db, "plain", 1)
	})
}

// The verdict of a final error is kept, and what the handler wrote is not.
func TestFinish_Undo(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		for _, free := range []bool{false, true} {
			c := newClaim()
			if free {
				must(t, grant(t, store, another(c)).Release(testContext(t)))
			}
			exec := grant(t, store, c)
			must(t, effect(exec.Context(testContext(t)), store, "undo", ""))
			rec, err := exec.Finish(testContext(t), &idempotency.Outcome{Data: []byte("refused"), Undo: true})
			if err != nil || rec.State != idempotency.StateDone || string(rec.Outcome.Data) != "refused" {
				t.Fatalf("Finish returned %+v, %v: want DONE with the verdict", rec, err)
			}
			wantReplay(t, store, c, "refused")
		}
		wantEffects(t, db, "undo", 0)
	})
}

// Release keeps fingerprint and epoch, so another request is still refused.
func TestRelease_KeepsTheFingerprint(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		c := newClaim()
		exec := grant(t, store, c)
		must(t, effect(exec.Context(testContext(t)), store, "release", ""))
		must(t, exec.Release(testContext(t)))
		other := another(c)
		other.Fingerprint = "another request"
		if rec := wantRecord(t, store, other, idempotency.StateFree); !rec.Mismatch {
			t.Errorf("another request got %+v: want a mismatch", rec)
		}
		again := grant(t, store, another(c))
		if epoch := idempotency.Epoch(again.Context(testContext(t))); epoch != 2 {
			t.Errorf("the epoch is %d: want 2", epoch)
		}
		must(t, again.Release(testContext(t)))
		wantEffects(t, db, "release", 0)
	})
}

// Abandon undoes what was written through Tx and leaves the question open; the
// answer is Resolve's.
func TestAbandon(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		c := newClaim()
		exec := grant(t, store, c)
		must(t, effect(exec.Context(testContext(t)), store, "abandon", ""))
		must(t, exec.Abandon(testContext(t)))
		wantEffects(t, db, "abandon", 0)
		wantRecord(t, store, another(c), idempotency.StateUnknown)
		must(t, store.Resolve(testContext(t), c.ID, idempotency.Resolution{State: idempotency.StateDone, Outcome: outcome("found out")}))
		wantReplay(t, store, c, "found out")
	})
}

func TestTxUnused(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		var seen events
		store, db := k.fresh(t, seen.watch)
		c := newClaim()
		mustFinish(t, grant(t, store, c), "done")
		seen.want(t, sqlstore.EventTxUnused)
		wantReplay(t, store, c, "done")

		exec := grant(t, store, newClaim())
		_, err := exec.Finish(testContext(t), &idempotency.Outcome{Data: []byte("error"), Undo: true})
		must(t, err)
		must(t, grant(t, store, newClaim()).Release(testContext(t)))
		seen.want(t) // neither was OK

		strict := k.newStore(t, db, seen.watch, func(cfg *sqlstore.Config) { cfg.FailOnTxUnused = true })
		c = newClaim()
		if rec, err := grant(t, strict, c).Finish(testContext(t), outcome("done")); !errors.Is(err, sqlstore.ErrTxUnused) {
			t.Errorf("Finish returned %+v, %v: want ErrTxUnused", rec, err)
		}
		seen.want(t, sqlstore.EventTxUnused)
		must(t, grant(t, strict, another(c)).Release(testContext(t)))
	})
}

// An observer that panics takes no call with it.
func TestOnEvent_Panics(t *testing.T) {
	store, _ := sqliteLease.fresh(t, func(cfg *sqlstore.Config) {
		cfg.OnEvent = func(sqlstore.Event) { panic("boom") }
	})
	mustFinish(t, grant(t, store, newClaim()), "done")
}

func TestBusy(t *testing.T) {
	for _, k := range []kind{pgSame, sqliteSame} {
		t.Run(k.name, func(t *testing.T) {
			store, _ := k.fresh(t, func(cfg *sqlstore.Config) {
				cfg.MaxConcurrent, cfg.LockTimeout = 1, 50*time.Millisecond
			})
			exec := grant(t, store, newClaim())
			if e, rec, err := store.Begin(testContext(t), newClaim()); !errors.Is(err, idempotency.ErrBusy) {
				t.Errorf("Begin returned %v, %+v, %v: want ErrBusy", e, rec, err)
			}
			ctx, cancel := context.WithTimeout(testContext(t), 20*time.Millisecond)
			defer cancel()
			if e, rec, err := store.Begin(ctx, newClaim()); !errors.Is(err, idempotency.ErrBusy) {
				t.Errorf("Begin returned %v, %+v, %v: want ErrBusy", e, rec, err)
			}
			must(t, exec.Release(testContext(t)))
			must(t, grant(t, store, newClaim()).Release(testContext(t)))
		})
	}
}

// The claim's one statement sets both time-outs, for its transaction only.
func TestSameTransaction_TimeOuts(t *testing.T) {
	store, db := pgSame.fresh(t, func(cfg *sqlstore.Config) {
		cfg.LockTimeout, cfg.IdleTimeout = 1234*time.Millisecond, 5678*time.Millisecond
	})
	for _, free := range []bool{false, true} { // a new record, and one that is taken over
		c := newClaim()
		if free {
			must(t, grant(t, store, another(c)).Release(testContext(t)))
		}
		exec := grant(t, store, c)
		tx, err := store.Tx(exec.Context(testContext(t)))
		must(t, err)
		var lock, idle string
		const query = `SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')`
		must(t, tx.QueryRowContext(testContext(t), query).Scan(&lock, &idle))
		if lock != "1234ms" || idle != "5678ms" {
			t.Errorf("lock_timeout %s, idle_in_transaction_session_timeout %s: want 1234ms and 5678ms", lock, idle)
		}
		must(t, exec.Release(testContext(t)))
		must(t, db.QueryRowContext(testContext(t), query).Scan(&lock, &idle))
		if lock != "0" || idle != "0" {
			t.Errorf("after the transaction: lock_timeout %s, idle_in_transaction_session_timeout %s: want 0 and 0", lock, idle)
		}
	}
}

// A duplicate in another process waits for the row, and is told RUNNING when it
// has waited long enough.
func TestSameTransaction_DuplicateElsewhere(t *testing.T) {
	short := func(cfg *sqlstore.Config) { cfg.LockTimeout = 100 * time.Millisecond }
	dsn := pgSame.dsn(t)
	db := open(t, "pgx", dsn)
	createEffects(t, db)
	here := pgSame.newStore(t, db, short)
	elsewhere := pgSame.newStore(t, open(t, "pgx", dsn), short)
	c := newClaim()
	exec := grant(t, here, c)
	wantRecord(t, elsewhere, another(c), idempotency.StateRunning)
	late := another(c)
	late.Late = true
	wantRecord(t, elsewhere, late, idempotency.StateRunning)
	if err := elsewhere.Resolve(testContext(t), c.ID, idempotency.Resolution{State: idempotency.StateCancelled}); !errors.Is(err, idempotency.ErrNotResolvable) {
		t.Errorf("Resolve returned %v: want ErrNotResolvable", err)
	}
	must(t, effect(exec.Context(testContext(t)), here, "elsewhere", ""))
	mustFinish(t, exec, "done")
	wantReplay(t, elsewhere, c, "done")
	wantEffects(t, db, "elsewhere", 1)
}

func TestMigrate_ManyAtOnceAndAgain(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		dsn := k.dsn(t)
		var wg sync.WaitGroup
		for range 6 {
			db := open(t, k.driver(), dsn)
			store, err := sqlstore.New(db, sqlstore.Config{Dialect: k.dialect, Mode: k.mode})
			must(t, err)
			wg.Go(func() {
				if err := store.Migrate(testContext(t)); err != nil {
					t.Errorf("Migrate: %v", err)
				}
			})
		}
		wg.Wait()
		k.newStore(t, open(t, k.driver(), dsn))
	})
}

// Schema is what Migrate does, for those who apply it themselves.
func TestSchema(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		db := open(t, k.driver(), k.dsn(t))
		store, err := sqlstore.New(db, sqlstore.Config{Dialect: k.dialect, Table: "by_hand"})
		must(t, err)
		queries, err := store.Schema()
		must(t, err)
		for _, q := range queries {
			_, err := db.ExecContext(testContext(t), q)
			must(t, err)
		}
		if err := store.Check(testContext(t)); err != nil {
			t.Error(err)
		}
	})
}

func TestTable_InASchema(t *testing.T) {
	db := open(t, "pgx", testpg.Database(t))
	_, err := db.ExecContext(testContext(t), `CREATE SCHEMA app`)
	must(t, err)
	store := pgSame.newStore(t, db, func(cfg *sqlstore.Config) { cfg.Table = "app.Records" })
	mustFinish(t, grant(t, store, newClaim()), "done")
	var n int
	must(t, db.QueryRowContext(testContext(t), `SELECT count(*) FROM app."Records"`).Scan(&n))
	if n != 1 {
		t.Errorf("app.Records has %d rows: want 1", n)
	}
}

func TestCheck_SaysWhatIsWrong(t *testing.T) {
	file := func(t *testing.T, pragmas string) string {
		t.Helper()
		return "file:" + filepath.Join(t.TempDir(), "test.db") + "?" + pragmas
	}
	migrated := func(t *testing.T, s *sqlstore.Store, _ *sql.DB) { t.Helper(); must(t, s.Migrate(testContext(t))) }
	exec := func(queries ...string) func(t *testing.T, s *sqlstore.Store, db *sql.DB) {
		return func(t *testing.T, s *sqlstore.Store, db *sql.DB) {
			t.Helper()
			migrated(t, s, db)
			for _, q := range queries {
				_, err := db.ExecContext(testContext(t), q)
				must(t, err)
			}
		}
	}
	for name, tc := range map[string]struct {
		dialect sqlstore.Dialect
		dsn     string
		prepare func(t *testing.T, s *sqlstore.Store, db *sql.DB)
		want    string
	}{
		"sqlite, no table":        {sqlstore.SQLite, file(t, "_pragma=journal_mode(WAL)&_pragma=synchronous(2)&_pragma=busy_timeout(100)"), nil, "run Migrate"},
		"sqlite, synchronous":     {sqlstore.SQLite, file(t, "_pragma=journal_mode(WAL)&_pragma=synchronous(1)&_pragma=busy_timeout(100)"), migrated, "synchronous is 1: must be FULL"},
		"sqlite, no busy_timeout": {sqlstore.SQLite, file(t, "_pragma=journal_mode(WAL)&_pragma=synchronous(2)&_pragma=busy_timeout(0)"), migrated, "busy_timeout is 0: must be positive"},
		"sqlite, busy_timeout":    {sqlstore.SQLite, file(t, "_pragma=journal_mode(WAL)&_pragma=synchronous(2)&_pragma=busy_timeout(60000)"), migrated, "busy_timeout is 1m0s: must be at most 30s"},
		"sqlite, journal_mode":    {sqlstore.SQLite, file(t, "_pragma=journal_mode(MEMORY)&_pragma=synchronous(2)&_pragma=busy_timeout(100)"), migrated, "journal_mode is memory"},
		"sqlite, in memory":       {sqlstore.SQLite, "file::memory:?_pragma=busy_timeout(100)", nil, "the database is in memory"},
		"sqlite, newer schema": {
			sqlstore.SQLite, file(t, "_pragma=journal_mode(WAL)&_pragma=synchronous(2)&_pragma=busy_timeout(100)"),
			exec(`UPDATE belay_idempotency_schema SET version = 99`), "schema version 99: must be at 1",
		},
		"postgresql, no table":           {sqlstore.PostgreSQL, "", nil, "run Migrate"},
		"postgresql, other columns":      {sqlstore.PostgreSQL, "", exec(`ALTER TABLE belay_idempotency DROP COLUMN outcome`), "not what Migrate makes"},
		"postgresql, synchronous_commit": {sqlstore.PostgreSQL, "&synchronous_commit=off", migrated, "synchronous_commit is off"},
		"postgresql, read only":          {sqlstore.PostgreSQL, "&default_transaction_read_only=on", nil, "read_only is on: must be off"},
	} {
		t.Run(name, func(t *testing.T) {
			driver, dsn := "sqlite", tc.dsn
			if tc.dialect == sqlstore.PostgreSQL {
				driver, dsn = "pgx", testpg.Database(t)+tc.dsn
			}
			db := open(t, driver, dsn)
			store, err := sqlstore.New(db, sqlstore.Config{Dialect: tc.dialect})
			must(t, err)
			if tc.prepare != nil {
				tc.prepare(t, store, db)
			}
			if err := store.Check(testContext(t)); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Check returned %v: want %q in it", err, tc.want)
			}
		})
	}
}

// In Lease mode the level tells the store's transactions from the nothing that a
// COMMIT in SQL leaves behind, so it must not be what everything else has.
func TestCheck_IsolationOfLease(t *testing.T) {
	for level, server := range map[sql.IsolationLevel]string{
		sql.LevelDefault: "read uncommitted", sql.LevelReadCommitted: "read uncommitted",
		sql.LevelRepeatableRead: "repeatable read", sql.LevelSerializable: "serializable",
	} {
		db := open(t, "pgx", testpg.Database(t)+"&default_transaction_isolation="+url.PathEscape(server))
		store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.PostgreSQL, Mode: sqlstore.Lease, Isolation: level})
		must(t, err)
		must(t, store.Migrate(testContext(t)))
		want := fmt.Sprintf("default_transaction_isolation is %q: must be another one in Lease mode", server)
		if err := store.Check(testContext(t)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Isolation %v: Check returned %v: want %q in it", level, err, want)
		}
	}
}

// What may be forgotten in a crash can be accepted, by name.
func TestCheck_RelaxedDurability(t *testing.T) {
	dsn := "file:" + filepath.Join(t.TempDir(), "test.db") + "?_pragma=journal_mode(WAL)&_pragma=synchronous(1)&_pragma=busy_timeout(100)"
	sqliteLease.newStore(t, open(t, "sqlite", dsn), func(cfg *sqlstore.Config) { cfg.RelaxedDurability = true })
	pgSame.newStore(t, open(t, "pgx", testpg.Database(t)+"&synchronous_commit=off"), func(cfg *sqlstore.Config) { cfg.RelaxedDurability = true })
}

func TestSweep_Batches(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		for range 20 {
			mustFinish(t, grant(t, store, newClaim()), "done")
		}
		c := newClaim()
		must(t, grant(t, store, c).Abandon(testContext(t)))
		shift(t, k, db, 2*time.Hour)
		n, err := store.Sweep(testContext(t), 15)
		must(t, err)
		if n != 15 {
			t.Errorf("Sweep(15) took %d of 20", n)
		}
		n, err = store.Sweep(testContext(t), 1000)
		must(t, err)
		if n != 5 {
			t.Errorf("Sweep(1000) took %d of the last 5", n)
		}
		wantRecord(t, store, another(c), idempotency.StateUnknown)
	})
}

func TestCorruptRecords(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		for _, damage := range []string{
			`UPDATE belay_idempotency SET state = 9`,
			`UPDATE belay_idempotency SET outcome = NULL`,
			`UPDATE belay_idempotency SET epoch = -1`,
			`UPDATE belay_idempotency SET owner = fingerprint`,
		} {
			c := newClaim()
			mustFinish(t, grant(t, store, c), "done")
			_, err := db.ExecContext(testContext(t), damage)
			must(t, err)
			if exec, rec, err := store.Begin(testContext(t), another(c)); !errors.Is(err, idempotency.ErrCorrupt) {
				t.Errorf("%s: Begin returned %v, %+v, %v: want ErrCorrupt", damage, exec, rec, err)
			}
		}
	})
}
