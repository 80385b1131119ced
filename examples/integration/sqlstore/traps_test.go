package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/belayrpc/belay/examples/internal/testpg"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// A handler that also uses the *sql.DB finds a connection, however many calls
// there are: the store never holds more than half of the pool.
func TestTrap_HandlerUsesTheDatabaseToo(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t, func(cfg *sqlstore.Config) { cfg.LockTimeout = 20 * time.Second })
		ctx := testContext(t)
		var wg sync.WaitGroup
		for range 3 * poolSize {
			wg.Go(func() {
				exec, rec, err := store.Begin(ctx, newClaim())
				if err != nil {
					t.Errorf("Begin returned %+v, %v", rec, err)
					return
				}
				hctx := exec.Context(ctx)
				if err := effect(hctx, store, "beside", ""); err != nil {
					t.Error(err)
				}
				var one int
				if err := db.QueryRowContext(hctx, `SELECT 1`).Scan(&one); err != nil {
					t.Errorf("the handler's own query: %v", err)
				}
				if _, err := exec.Finish(ctx, outcome("done")); err != nil {
					t.Errorf("Finish: %v", err)
				}
			})
		}
		wg.Wait()
		wantEffects(t, db, "beside", 3*poolSize)
	})
}

// On SQLite a handler that writes past its own Tx meets its own lock: it is told
// so when busy_timeout is over, and hangs nobody.
func TestTrap_SQLiteWritePastTheTx(t *testing.T) {
	for _, k := range []kind{sqliteSame, sqliteLease} {
		t.Run(k.name, func(t *testing.T) {
			dsn := strings.Replace(k.dsn(t), "busy_timeout(2000)", "busy_timeout(100)", 1)
			db := open(t, k.driver(), dsn)
			createEffects(t, db)
			store := k.newStore(t, db)
			c := newClaim()
			exec := grant(t, store, c)
			must(t, effect(exec.Context(testContext(t)), store, "past", "tx"))
			_, err := db.ExecContext(testContext(t), `INSERT INTO effects (what, token) VALUES ('past', 'db')`)
			if err == nil || !strings.Contains(err.Error(), "locked") {
				t.Errorf("a write past the Tx returned %v: want that the database is locked", err)
			}
			must(t, exec.Release(testContext(t)))
			wantEffects(t, db, "past", 0)
			must(t, grant(t, store, another(c)).Release(testContext(t)))
		})
	}
}

// The caller goes between the handler's end and the verdict: the transaction is
// not its, and the outcome is recorded.
func TestTrap_CancelBeforeTheVerdict(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		ctx, cancel := context.WithCancel(testContext(t))
		c := newClaim()
		exec, rec, err := store.Begin(ctx, c)
		if exec == nil {
			t.Fatalf("Begin returned %+v, %v", rec, err)
		}
		must(t, effect(exec.Context(ctx), store, "cancel", ""))
		cancel()
		mustFinish(t, exec, "done")
		wantReplay(t, store, c, "done")
		wantEffects(t, db, "cancel", 1)
	})
}

// Even when the finish itself is given no time, there is one effect with its
// record, or neither.
func TestTrap_FinishWithoutTime(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		c := newClaim()
		exec := grant(t, store, c)
		must(t, effect(exec.Context(testContext(t)), store, "late", ""))
		ctx, cancel := context.WithCancel(testContext(t))
		cancel()
		if rec, err := exec.Finish(ctx, outcome("first")); err == nil {
			t.Fatalf("Finish with a context that is over returned %+v", rec)
		}
		// In Lease mode without time there was none to free the key either: its own
		// lease, or its owner, does.
		exec, rec, err := store.Begin(testContext(t), c)
		if exec == nil {
			t.Fatalf("Begin returned %+v, %v: want the execution", rec, err)
		}
		must(t, effect(exec.Context(testContext(t)), store, "late", ""))
		mustFinish(t, exec, "second")
		wantReplay(t, store, c, "second")
		wantEffects(t, db, "late", 1)
	})
}

