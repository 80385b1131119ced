package sqlstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/belayrpc/belay/idempotency"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type pgError string

func (e pgError) Error() string { return "pg " + string(e) }

func (e pgError) SQLState() string { return string(e) }

type sqliteCodeError int

func (e sqliteCodeError) Error() string { return fmt.Sprint("sqlite ", int(e)) }

func (e sqliteCodeError) Code() int { return int(e) }

// A COMMIT whose error is not the database's word on it must be taken as open.
func TestFault_PostgreSQL(t *testing.T) {
	p := &postgresql{}
	for state, want := range map[string]fault{
		"55P03": faultLocked, "40001": faultRetry, "40P01": faultRetry, "25P02": faultAborted,
		"23505": faultRefused, "23503": faultRefused, "57014": faultRefused, "25P03": faultRefused,
		"40003": faultOther, "57P01": faultOther, "57P02": faultOther, "08006": faultOther, "53300": faultOther, "XX000": faultOther,
		"": faultOther, "1": faultOther,
	} {
		if got := p.fault(fmt.Errorf("wrapped: %w", pgError(state))); got != want {
			t.Errorf("fault of SQLSTATE %q is %d: want %d", state, got, want)
		}
	}
	for _, err := range []error{nil, errors.New("EOF"), context.DeadlineExceeded} {
		if got := p.fault(err); got != faultOther {
			t.Errorf("fault of %v is %d: want %d", err, got, faultOther)
		}
	}
}

func TestFault_SQLite(t *testing.T) {
	d := &sqlite{}
	for _, tc := range []struct {
		err  error
		want fault
	}{
		{sqliteCodeError(5), faultLocked},
		{sqliteCodeError(517), faultLocked}, // SQLITE_BUSY_SNAPSHOT
		{sqliteCodeError(6), faultLocked},
		{sqliteCodeError(787), faultRefused}, // SQLITE_CONSTRAINT_FOREIGNKEY
		{sqliteCodeError(9), faultOther},     // SQLITE_INTERRUPT
		{sqliteCodeError(13), faultOther},    // SQLITE_FULL
		{sqliteCodeError(10), faultOther},    // SQLITE_IOERR
		{fmt.Errorf("wrapped: %w", sqliteCodeError(5)), faultLocked},
		{errors.New("database is locked"), faultLocked},
		{errors.New("UNIQUE constraint failed: t.x"), faultRefused},
		{errors.New("unexpected EOF"), faultOther},
		{nil, faultOther},
	} {
		if got := d.fault(tc.err); got != tc.want {
			t.Errorf("fault of %v is %d: want %d", tc.err, got, tc.want)
		}
	}
}

func TestSQLiteNewEnough(t *testing.T) {
	for version, want := range map[string]bool{
		"3.36.0": false, "3.37.0": true, "3.9.1": false, "3.50.1": true, "4.0.0": true, "2.99.0": false, "": false, "x": false,
	} {
		if got := sqliteNewEnough(version); got != want {
			t.Errorf("sqliteNewEnough(%q) is %v: want %v", version, got, want)
		}
	}
}

// Every statement of every dialect is filled in, and knows only its own table.
func TestStatements_AreFilledIn(t *testing.T) {
	n, err := parseTable("app.records", PostgreSQL)
	if err != nil {
		t.Fatal(err)
	}
	c := &idempotency.Claim{Fingerprint: "f", Lease: time.Second, Retention: time.Hour}
	r, seen := &idempotency.Resolution{State: idempotency.StateFree}, &row{}
	for _, d := range []dialect{newPostgreSQL(n, SameTransaction, 0), newSQLite(n)} {
		for i, st := range []statement{
			d.claim(c, waits{}), d.takeOver(c, seen, 2, waits{}), d.read(c.ID, false), d.read(c.ID, true),
			d.finish(c, nil, true), d.finish(c, nil, false), d.conclude(c, 3, nil), d.renew(c), d.insert(c, 1, 2, nil, waits{}),
			d.replace(c, seen, 1, 2, nil, waits{}), d.resolve(c.ID, r), d.cancelAbsent(c.ID, r, waits{}), d.sweep(1),
		} {
			if strings.ContainsAny(st.query, "{}") || !strings.Contains(st.query, `"app"."records"`) {
				t.Errorf("%T: statement %d is not filled in:\n%s", d, i, st.query)
			}
		}
	}
}

func TestPgText(t *testing.T) {
	for in, want := range map[string]string{"plain": "plain", "": "", "a\x00b": "a\uFFFDb", "a\xffb": "a\uFFFDb", "ü": "ü"} {
		if got := pgText(in); got != want {
			t.Errorf("pgText(%q) is %q: want %q", in, got, want)
		}
	}
}

func TestWaits(t *testing.T) {
	s := &Store{cfg: Config{LockTimeout: 5 * time.Second}}
	synctest.Test(t, func(t *testing.T) {
		for _, tc := range []struct {
			left, lease        time.Duration
			wantLock, wantIdle time.Duration
		}{
			{0, time.Second, 5 * time.Second, DefaultIdleTimeout},
			{time.Hour, time.Minute, 5 * time.Second, time.Minute},
			{4 * time.Second, time.Second, 3500 * time.Millisecond, DefaultIdleTimeout},
			{100 * time.Millisecond, time.Second, time.Second, DefaultIdleTimeout},
		} {
			ctx := t.Context()
			if tc.left > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, tc.left)
				defer cancel()
			}
			if w := s.waits(ctx, tc.lease); w.lock != tc.wantLock || w.idle != tc.wantIdle {
				t.Errorf("with %v left and a lease of %v: lock %v, idle %v: want %v, %v", tc.left, tc.lease, w.lock, w.idle, tc.wantLock, tc.wantIdle)
			}
		}
	})
}

