package breaker_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/breaker"
)

// B05: a probe that ends without a verdict must give its place back. Each row is a way to end.
func TestB05ProbeWithoutVerdict(t *testing.T) {
	t.Parallel()
	config := breaker.Config{
		ConsecutiveFailures: 2,
		OpenFor:             100 * time.Millisecond,
		Probes:              1,
		ProbeLease:          time.Second,
	}
	rows := []struct {
		name string
		end  func(breaker.Permit)
	}{
		{"a_caller_cancels", func(p breaker.Permit) { p.Done(breaker.Neutral, time.Millisecond) }},
		{"a_zero_outcome", func(p breaker.Permit) { p.Done(0, time.Millisecond) }},
		{"a_undeclared_outcome", func(p breaker.Permit) { p.Done(breaker.Outcome(99), time.Millisecond) }},
		// An answer that refuses the request is the server at work.
		{"b_invalid_argument", func(p breaker.Permit) { p.Done(breaker.Success, time.Millisecond) }},
		{"c_panic_with_deferred_done", func(p breaker.Permit) {
			defer func() { _ = recover() }()
			defer p.Done(breaker.Neutral, 0)
			panic("inner interceptor")
		}},
		{"c_lost", func(breaker.Permit) { time.Sleep(config.ProbeLease) }},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(config)
				call(t, b, breaker.Failure, 2)
				refused(t, b)

				time.Sleep(120 * time.Millisecond)
				row.end(admitted(t, b))

				call(t, b, breaker.Success, 1)
				wantState(t, b, breaker.Closed)
			})
		})
	}
}

// B27: outcomes that say nothing about the server do not open the breaker, nor do they end a run
// of failures.
func TestB27NeutralOutcomes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		newBreaker := func() *breaker.Breaker { return breaker.New(breaker.Config{ConsecutiveFailures: 5}) }

		cancelled := newBreaker()
		call(t, cancelled, breaker.Neutral, 70)
		wantState(t, cancelled, breaker.Closed)
		if got := cancelled.Snapshot().Counts; got != (breaker.Counts{}) {
			t.Errorf("after neutral calls alone the window holds %+v, want nothing", got)
		}

		rejected := newBreaker()
		call(t, rejected, breaker.Success, 150)
		wantState(t, rejected, breaker.Closed)

		failing := newBreaker()
		call(t, failing, breaker.Failure, 5)
		wantState(t, failing, breaker.Open)

		mixed := newBreaker()
		call(t, mixed, breaker.Failure, 4)
		call(t, mixed, breaker.Neutral, 1)
		wantState(t, mixed, breaker.Closed)
		call(t, mixed, breaker.Failure, 1)
		wantState(t, mixed, breaker.Open)

		broken := newBreaker()
		call(t, broken, breaker.Failure, 4)
		call(t, broken, breaker.Success, 1)
		call(t, broken, breaker.Failure, 4)
		wantState(t, broken, breaker.Closed)
	})
}

// B43: a refusal is an error that can be told from the server's, says how long it lasts, and
// changes nothing, however often it is asked for.
func TestB43RefusalCostsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Name: "ledger", ConsecutiveFailures: 1, OpenFor: 10 * time.Second})
		call(t, b, breaker.Failure, 1)
		before := b.Snapshot()

		first := refusal(t, b)
		for range 100 {
			if again := refusal(t, b); again != first {
				t.Fatal("a second error was made for the same stay in Open")
			}
		}
		if after := b.Snapshot(); after != before {
			t.Errorf("refusals changed the breaker\nfrom %+v\nto   %+v", before, after)
		}
		if first.Name() != "ledger" || first.State() != breaker.Open || first.Cause() != breaker.CauseConsecutiveFailures {
			t.Errorf("refused by %q in %v (%v), want ledger, open, consecutive failures", first.Name(), first.State(), first.Cause())
		}
		if left := first.TimeLeft(); left != b.TimeLeft() || left < 5*time.Second || left > 10*time.Second {
			t.Errorf("TimeLeft() = %v, the breaker's %v; want the same, 5s to 10s", left, b.TimeLeft())
		}

		time.Sleep(11 * time.Second)
		if left := first.TimeLeft(); left != 0 {
			t.Errorf("TimeLeft() = %v after the open time, want 0", left)
		}
	})
}