// A host vanishes without a word in the middle of a handler: its key is free
// again within the idle time-out, and its lease respectively.
func TestTrap_VanishedHost(t *testing.T) {
	const patience = 500 * time.Millisecond
	for _, k := range []kind{pgSame, pgLease} {
		t.Run(k.name, func(t *testing.T) {
			short := func(cfg *sqlstore.Config) { cfg.IdleTimeout = patience }
			dsn := k.dsn(t)
			db := open(t, k.driver(), dsn)
			createEffects(t, db)
			store := k.newStore(t, db, short)

			far, network := through(t, dsn)
			vanishing, err := sql.Open(k.driver(), far)
			must(t, err)
			t.Cleanup(func() { _ = vanishing.Close() })
			there := k.newStore(t, vanishing, short)
			c := newClaim()
			c.Lease = patience
			exec := grant(t, there, c)
			must(t, effect(exec.Context(testContext(t)), there, "vanished", "there"))
			network.die()

			start := time.Now()
			var again idempotency.Execution
			for again == nil && time.Since(start) < 10*time.Second {
				var err error
				again, _, err = store.Begin(testContext(t), another(c))
				must(t, err)
				if again == nil {
					time.Sleep(10 * time.Millisecond)
				}
			}
			if again == nil {
				t.Fatalf("the key is still taken after %v", time.Since(start))
			}
			must(t, effect(again.Context(testContext(t)), store, "vanished", "here"))
			mustFinish(t, again, "here")

			ctx, cancel := context.WithTimeout(testContext(t), 200*time.Millisecond)
			defer cancel()
			if rec, err := exec.Finish(ctx, outcome("there")); err == nil {
				t.Errorf("the vanished host's Finish returned %+v", rec)
			}
			wantEffects(t, db, "vanished", 1)
		})
	}
}

// Several processes write one SQLite file as fast as they can: nothing is done
// twice, and nobody is turned away.
func TestTrap_SQLiteBusyStorm(t *testing.T) {
	for _, k := range []kind{sqliteSame, sqliteLease} {
		t.Run(k.name, func(t *testing.T) {
			const processes, keys, each = 3, 12, 4
			dsn := strings.Replace(k.dsn(t), "busy_timeout(2000)", "busy_timeout(1)", 1)
			db := open(t, k.driver(), dsn)
			createEffects(t, db)
			patient := func(cfg *sqlstore.Config) { cfg.LockTimeout = 20 * time.Second }
			k.newStore(t, db, patient)
			claims := make([]idempotency.Claim, keys)
			for i := range claims {
				claims[i] = newClaim()
			}
			var wg sync.WaitGroup
			for range processes {
				store := k.newStore(t, open(t, k.driver(), dsn), patient)
				for i := range keys * each {
					wg.Go(func() { mustCall(t, store, claims[i%keys], strconv.Itoa(i%keys), 0) })
				}
			}
			wg.Wait()
			for i := range keys {
				wantEffects(t, db, strconv.Itoa(i), 1)
			}
		})
	}
}

// mustCall is a server's call: it claims until the key is its own or done, and
// runs a handler with one effect. It returns whether it ran to its end.
func mustCall(t *testing.T, store *sqlstore.Store, c idempotency.Claim, what string, work time.Duration) bool {
	t.Helper()
	ctx := testContext(t)
	for {
		exec, rec, err := store.Begin(ctx, another(c))
		switch {
		case err != nil:
			t.Errorf("Begin: %v", err)
			return false
		case rec != nil && rec.State == idempotency.StateDone:
			return false
		case rec != nil && rec.State == idempotency.StateRunning:
			time.Sleep(5 * time.Millisecond)
			continue
		case rec != nil:
			t.Errorf("Begin returned %+v", rec)
			return false
		}
		if err := effect(exec.Context(ctx), store, what, ""); err != nil {
			t.Errorf("the handler: %v", err)
		}
		if work > 0 {
			// At random, up to work: handlers that all take longer than the lease
			// may overtake each other for ever, which no store can help.
			time.Sleep(rand.N(work))
		}
		rec, err = exec.Finish(ctx, outcome(what))
		switch {
		case err == nil && string(rec.Outcome.Data) == what:
			return true
		case errors.Is(err, idempotency.ErrLost):
		default:
			t.Errorf("Finish returned %+v, %v", rec, err)
			return false
		}
	}
}

