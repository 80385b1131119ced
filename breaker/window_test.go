package breaker_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/breaker"
)

func TestWindowSlides(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Window: 10 * time.Second})
		wantCalls := func(want uint64) {
			t.Helper()
			if got := b.Snapshot().Counts.Calls; got != want {
				t.Errorf("the window holds %d calls, want %d", got, want)
			}
		}
		call(t, b, breaker.Failure, 3)
		time.Sleep(4500 * time.Millisecond)
		call(t, b, breaker.Failure, 4)
		wantCalls(7)
		time.Sleep(5500*time.Millisecond - 1)
		wantCalls(7)
		time.Sleep(time.Nanosecond) // 10 s after the first three
		wantCalls(4)
		time.Sleep(4 * time.Second)
		wantCalls(0)
		time.Sleep(1000 * time.Hour) // idle for long: nothing stale, and it still works
		wantCalls(0)
		call(t, b, breaker.Failure, 20)
		wantState(t, b, breaker.Open)
	})
}

// Old successes that slide out leave the failures alone; they open the breaker at the next one.
func TestWindowForgetsSuccesses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Window: 10 * time.Second})
		call(t, b, breaker.Success, 1000)
		time.Sleep(5 * time.Second)
		call(t, b, breaker.Failure, 30)
		time.Sleep(5 * time.Second)
		call(t, b, breaker.Success, 1) // a call that worked never opens it
		wantState(t, b, breaker.Closed)
		call(t, b, breaker.Failure, 1)
		wantState(t, b, breaker.Open)
	})
}

// A result belongs to the moment when the call ended. Filed under its start, calls that time out
// after longer than the window would never count.
func TestCallsLongerThanTheWindowCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Window: 50 * time.Millisecond, MinCalls: 10})
		permits := make([]breaker.Permit, 10)
		for i := range permits {
			permits[i] = admitted(t, b)
		}
		time.Sleep(70 * time.Millisecond)
		for _, permit := range permits {
			permit.Done(breaker.Failure, 70*time.Millisecond)
		}
		wantState(t, b, breaker.Open)
	})
}

// Goroutines read the clock in one order and report in another; and a caller may pass nonsense.
func TestTimesOutOfOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Window: time.Second, MinCalls: 5})
		now := time.Now()
		for _, at := range []time.Time{now.Add(300 * time.Millisecond), now, now.Add(-time.Hour), {}} {
			permit, err := b.AllowAt(at)
			if err != nil {
				t.Fatal(err)
			}
			permit.DoneAt(breaker.Failure, -time.Second, at)
		}
		wantState(t, b, breaker.Closed)
		call(t, b, breaker.Failure, 1)
		wantState(t, b, breaker.Open)
	})
}

func TestSlowCalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{SlowCall: time.Second, SlowRate: 0.5, MinCalls: 10, Probes: 1})
		finish := func(outcome breaker.Outcome, latency time.Duration, n int) {
			t.Helper()
			for range n {
				admitted(t, b).Done(outcome, latency)
			}
		}
		finish(breaker.Success, time.Second-1, 6)
		finish(breaker.Neutral, time.Hour, 10) // says nothing, slow or not
		finish(breaker.Success, time.Second, 5)
		wantState(t, b, breaker.Closed) // 5 of 11
		finish(breaker.Failure, time.Second, 1)
		wantState(t, b, breaker.Open) // 6 of 12
		last := b.Snapshot().Last
		if want := (breaker.Counts{Calls: 12, Failures: 1, Slow: 6}); last.Cause != breaker.CauseSlowRate || last.Counts != want {
			t.Errorf("opened by %v at %+v, want the slow-call rate at %+v", last.Cause, last.Counts, want)
		}

		waitOpen(t, b)
		finish(breaker.Success, time.Second, 1) // still slow
		wantState(t, b, breaker.Open)
		if got := b.Snapshot().Last.Cause; got != breaker.CauseProbeSlow {
			t.Errorf("opened again by %v, want a slow probe", got)
		}
		waitOpen(t, b)
		finish(breaker.Success, time.Second-1, 1)
		wantState(t, b, breaker.Closed)
	})
}
