package sqlstore_test

import (
	"bytes"
	"context"
	"database/sql"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// A keyed success costs the handler's own statements plus two, on SQLite three:
// the life sign, which is set with the BEGIN and looked at before the end.
func TestCost_Statements(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		db, tap := openTapped(t, k, k.dsn(t))
		createEffects(t, db)
		store := k.newStore(t, db)
		handler := func(ctx context.Context) error {
			if err := effect(ctx, store, "cost", "1"); err != nil {
				return err
			}
			return effect(ctx, store, "cost", "2")
		}

		tap.start(nil)
		must(t, store.Run(testContext(t), handler))
		bare := len(tap.statements())
		if bare != 2 {
			t.Errorf("a keyless call sent %d statements: want the handler's 2\n%q", bare, tap.statements())
		}

		c := newClaim()
		tap.start(nil)
		exec := grant(t, store, c)
		must(t, handler(exec.Context(testContext(t))))
		mustFinish(t, exec, "done")
		more := 2
		if k.dialect == sqlstore.SQLite {
			more = 3
		}
		if sent := tap.statements(); len(sent) != bare+more {
			t.Errorf("a keyed success sent %d statements, the handler's own are %d: want %d more\n%q", len(sent), bare, more, sent)
		}

		tap.start(nil)
		wantReplay(t, store, c, "done")
		if sent := tap.statements(); len(sent) > 2 {
			t.Errorf("a replay sent %d statements: want at most 2\n%q", len(sent), sent)
		}
	})
}

// A finish in SameTransaction mode is a heap-only update on PostgreSQL: there is
// no index over a column that it changes. A handler that takes longer than its
// lease moves expires_at, and pays for it (see storetest's
// RetentionRunsFromTheFinish).
func TestCost_FinishTouchesNoIndex(t *testing.T) {
	store, db := pgSame.fresh(t)
	c := newClaim()
	exec := grant(t, store, c)
	ctx := exec.Context(testContext(t))
	tx, err := store.Tx(ctx)
	must(t, err)
	row := func(q reader) (state int, id []byte, expires time.Time) {
		t.Helper()
		must(t, q.QueryRowContext(ctx, `SELECT state, id, expires_at FROM belay_idempotency`).Scan(&state, &id, &expires))
		return state, id, expires
	}
	claimed, id, expires := row(tx)
	mustFinish(t, exec, "done")
	done, idAfter, expiresAfter := row(db)
	if claimed != int(idempotency.StateRunning) || done != int(idempotency.StateDone) {
		t.Fatalf("the states are %d and %d: want a claim and its finish", claimed, done)
	}
	if !bytes.Equal(id, idAfter) || !expires.Equal(expiresAfter) {
		t.Errorf("the finish changed (id, expires_at) from (%x, %v) to (%x, %v)", id, expires, idAfter, expiresAfter)
	}
	var indexed string
	must(t, db.QueryRowContext(ctx, `SELECT string_agg(DISTINCT a.attname, ' ' ORDER BY a.attname)
		FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND (a.attnum = ANY (i.indkey)
			OR pg_get_expr(i.indpred, i.indrelid) LIKE '%' || a.attname || '%')
		WHERE i.indrelid = 'belay_idempotency'::regclass`).Scan(&indexed))
	if indexed != "expires_at id" {
		t.Errorf("there are indexes over %s: want expires_at and id alone", indexed)
	}
}

// Who looks for questions that are still open finds them by the index that
// Sweep uses, and Sweep does not read them.
func TestCost_OpenQuestionsByIndex(t *testing.T) {
	for _, k := range []kind{pgSame, pgLease} {
		t.Run(k.name, func(t *testing.T) {
			db, tap := openTapped(t, k, k.dsn(t))
			store, ctx := k.newStore(t, db), testContext(t)
			unknown := newClaim()
			must(t, grant(t, store, unknown).Abandon(ctx))
			mustFinish(t, grant(t, store, newClaim()), "done")
			must(t, grant(t, store, newClaim()).Release(ctx))
			want := [][]byte{unknown.ID[:]}
			if k.mode == sqlstore.Lease {
				running := newClaim()
				exec := grant(t, store, running)
				defer func() { must(t, exec.Release(ctx)) }()
				want = append(want, running.ID[:])
			}
			conn, err := db.Conn(ctx)
			must(t, err)
			defer func() { must(t, conn.Close()) }()
			_, err = conn.ExecContext(ctx, `SET enable_seqscan = off`) // three rows are read faster than looked up
			must(t, err)
			const open = `SELECT id FROM belay_idempotency WHERE expires_at = 'infinity' ORDER BY created_at`
			if got := column[[]byte](t, conn, open); !slices.EqualFunc(got, want, bytes.Equal) {
				t.Errorf("open are %x: want %x", got, want)
			}
			tap.start(nil)
			_, err = store.Sweep(ctx, 10)
			must(t, err)
			for _, query := range append(tap.statements(), open) {
				query = strings.ReplaceAll(query, "$1::bigint", "10")
				plan := strings.Join(column[string](t, conn, `EXPLAIN `+query), "\n")
				if !strings.Contains(plan, "Index Cond: (expires_at ") {
					t.Errorf("%s is planned as\n%s\nwant a condition on the index", query, plan)
				}
			}
			_, err = conn.ExecContext(ctx, `RESET enable_seqscan`)
			must(t, err)
		})
	}
}

// reader is a pool, a connection, or a transaction of the store's.
type reader interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// column returns the one column of a query.
func column[T any](t *testing.T, from reader, query string) []T {
	t.Helper()
	rows, err := from.QueryContext(testContext(t), query)
	must(t, err)
	defer func() { _ = rows.Close() }()
	var all []T
	for rows.Next() {
		var v T
		must(t, rows.Scan(&v))
		all = append(all, v)
	}
	must(t, rows.Err())
	return all
}