// shift sets every time in the database back by d, which is what a clock that is
// set forward by d does to them.
func shift(t *testing.T, k kind, db *sql.DB, d time.Duration) {
	t.Helper()
	by := strconv.FormatInt(d.Milliseconds(), 10)
	if k.dialect == sqlstore.PostgreSQL {
		by = fmt.Sprintf("interval '%d milliseconds'", d.Milliseconds())
	}
	query := `UPDATE belay_idempotency SET leased_at = leased_at - ` + by + `, lease_until = lease_until - ` + by +
		`, created_at = created_at - ` + by + `, expires_at = expires_at - ` + by
	if _, err := db.ExecContext(testContext(t), query); err != nil {
		t.Fatal(err)
	}
}

// The store's clock is set forward and back: a lease may end too soon, which
// costs work and no more, and it never lasts for the time that was put back.
func TestTrap_ClockSteps(t *testing.T) {
	for _, k := range []kind{pgLease, sqliteLease} {
		for name, step := range map[string]time.Duration{"forward": 2 * time.Hour, "back": -2 * time.Hour} {
			t.Run(k.name+"/"+name, func(t *testing.T) {
				store, db := k.fresh(t)
				c := newClaim()
				first := grant(t, store, c)
				wantRecord(t, store, another(c), idempotency.StateRunning)
				shift(t, k, db, step)
				second := grant(t, store, another(c))
				must(t, effect(second.Context(testContext(t)), store, name, "second"))
				mustFinish(t, second, "second")
				must(t, effect(first.Context(testContext(t)), store, name, "first"))
				rec, err := first.Finish(testContext(t), outcome("first"))
				if err != nil || string(rec.Outcome.Data) != "second" {
					t.Errorf("the first owner's Finish returned %+v, %v: want the second's outcome, which stands", rec, err)
				}
				wantEffects(t, db, name, 1)
			})
		}
	}
}

// DDL is part of the transaction on both databases.
func TestTrap_DDL(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		ddl := func(ctx context.Context, table string) {
			t.Helper()
			tx, err := store.Tx(ctx)
			must(t, err)
			_, err = tx.ExecContext(ctx, `CREATE TABLE `+table+` (n integer)`)
			must(t, err)
		}
		ctx := testContext(t)
		undone := grant(t, store, newClaim())
		ddl(undone.Context(ctx), "undone")
		must(t, effect(undone.Context(ctx), store, "ddl", "undone"))
		must(t, undone.Release(ctx))
		if _, err := db.ExecContext(ctx, `SELECT n FROM undone`); err == nil {
			t.Error("a released execution's table is there")
		}
		done := grant(t, store, newClaim())
		ddl(done.Context(ctx), "done")
		must(t, effect(done.Context(ctx), store, "ddl", "done"))
		mustFinish(t, done, "done")
		if _, err := db.ExecContext(ctx, `SELECT n FROM done`); err != nil {
			t.Errorf("a finished execution's table: %v", err)
		}
		wantEffects(t, db, "ddl", 1)
	})
}

// A handler that ends the transaction in SQL is found out, however it ends: the
// record becomes UNKNOWN, and nobody runs the call again.
func TestTrap_EndInSQL(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		var seen events
		store, _ := k.fresh(t, seen.watch)
		for _, end := range [][]string{{"COMMIT"}, {"ROLLBACK"}, {"COMMIT", "BEGIN"}, {"ROLLBACK", "BEGIN"}} {
			for name, verdict := range map[string]func(exec idempotency.Execution) error{
				"finish": func(exec idempotency.Execution) error {
					_, err := exec.Finish(testContext(t), outcome("done"))
					return err
				},
				"error": func(exec idempotency.Execution) error {
					_, err := exec.Finish(testContext(t), &idempotency.Outcome{Data: []byte("error"), Undo: true})
					return err
				},
				"release": func(exec idempotency.Execution) error { return exec.Release(testContext(t)) },
			} {
				t.Run(strings.Join(end, ",")+"/"+name, func(t *testing.T) {
					c := newClaim()
					exec := grant(t, store, c)
					ctx := exec.Context(testContext(t))
					must(t, effect(ctx, store, end[0]+name, "before"))
					tx, err := store.Tx(ctx)
					must(t, err)
					for _, query := range end {
						_, err = tx.ExecContext(ctx, query)
						must(t, err)
					}
					must(t, effect(ctx, store, end[0]+name, "after"))
					if err := verdict(exec); !errors.Is(err, idempotency.ErrInDoubt) {
						t.Errorf("the verdict returned %v: want ErrInDoubt", err)
					}
					seen.want(t, sqlstore.EventTxSevered)
					wantRecord(t, store, another(c), idempotency.StateUnknown)
				})
			}
		}
	})
}

