package breaker_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/breaker"
)

// halfOpen returns a breaker that has just become half-open, and its first probe.
func halfOpen(t *testing.T, config breaker.Config) (*breaker.Breaker, breaker.Permit) {
	t.Helper()
	config.ConsecutiveFailures = 1
	b := breaker.New(config)
	call(t, b, breaker.Failure, 1)
	waitOpen(t, b)
	probe := admitted(t, b)
	wantState(t, b, breaker.HalfOpen)
	return b, probe
}

func TestProbesAreCappedInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, first := halfOpen(t, breaker.Config{Probes: 2})
		second := admitted(t, b)
		refused(t, b)
		first.Done(breaker.Success, 0)
		third := admitted(t, b) // a place is free again
		refused(t, b)
		wantState(t, b, breaker.HalfOpen)
		second.Done(breaker.Success, 0)
		wantState(t, b, breaker.Closed)
		third.Done(breaker.Failure, 0) // of an older state by now
		if s := b.Snapshot(); s.State != breaker.Closed || s.Counts.Calls != 0 || s.Late != 1 {
			t.Errorf("after a late probe: %+v, want closed, no calls, 1 late", s)
		}
	})
}

func TestReadyTakesNoProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Probes: 1})
		call(t, b, breaker.Failure, 1)
		waitOpen(t, b)
		for range 10 {
			if !b.Ready() {
				t.Fatal("not ready though the open time is over")
			}
		}
		wantState(t, b, breaker.Open)
		call(t, b, breaker.Success, 1)
		wantState(t, b, breaker.Closed)
	})
}

func TestOneFailedProbeReopens(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, first := halfOpen(t, breaker.Config{Probes: 3})
		second := admitted(t, b)
		first.Done(breaker.Success, 0)
		second.Done(breaker.Failure, 0)
		wantState(t, b, breaker.Open)
		refused(t, b)

		// The success of last time does not count this time.
		waitOpen(t, b)
		call(t, b, breaker.Success, 2)
		wantState(t, b, breaker.HalfOpen)
		call(t, b, breaker.Success, 1)
		wantState(t, b, breaker.Closed)
	})
}

// Calls from before the outage that succeed late must not close a half-open breaker, nor may
// their failures open it.
func TestLateResultsChangeNothing(t *testing.T) {
	t.Parallel()
	for _, outcome := range []breaker.Outcome{breaker.Success, breaker.Failure} {
		t.Run(outcome.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Probes: 2})
				old := make([]breaker.Permit, 30)
				for i := range old {
					old[i] = admitted(t, b)
				}
				call(t, b, breaker.Failure, 1)
				old[0].Done(outcome, 0)
				wantState(t, b, breaker.Open)

				waitOpen(t, b)
				probe := admitted(t, b)
				for _, permit := range old[:15] {
					permit.Done(outcome, 0)
				}
				if s := b.Snapshot(); s.State != breaker.HalfOpen || s.ProbesUnderWay != 1 || s.ProbesSucceeded != 0 || s.Late != 15 {
					t.Fatalf("half-open after late results: %+v", s)
				}

				probe.Done(breaker.Success, 0)
				call(t, b, breaker.Success, 1)
				wantState(t, b, breaker.Closed)
				for _, permit := range old[15:] {
					permit.Done(outcome, 0)
				}
				if s := b.Snapshot(); s.State != breaker.Closed || s.Counts.Calls != 0 || s.Run != 0 || s.Late != 30 {
					t.Fatalf("closed after late results: %+v", s)
				}
			})
		})
	}
}

func TestLostProbesFreeThemselves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, lost := halfOpen(t, breaker.Config{Probes: 2, ProbeLease: 3 * time.Second})
		time.Sleep(time.Second)
		late := admitted(t, b)
		time.Sleep(2*time.Second - 1)
		refused(t, b)
		time.Sleep(time.Nanosecond) // the first one's lease is over
		next := admitted(t, b)
		refused(t, b)

		// A probe that reports after its lease has a say but no place to give back.
		time.Sleep(time.Second)
		next2 := admitted(t, b)
		late.Done(breaker.Success, 4*time.Second)
		if s := b.Snapshot(); s.ProbesUnderWay != 2 || s.ProbesSucceeded != 1 {
			t.Fatalf("%d under way, %d succeeded, want 2 and 1", s.ProbesUnderWay, s.ProbesSucceeded)
		}
		refused(t, b)
		next.Done(breaker.Neutral, 0)
		next2.Done(breaker.Neutral, 0)
		lost.Done(breaker.Failure, 4*time.Second)
		wantState(t, b, breaker.Open)
	})
}

// However many probes are lost, one more is admitted every lease.
func TestNeverStuckWhileEveryProbeIsLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, _ := halfOpen(t, breaker.Config{Probes: 1, ProbeLease: time.Second})
		for range 50 {
			refused(t, b)
			time.Sleep(time.Second)
			admitted(t, b)
		}
		time.Sleep(time.Second)
		call(t, b, breaker.Success, 1)
		wantState(t, b, breaker.Closed)
	})
}

func TestOpenTimeGrowsAndIsJittered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		longest := []int{1, 2, 4, 8, 16, 30, 30, 30} // seconds
		distinct := map[time.Duration]bool{}
		for range 100 {
			b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
			call(t, b, breaker.Failure, 1)
			for n, seconds := range longest {
				limit := time.Duration(seconds) * time.Second
				left := b.TimeLeft()
				if left < limit/2 || left > limit {
					t.Fatalf("opening %d lasts %v, want %v to %v", n+1, left, limit/2, limit)
				}
				distinct[left] = true
				if got := b.Snapshot(); got.Opens != n+1 || got.Last.OpenFor != left {
					t.Fatalf("opening %d: snapshot says %d for %v, want %v", n+1, got.Opens, got.Last.OpenFor, left)
				}
				time.Sleep(left - 1)
				refused(t, b)
				time.Sleep(time.Nanosecond)
				call(t, b, breaker.Failure, 1)
			}

			// It closes, and starts from the shortest again.
			waitOpen(t, b)
			call(t, b, breaker.Success, breaker.DefaultProbes)
			wantState(t, b, breaker.Closed)
			call(t, b, breaker.Failure, 1)
			if left := b.TimeLeft(); left > time.Second {
				t.Fatalf("after closing the open time is %v, want at most 1s", left)
			}
		}
		if len(distinct) < 700 {
			t.Errorf("only %d different times in 800 openings", len(distinct))
		}
	})
}

// Doubling the longest of times must not overflow.
func TestOpenTimeSaturates(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const century = 100 * 365 * 24 * time.Hour
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Hour, MaxOpenFor: century + 1})
		call(t, b, breaker.Failure, 1)
		now := time.Now()
		for range 100 {
			// Ahead of the clock, since a bubble's clock ends before the centuries do.
			permit, err := b.AllowAt(now.Add(century + 1))
			if err != nil {
				t.Fatal(err)
			}
			permit.DoneAt(breaker.Failure, 0, now)
			if left := b.TimeLeft(); left < time.Hour/2 || left > century+1 {
				t.Fatalf("open for %v", left)
			}
		}
		if left := b.TimeLeft(); left < century/2 {
			t.Errorf("open for %v at the cap, want at least half of it", left)
		}
	})
}
