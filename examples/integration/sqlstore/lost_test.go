package sqlstore_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// events collects what a store tells its observer.
type events struct {
	mu   sync.Mutex // guards seen
	seen []sqlstore.Event
}

func (e *events) watch(cfg *sqlstore.Config) {
	cfg.OnEvent = func(ev sqlstore.Event) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.seen = append(e.seen, ev)
	}
}

func (e *events) want(t *testing.T, kinds ...sqlstore.EventKind) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	var got []string
	for _, ev := range e.seen {
		got = append(got, ev.Kind.String())
	}
	var want []string
	for _, k := range kinds {
		want = append(want, k.String())
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("events %v: want %v", got, want)
	}
	e.seen = nil
}

func atStatement(parts []string, l loss) func(string) loss {
	return func(query string) loss {
		for _, part := range parts {
			if strings.HasPrefix(query, part) && (strings.Contains(query, "belay_idempotency") || query == part) {
				return l
			}
		}
		return keep
	}
}

// The connection breaks at the claim: the same owner claims again, is given the
// execution, and it is the first one still.
func TestLost_AtClaim(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		for name, l := range map[string]loss{"request": loseRequest, "reply": loseReply} {
			t.Run(name, func(t *testing.T) {
				db, tap := openTapped(t, k, k.dsn(t))
				createEffects(t, db)
				store := k.newStore(t, db)
				c := newClaim()
				tap.start(atStatement([]string{"INSERT"}, l))
				exec, rec, err := store.Begin(testContext(t), c)
				if err == nil {
					t.Fatalf("Begin returned %v, %v and no error for a claim whose connection broke", exec, rec)
				}
				exec = grant(t, store, c)
				if epoch := idempotency.Epoch(exec.Context(testContext(t))); epoch != 1 {
					t.Errorf("the epoch is %d: want 1, it is the same claim", epoch)
				}
				must(t, effect(exec.Context(testContext(t)), store, "claim", "1"))
				mustFinish(t, exec, "done")
				wantReplay(t, store, c, "done")
				wantEffects(t, db, "claim", 1)
			})
		}
	})
}

// The connection breaks before the COMMIT is sent: nothing is committed, Finish
// says so, and the key can be claimed at once.
func TestLost_BeforeCommit(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		for name, at := range map[string]struct {
			parts []string
			loss  loss
		}{
			"finish_request": {[]string{"UPDATE"}, loseRequest},
			"finish_reply":   {[]string{"UPDATE"}, loseReply},
			"commit_request": {[]string{"COMMIT"}, loseRequest},
		} {
			t.Run(name, func(t *testing.T) {
				db, tap := openTapped(t, k, k.dsn(t))
				createEffects(t, db)
				store := k.newStore(t, db)
				c := newClaim()
				exec := grant(t, store, c)
				must(t, effect(exec.Context(testContext(t)), store, "lost", "1"))
				tap.start(atStatement(at.parts, at.loss))
				rec, err := exec.Finish(testContext(t), outcome("lost"))
				if err == nil || errors.Is(err, idempotency.ErrInDoubt) || errors.Is(err, idempotency.ErrLost) {
					t.Fatalf("Finish returned %+v, %v: want an error that says nothing is committed", rec, err)
				}
				wantEffects(t, db, "lost", 0)

				exec = grant(t, store, another(c))
				must(t, effect(exec.Context(testContext(t)), store, "lost", "2"))
				mustFinish(t, exec, "second")
				wantReplay(t, store, c, "second")
				wantEffects(t, db, "lost", 1)
			})
		}
	})
}

// The COMMIT's reply is lost: Finish finds out that it stands.
func TestLost_CommitReply(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		var seen events
		db, tap := openTapped(t, k, k.dsn(t))
		createEffects(t, db)
		store := k.newStore(t, db, seen.watch)
		for _, before := range []idempotency.State{idempotency.StateAbsent, idempotency.StateFree} {
			c := newClaim()
			if before == idempotency.StateFree {
				must(t, grant(t, store, another(c)).Release(testContext(t)))
			}
			exec := grant(t, store, c)
			must(t, effect(exec.Context(testContext(t)), store, "commit", "1"))
			tap.start(atStatement([]string{"COMMIT"}, loseReply))
			mustFinish(t, exec, "done")
			seen.want(t, sqlstore.EventCommitLost)
			wantReplay(t, store, c, "done")
		}
		wantEffects(t, db, "commit", 2)
	})
}

// The COMMIT is on its way for longer than anybody waits for it, and arrives.
// Whoever asks meanwhile must not be told that it did not.
func TestLost_CommitArrivesLate(t *testing.T) {
	for _, k := range []kind{pgSame, pgLease} {
		t.Run(k.name, func(t *testing.T) {
			dsn := k.dsn(t)
			db := open(t, k.driver(), dsn)
			createEffects(t, db)
			far, network := through(t, dsn)
			var seen events
			store := k.newStore(t, open(t, k.driver(), far), seen.watch)
			c := newClaim()
			exec := grant(t, store, c)
			must(t, effect(exec.Context(testContext(t)), store, "late", ""))
			network.hold("commit\x00", 1500*time.Millisecond)
			ctx, cancel := context.WithTimeout(testContext(t), 2*time.Second) // 1 s for the COMMIT
			defer cancel()
			rec, err := exec.Finish(ctx, outcome("done"))
			if err != nil && !errors.Is(err, idempotency.ErrInDoubt) {
				t.Errorf("Finish returned %+v, %v: want what became of the COMMIT, or ErrInDoubt", rec, err)
			}
			wantReplay(t, k.newStore(t, db), c, "done")
			wantEffects(t, db, "late", 1)
		})
	}
}

// The COMMIT's reply is lost and the database cannot be asked: nobody knows, and
// Finish says that. A later claim finds out.
func TestLost_CommitInDoubt(t *testing.T) {
	each(t, func(t *testing.T, k kind) {
		var seen events
		db, tap := openTapped(t, k, k.dsn(t))
		createEffects(t, db)
		store := k.newStore(t, db, seen.watch)
		c := newClaim()
		exec := grant(t, store, c)
		must(t, effect(exec.Context(testContext(t)), store, "doubt", "1"))
		db.SetMaxIdleConns(0) // whoever asks needs a new connection
		tap.start(func(query string) loss {
			if query != "COMMIT" {
				return keep
			}
			tap.down = true // pass, which calls this, holds the lock
			return loseReply
		})
		ctx, cancel := context.WithTimeout(testContext(t), 300*time.Millisecond)
		defer cancel()
		rec, err := exec.Finish(ctx, outcome("done"))
		if !errors.Is(err, idempotency.ErrInDoubt) {
			t.Fatalf("Finish returned %+v, %v: want ErrInDoubt", rec, err)
		}
		seen.want(t, sqlstore.EventInDoubt)
		tap.setDown(false)
		wantReplay(t, store, c, "done")
		wantEffects(t, db, "doubt", 1)
	})
}