// A handler that swallows a statement's error: PostgreSQL has undone everything,
// so nothing is committed and the key is free. SQLite has undone the statement.
func TestTrap_SwallowedError(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		c := newClaim()
		exec := grant(t, store, c)
		ctx := exec.Context(testContext(t))
		must(t, effect(ctx, store, "swallowed", "1"))
		tx, err := store.Tx(ctx)
		must(t, err)
		if _, err := tx.ExecContext(ctx, `INSERT INTO effects (what, token) VALUES (NULL, NULL)`); err == nil {
			t.Fatal("NULL in a NOT NULL column was taken")
		}
		rec, err := exec.Finish(testContext(t), outcome("done"))
		if k.dialect == sqlstore.SQLite {
			must(t, err)
			wantEffects(t, db, "swallowed", 1)
			return
		}
		if !errors.Is(err, idempotency.ErrConflict) {
			t.Errorf("Finish returned %+v, %v: want ErrConflict", rec, err)
		}
		wantEffects(t, db, "swallowed", 0)
		must(t, grant(t, store, another(c)).Release(testContext(t)))
	})
}

// An interrupted write ends SQLite's transaction. A handler that swallows that
// error must not commit what it does next.
func TestTrap_SQLiteInterruptedWrite(t *testing.T) {
	const slow = `INSERT INTO effects (what, token)
		WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000000) SELECT 'interrupted', i FROM n`
	for _, k := range []kind{sqliteSame, sqliteLease} {
		t.Run(k.name, func(t *testing.T) {
			store, db := k.fresh(t)
			c := newClaim()
			exec := grant(t, store, c)
			ctx := exec.Context(testContext(t))
			tx, err := store.Tx(ctx)
			must(t, err)
			must(t, insertEffect(ctx, tx, "interrupted", "before"))
			impatient, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			_, err = tx.ExecContext(impatient, slow)
			cancel()
			if err == nil {
				t.Fatal("the slow statement was not interrupted")
			}
			if err := insertEffect(ctx, tx, "interrupted", "after"); err == nil {
				t.Error("a statement after the end of the transaction was let through")
			}
			if err := tx.QueryRowContext(ctx, `SELECT 1`).Scan(new(int)); err == nil {
				t.Error("a query after the end of the transaction was let through")
			}
			rec, err := exec.Finish(testContext(t), outcome("done"))
			if !errors.Is(err, idempotency.ErrConflict) {
				t.Errorf("Finish returned %+v, %v: want ErrConflict", rec, err)
			}
			wantEffects(t, db, "interrupted", 0)
			must(t, grant(t, store, another(c)).Release(testContext(t)))
		})
	}
}

// The same through a prepared statement, whose errors the store cannot see: it
// is found out at the end.
func TestTrap_SQLiteInterruptedUnseen(t *testing.T) {
	const slow = `INSERT INTO effects (what, token)
		WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000000) SELECT 'unseen', i FROM n`
	for _, k := range []kind{sqliteSame, sqliteLease} {
		t.Run(k.name, func(t *testing.T) {
			var seen events
			store, _ := k.fresh(t, seen.watch)
			c := newClaim()
			exec := grant(t, store, c)
			ctx := exec.Context(testContext(t))
			tx, err := store.Tx(ctx)
			must(t, err)
			must(t, insertEffect(ctx, tx, "unseen", "before"))
			stmt, err := tx.PrepareContext(ctx, slow)
			must(t, err)
			impatient, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			_, err = stmt.ExecContext(impatient)
			cancel()
			if err == nil {
				t.Fatal("the slow statement was not interrupted")
			}
			must(t, stmt.Close()) //nolint:sqlclosecheck // before the transaction ends, as a handler does
			must(t, insertEffect(ctx, tx, "unseen", "after"))
			rec, err := exec.Finish(testContext(t), outcome("done"))
			if !errors.Is(err, idempotency.ErrInDoubt) {
				t.Errorf("Finish returned %+v, %v: want ErrInDoubt", rec, err)
			}
			seen.want(t, sqlstore.EventTxSevered)
			wantRecord(t, store, another(c), idempotency.StateUnknown)
		})
	}
}