func claimOf(owner byte, fp string) *idempotency.Claim {
	return &idempotency.Claim{Owner: idempotency.Owner{owner}, Fingerprint: idempotency.Fingerprint(fp), Lease: time.Second, Retention: time.Hour}
}

// The table of idempotency.Store, row by row, for an atomic store.
func TestDecide(t *testing.T) {
	const (
		running, done, free      = idempotency.StateRunning, idempotency.StateDone, idempotency.StateFree
		unknown, cancelled       = idempotency.StateUnknown, idempotency.StateCancelled
		mine, theirs        byte = 1, 2
	)
	for name, tc := range map[string]struct {
		row   row
		rerun bool
		epoch uint64 // of the execution that is granted
		state idempotency.State
	}{
		"free":                      {row{state: free, epoch: 3}, false, 4, 0},
		"running, mine":             {row{state: running, owner: idempotency.Owner{mine}, epoch: 3, over: true}, false, 3, 0},
		"unknown, mine":             {row{state: unknown, owner: idempotency.Owner{mine}, epoch: 3}, false, 3, 0},
		"running, live":             {row{state: running, owner: idempotency.Owner{theirs}, epoch: 3, left: time.Second}, true, 0, running},
		"running, over":             {row{state: running, owner: idempotency.Owner{theirs}, epoch: 3, over: true}, false, 4, 0},
		"unknown":                   {row{state: unknown, owner: idempotency.Owner{theirs}, epoch: 3}, false, 0, unknown},
		"unknown, may be run again": {row{state: unknown, owner: idempotency.Owner{theirs}, epoch: 3}, true, 4, 0},
		"done":                      {row{state: done, epoch: 3, outcome: []byte("x")}, true, 0, done},
		"done, mine":                {row{state: done, owner: idempotency.Owner{mine}, epoch: 3, outcome: []byte("x")}, true, 0, done},
		"cancelled":                 {row{state: cancelled, epoch: 3}, true, 0, cancelled},
	} {
		t.Run(name, func(t *testing.T) {
			c := claimOf(mine, "fp")
			c.Rerun = tc.rerun
			tc.row.fingerprint = "fp"
			rec, epoch := decide(&tc.row, c)
			if epoch != tc.epoch || (rec == nil) != (tc.epoch > 0) || rec != nil && (rec.State != tc.state || rec.Mismatch) {
				t.Errorf("decide returned %+v, %d: want state %v, epoch %d", rec, epoch, tc.state, tc.epoch)
			}
			tc.row.fingerprint = "another"
			rec, epoch = decide(&tc.row, c)
			if rec == nil || !rec.Mismatch || epoch != 0 || rec.Outcome != nil {
				t.Errorf("for another request decide returned %+v, %d: want a mismatch and nothing more", rec, epoch)
			}
		})
	}
}

// The claims of one identity come to the front one after the other; other
// identities do not wait; and the queue is empty when all have left.
func TestQueue_OneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q queue
		var wg sync.WaitGroup
		start := time.Now()
		for i := range 5 {
			wg.Go(func() {
				leave, _, _, rec, err := q.join(t.Context(), claimOf(byte(i+1), "fp"), time.Minute)
				if rec != nil || err != nil {
					t.Errorf("join returned %+v, %v", rec, err)
					return
				}
				time.Sleep(time.Second)
				leave()
			})
			wg.Go(func() {
				c := claimOf(1, "fp")
				c.ID[0] = byte(i + 1)
				leave, waited, _, _, _ := q.join(t.Context(), c, time.Minute)
				if waited {
					t.Error("another identity waited")
				}
				leave()
			})
		}
		wg.Wait()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("five claims of a second each took %v: want 5s, one at a time", took)
		}
		if len(q.lines) != 0 {
			t.Errorf("%d lines are left", len(q.lines))
		}
	})
}

func TestQueue_HolderSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q queue
		c := claimOf(1, "fp")
		leave, _, _, _, err := q.join(t.Context(), c, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		holder := &execution{claim: *c, fingerprint: "fp", epoch: 7}
		q.hold(holder)

		if _, _, e, _, _ := q.join(t.Context(), claimOf(1, "fp"), time.Minute); e != holder {
			t.Errorf("the same owner got %v: want its own execution", e)
		}
		if _, _, _, rec, _ := q.join(t.Context(), claimOf(2, "other"), time.Minute); rec == nil || !rec.Mismatch {
			t.Errorf("another request got %+v: want a mismatch", rec)
		}
		start := time.Now()
		_, _, _, rec, err := q.join(t.Context(), claimOf(2, "fp"), time.Minute)
		if rec == nil || rec.State != idempotency.StateRunning || rec.Epoch != 7 || err != nil || time.Since(start) != time.Minute {
			t.Errorf("a duplicate got %+v, %v after %v: want RUNNING after a minute", rec, err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, _, rec, err := q.join(ctx, claimOf(2, "fp"), time.Minute); rec == nil || err != nil {
			t.Errorf("a duplicate whose time is up got %+v, %v: want RUNNING, which is known", rec, err)
		}
		leave()
		leave, waited, _, _, err := q.join(t.Context(), claimOf(2, "fp"), time.Minute)
		if waited || err != nil {
			t.Errorf("after the holder left: waited %v, %v", waited, err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, _, rec, err := q.join(ctx, claimOf(3, "fp"), time.Minute); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("waiting for nobody known returned %+v, %v: want the context's error", rec, err)
		}
		leave()
		if len(q.lines) != 0 {
			t.Errorf("%d lines are left", len(q.lines))
		}
	})
}
