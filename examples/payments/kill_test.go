//go:build unix

package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

func TestCharge_ClientKilledBetweenSaveAndReply(t *testing.T) {
	for name, dsn := range databases {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, dsn(t))
			release := w.lockAccount()
			client := command(t, w.chargeArgs(500, "o-1")...)
			if err := client.Start(); err != nil {
				t.Fatal(err)
			}
			w.eventually("the call is at the database", w.callWaits)
			w.kill(client)
			if !w.pending() {
				t.Fatal("the client sent what it had not saved")
			}
			saved, err := os.ReadFile(w.file)
			if err != nil {
				t.Fatal(err)
			}
			release()
			if isPostgres(w.dsn) {
				// The handler has begun, so it goes on without its caller.
				w.eventually("the charge is made", func() bool { return w.number(`SELECT count(*) FROM charges`) == 1 })
			}

			// Whatever the next run is asked for, it first ends what was begun.
			out := w.charge(999, "o-2")
			var id string
			if err := w.db.QueryRowContext(t.Context(), `SELECT charge_id FROM charges`).Scan(&id); err != nil {
				t.Fatal(err)
			}
			if want := "charged 500 cents to alice for o-1: " + id; !strings.HasPrefix(out, want) {
				t.Errorf("the client resumed %s and printed %q, want %q…", saved, out, want)
			}
			if w.pending() {
				t.Error("the client still remembers what is over")
			}
			w.wantBooks(1, 500)

			w.charge(250, "o-3")
			w.wantBooks(2, 750)
		})
	}
}

// lockAccount keeps handlers from writing, from outside, and returns what lets
// them.
func (w *world) lockAccount() (release func()) {
	w.t.Helper()
	conn, err := w.db.Conn(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	lock := []string{`BEGIN IMMEDIATE`}
	if isPostgres(w.dsn) {
		lock = []string{`BEGIN`, `SELECT 1 FROM accounts WHERE name = 'alice' FOR UPDATE`}
	}
	for _, query := range lock {
		if _, err := conn.ExecContext(w.t.Context(), query); err != nil {
			w.t.Fatal(err)
		}
	}
	return func() {
		w.t.Helper()
		if _, err := conn.ExecContext(w.t.Context(), `ROLLBACK`); err != nil {
			w.t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			w.t.Fatal(err)
		}
	}
}

// callWaits reports whether a handler waits for lockAccount. SQLite does not say
// who waits for it; there the client has at least saved its key.
func (w *world) callWaits() bool {
	if !isPostgres(w.dsn) {
		return w.pending()
	}
	return w.number(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
}

func TestCharge_ClientKilledAtAnyTime(t *testing.T) {
	w := newWorld(t, databases["sqlite"](t))
	const orders, cents = 16, 10
	resumed := 0
	for n := range orders {
		order := fmt.Sprintf("o-%d", n)
		client := command(t, w.chargeArgs(cents, order)...)
		if err := client.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = client.Wait()
		}()
		// From before the key is saved to after the reply is there, in steps.
		timer := time.NewTimer(time.Duration(n) * 5 * time.Millisecond)
		select {
		case <-timer.C:
		case <-ended:
		}
		timer.Stop()
		_ = client.Process.Kill() // an error says that it is done already
		<-ended
		// The next run ends what this one began. Where nothing had begun it is the
		// first, and where all was over it would be a second charge, of an order
		// that the books have: a client without a key would not know.
		if w.pending() {
			resumed++
		}
		if w.pending() || w.number(`SELECT count(*) FROM charges WHERE order_name = $1`, order) == 0 {
			w.charge(cents, order)
		}
	}
	w.wantBooks(orders, orders*cents)
	t.Logf("%d of %d were killed with a charge under way", resumed, orders)
}

func TestCharge_ServerKilled(t *testing.T) {
	for name, dsn := range databases {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, dsn(t))
			release := w.lockAccount()
			client := command(t, w.chargeArgs(500, "o-1")...)
			var out strings.Builder
			client.Stdout, client.Stderr = &out, &out
			if err := client.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = client.Process.Kill() })
			w.eventually("the call is at the database", w.callWaits)
			w.kill(w.server)
			release()
			w.start()
			if err := client.Wait(); err != nil {
				t.Fatalf("%v\n%s", err, out.String())
			}
			w.wantBooks(1, 500)
		})
	}
}