// Rows that a handler forgot to close keep neither the call nor the connection.
func TestTrap_RowsLeftOpen(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		store, db := k.fresh(t)
		must(t, store.Run(testContext(t), func(ctx context.Context) error { return effect(ctx, store, "rows", "1") }))
		c := newClaim()
		exec := grant(t, store, c)
		ctx := exec.Context(testContext(t))
		tx, err := store.Tx(ctx)
		must(t, err)
		rows, err := tx.QueryContext(ctx, `SELECT what FROM effects`) //nolint:sqlclosecheck // that is what is tested
		must(t, err)
		if !rows.Next() {
			t.Fatal("there is no row")
		}
		_, err = exec.Finish(testContext(t), outcome("done"))
		if rows.Err() != nil {
			t.Log(rows.Err()) // the driver's choice
		}
		if err != nil {
			// pgx refuses the finish while rows are open: then nothing is committed.
			must(t, grant(t, store, another(c)).Release(testContext(t)))
		} else {
			wantReplay(t, store, c, "done")
		}
		for start := time.Now(); db.Stats().InUse > 0; time.Sleep(time.Millisecond) {
			if time.Since(start) > 5*time.Second {
				t.Fatal("the connection is still in use")
			}
		}
	})
}

// The database refuses the COMMIT: nothing is committed, and the key is free.
func TestTrap_CommitRefused(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		dsn := k.dsn(t)
		if k.dialect == sqlstore.SQLite {
			dsn += "&_pragma=foreign_keys(1)"
		}
		db := open(t, k.driver(), dsn)
		createEffects(t, db)
		store := k.newStore(t, db)
		ctx := testContext(t)
		for _, q := range []string{
			`CREATE TABLE parents (id integer PRIMARY KEY)`,
			`CREATE TABLE children (parent integer REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)`,
		} {
			_, err := db.ExecContext(ctx, q)
			must(t, err)
		}
		c := newClaim()
		exec := grant(t, store, c)
		must(t, effect(exec.Context(ctx), store, "refused", ""))
		tx, err := store.Tx(exec.Context(ctx))
		must(t, err)
		_, err = tx.ExecContext(ctx, `INSERT INTO children (parent) VALUES (7)`)
		must(t, err)
		rec, err := exec.Finish(ctx, outcome("done"))
		if !errors.Is(err, idempotency.ErrConflict) {
			t.Errorf("Finish returned %+v, %v: want ErrConflict", rec, err)
		}
		wantEffects(t, db, "refused", 0)
		must(t, grant(t, store, another(c)).Release(ctx))
	})
}

