package sqlstore_test

import (
	"context"
	"testing"

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
