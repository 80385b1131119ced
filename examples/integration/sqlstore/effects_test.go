package sqlstore_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// The table of effects is deliberately not unique on anything: it shows a second
// effect where there is one.
func createEffects(t *testing.T, db *sql.DB) {
	t.Helper()
	if _, err := db.ExecContext(testContext(t), `CREATE TABLE effects (what text NOT NULL, token text NOT NULL)`); err != nil {
		t.Fatal(err)
	}
}

func insertEffect(ctx context.Context, tx sqlstore.Tx, what, token string) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO effects (what, token) VALUES ($1, $2)`, what, token)
	return err
}

// effect is what a handler does: one row, through its transaction.
func effect(ctx context.Context, store *sqlstore.Store, what, token string) error {
	tx, err := store.Tx(ctx)
	if err != nil {
		return err
	}
	return insertEffect(ctx, tx, what, token)
}

func countEffects(t *testing.T, db *sql.DB, what string) int {
	t.Helper()
	var n int
	if err := db.QueryRowContext(testContext(t), `SELECT count(*) FROM effects WHERE what = $1`, what).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func wantEffects(t *testing.T, db *sql.DB, what string, want int) {
	t.Helper()
	if got := countEffects(t, db, what); got != want {
		t.Errorf("%s: %d effects are committed: want %d", what, got, want)
	}
}

// newClaim returns a claim on a new identity.
func newClaim() idempotency.Claim {
	c := idempotency.Claim{
		Fingerprint: "request", Scope: "tests", Method: "/test.Service/Method",
		Lease: 30 * time.Second, Retention: time.Hour,
	}
	_, _ = rand.Read(c.ID[:])
	_, _ = rand.Read(c.Owner[:])
	return c
}

// another returns the same call's claim by somebody else.
func another(c idempotency.Claim) idempotency.Claim {
	_, _ = rand.Read(c.Owner[:])
	return c
}

func outcome(text string) *idempotency.Outcome { return &idempotency.Outcome{Data: []byte(text)} }

// grant claims and must be given the execution.
func grant(t *testing.T, store *sqlstore.Store, c idempotency.Claim) idempotency.Execution {
	t.Helper()
	exec, rec, err := store.Begin(testContext(t), c)
	if err != nil || exec == nil {
		t.Fatalf("Begin returned %v, %+v, %v: want an execution", exec, rec, err)
	}
	return exec
}

// wantRecord claims and must be told what stands.
func wantRecord(t *testing.T, store *sqlstore.Store, c idempotency.Claim, want idempotency.State) *idempotency.Record {
	t.Helper()
	exec, rec, err := store.Begin(testContext(t), c)
	if exec != nil {
		_ = exec.Release(testContext(t))
	}
	if err != nil || rec == nil || rec.State != want {
		t.Fatalf("Begin returned %v, %+v, %v: want a record in state %v", exec, rec, err, want)
	}
	return rec
}

func wantReplay(t *testing.T, store *sqlstore.Store, c idempotency.Claim, want string) {
	t.Helper()
	rec := wantRecord(t, store, another(c), idempotency.StateDone)
	if got := string(rec.Outcome.Data); got != want {
		t.Errorf("the outcome is %q: want %q", got, want)
	}
}

func mustFinish(t *testing.T, exec idempotency.Execution, text string) {
	t.Helper()
	rec, err := exec.Finish(testContext(t), outcome(text))
	if err != nil || rec.State != idempotency.StateDone || string(rec.Outcome.Data) != text {
		t.Fatalf("Finish returned %+v, %v: want DONE with %q", rec, err, text)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