// What a handler's transaction runs under is what the configuration says, and
// where that says nothing, what its comment does.
func TestIsolation(t *testing.T) {
	for name, tc := range map[string]struct {
		kind   kind
		server string // default_transaction_isolation
		level  sql.IsolationLevel
		want   string
	}{
		"same transaction":                     {pgSame, "read committed", sql.LevelDefault, "read committed"},
		"same transaction, of the connection":  {pgSame, "serializable", sql.LevelDefault, "serializable"},
		"same transaction, of a lower level":   {pgSame, "read uncommitted", sql.LevelDefault, "read uncommitted"},
		"same transaction, against the server": {pgSame, "serializable", sql.LevelReadCommitted, "read committed"},
		"same transaction, stricter":           {pgSame, "read committed", sql.LevelRepeatableRead, "repeatable read"},
		"lease, which marks its transactions":  {pgLease, "serializable", sql.LevelDefault, "read uncommitted"},
		"lease, read committed":                {pgLease, "repeatable read", sql.LevelReadCommitted, "read uncommitted"},
		"lease, stricter":                      {pgLease, "read committed", sql.LevelSerializable, "serializable"},
	} {
		t.Run(name, func(t *testing.T) {
			db := open(t, "pgx", testpg.Database(t)+"&default_transaction_isolation="+url.PathEscape(tc.server))
			createEffects(t, db)
			store := tc.kind.newStore(t, db, func(cfg *sqlstore.Config) { cfg.Isolation = tc.level })
			c := newClaim()
			exec := grant(t, store, c)
			ctx := exec.Context(testContext(t))
			tx, err := store.Tx(ctx)
			must(t, err)
			var level string
			must(t, tx.QueryRowContext(ctx, `SELECT current_setting('transaction_isolation')`).Scan(&level))
			if level != tc.want {
				t.Errorf("the handler's transaction is %s: want %s", level, tc.want)
			}
			must(t, effect(ctx, store, "isolation", "1"))
			mustFinish(t, exec, "done")
			wantEffects(t, db, "isolation", 1)
			wantRecord(t, store, another(c), idempotency.StateDone)

			undone := grant(t, store, newClaim())
			must(t, effect(undone.Context(ctx), store, "isolation", "2"))
			must(t, undone.Release(ctx))
			wantEffects(t, db, "isolation", 1)
		})
	}
}

// Two SERIALIZABLE transactions that each read what the other writes: one is
// refused, and succeeds when it is run again.
func TestTrap_SerializationFailure(t *testing.T) {
	for _, k := range []kind{pgSame, pgLease} {
		t.Run(k.name, func(t *testing.T) {
			store, db := k.fresh(t, func(cfg *sqlstore.Config) { cfg.Isolation = sql.LevelSerializable })
			ctx := testContext(t)
			work := func(exec idempotency.Execution, token string) {
				t.Helper()
				tx, err := store.Tx(exec.Context(ctx))
				must(t, err)
				var n int
				must(t, tx.QueryRowContext(ctx, `SELECT count(*) FROM effects WHERE what = 'skew'`).Scan(&n))
				must(t, insertEffect(ctx, tx, "skew", token))
			}
			a, b := newClaim(), newClaim()
			execA, execB := grant(t, store, a), grant(t, store, b)
			work(execA, "a")
			work(execB, "b")
			mustFinish(t, execA, "a")
			rec, err := execB.Finish(ctx, outcome("b"))
			if !errors.Is(err, idempotency.ErrConflict) {
				t.Fatalf("Finish returned %+v, %v: want ErrConflict", rec, err)
			}
			wantEffects(t, db, "skew", 1)
			execB = grant(t, store, another(b))
			work(execB, "b")
			mustFinish(t, execB, "b")
			wantEffects(t, db, "skew", 2)
		})
	}
}

// A thousand duplicates over three processes: one effect, one execution, and no
// more than two connections per key and process.
func TestTrap_ThousandDuplicates(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		const processes, duplicates = 3, 1000
		dsn := k.dsn(t)
		db := open(t, k.driver(), dsn)
		createEffects(t, db)
		k.newStore(t, db)
		c := newClaim()
		var ran, most atomic.Int64
		var wg sync.WaitGroup
		for i := range processes {
			own := open(t, k.driver(), dsn)
			store := k.newStore(t, own)
			for range duplicates / processes {
				wg.Go(func() {
					if mustCall(t, store, c, "thousand", 20*time.Millisecond) {
						ran.Add(1)
					}
				})
			}
			wg.Go(func() {
				for range 100 {
					most.Store(max(most.Load(), int64(own.Stats().InUse)))
					time.Sleep(time.Millisecond)
				}
			})
			_ = i
		}
		wg.Wait()
		wantEffects(t, db, "thousand", 1)
		if ran.Load() != 1 {
			t.Errorf("%d executions ended with their own outcome: want 1", ran.Load())
		}
		if most.Load() > 2 {
			t.Errorf("a process used %d connections for one key: want at most 2", most.Load())
		}
	})
}

// Handlers that are slower than their lease overtake each other all the time;
// one of them commits.
func TestTrap_LeaseTooShort(t *testing.T) {
	for _, k := range []kind{pgLease, sqliteLease} {
		t.Run(k.name, func(t *testing.T) {
			const keys = 6
			dsn := k.dsn(t)
			db := open(t, k.driver(), dsn)
			createEffects(t, db)
			patient := func(cfg *sqlstore.Config) { cfg.LockTimeout = 20 * time.Second }
			k.newStore(t, db, patient)
			var wg sync.WaitGroup
			var claims [keys]idempotency.Claim
			for i := range claims {
				claims[i] = newClaim()
				claims[i].Lease = 5 * time.Millisecond
			}
			for range 3 {
				store := k.newStore(t, open(t, k.driver(), dsn), patient)
				for i := range claims {
					wg.Go(func() { mustCall(t, store, claims[i], strconv.Itoa(i), 30*time.Millisecond) })
				}
			}
			wg.Wait()
			for i := range claims {
				wantEffects(t, db, strconv.Itoa(i), 1)
			}
		})
	}
}

// Processes in both modes share a table, as in a rolling change from one to the
// other.
func TestTrap_BothModesOnOneTable(t *testing.T) {
	for _, pair := range [][2]kind{{pgSame, pgLease}, {sqliteSame, sqliteLease}} {
		t.Run(pair[0].dialect.String(), func(t *testing.T) {
			const keys = 10
			dsn := pair[0].dsn(t)
			db := open(t, pair[0].driver(), dsn)
			createEffects(t, db)
			patient := func(cfg *sqlstore.Config) { cfg.LockTimeout = 20 * time.Second }
			pair[0].newStore(t, db, patient)
			var claims [keys]idempotency.Claim
			for i := range claims {
				claims[i] = newClaim()
				claims[i].Lease = 20 * time.Millisecond
			}
			var wg sync.WaitGroup
			for _, k := range pair {
				store := k.newStore(t, open(t, k.driver(), dsn), patient)
				for i := range 3 * keys {
					wg.Go(func() { mustCall(t, store, claims[i%keys], strconv.Itoa(i%keys), 10*time.Millisecond) })
				}
			}
			wg.Wait()
			for i := range claims {
				wantEffects(t, db, strconv.Itoa(i), 1)
			}
		})
	}
}

// On SQLite nobody overtakes a handler that has begun to write, whatever its
// lease says; one that has not is overtaken, and then may not commit.
func TestLease_OneWriterIsNotOvertaken(t *testing.T) {
	store, db := sqliteLease.fresh(t, func(cfg *sqlstore.Config) { cfg.LockTimeout = 50 * time.Millisecond })
	c := newClaim()
	c.Lease = 20 * time.Millisecond
	exec := grant(t, store, c)
	must(t, effect(exec.Context(testContext(t)), store, "writer", "1"))
	time.Sleep(2 * c.Lease)
	if rival, rec, err := store.Begin(testContext(t), another(c)); rival != nil || !errors.Is(err, idempotency.ErrBusy) {
		t.Errorf("Begin returned %v, %+v, %v: want ErrBusy", rival, rec, err)
	}
	if left, err := exec.Renew(testContext(t)); err != nil || left != c.Lease {
		t.Errorf("Renew returned %v, %v: want the lease, nobody can take it", left, err)
	}
	mustFinish(t, exec, "done")
	wantEffects(t, db, "writer", 1)

	c = newClaim()
	c.Lease = 20 * time.Millisecond
	slow := grant(t, store, c)
	time.Sleep(2 * c.Lease)
	c.Lease = time.Minute
	rival := grant(t, store, another(c))
	must(t, effect(slow.Context(testContext(t)), store, "overtaken", "1"))
	if rec, err := slow.Finish(testContext(t), outcome("slow")); !errors.Is(err, idempotency.ErrLost) {
		t.Errorf("Finish returned %+v, %v: want ErrLost", rec, err)
	}
	wantEffects(t, db, "overtaken", 0)
	must(t, effect(rival.Context(testContext(t)), store, "overtaken", "2"))
	mustFinish(t, rival, "rival")
	wantEffects(t, db, "overtaken", 1)
}
