package breaker_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/breaker"
)

func TestZeroPermit(t *testing.T) {
	t.Parallel()
	var permit breaker.Permit
	permit.Done(breaker.Failure, time.Hour)
	permit.DoneAt(breaker.Failure, time.Hour, time.Now())
}

func TestPermitCountsOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{})
		permit := admitted(t, b)
		copied := permit
		permit.Done(breaker.Success, 0)
		// By now the permit's parts are in use by other calls, which must not be ended by it.
		others := []breaker.Permit{admitted(t, b), admitted(t, b)}
		for range 50 {
			permit.Done(breaker.Failure, 0)
			copied.Done(breaker.Failure, 0)
		}
		for _, other := range others {
			other.Done(breaker.Success, 0)
		}
		if got, want := b.Snapshot().Counts, (breaker.Counts{Calls: 3}); got != want {
			t.Errorf("the window holds %+v, want %+v", got, want)
		}
	})
}

func TestProbeCountsOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, probe := halfOpen(t, breaker.Config{Probes: 3})
		for range 5 {
			probe.Done(breaker.Success, 0)
		}
		wantState(t, b, breaker.HalfOpen)
		if got := b.Snapshot().ProbesSucceeded; got != 1 {
			t.Errorf("%d probes succeeded, want 1", got)
		}
	})
}

// The first verdict stands, also when it was Neutral: a deferred Neutral is a safe last resort.
func TestNeutralSpendsThePermit(t *testing.T) {
	t.Parallel()
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	permit := admitted(t, b)
	permit.Done(breaker.Neutral, 0)
	permit.Done(breaker.Failure, 0)
	wantState(t, b, breaker.Closed)
}

func TestCopiesReportedAtOnceCountOnce(t *testing.T) {
	t.Parallel()
	const calls, copies = 500, 8
	b := breaker.New(breaker.Config{Window: time.Hour})
	for range calls {
		permit := admitted(t, b)
		var wg sync.WaitGroup
		for range copies {
			wg.Go(func() { permit.Done(breaker.Success, 0) })
		}
		wg.Wait()
	}
	if got, want := b.Snapshot().Counts, (breaker.Counts{Calls: calls}); got != want {
		t.Errorf("the window holds %+v, want %+v", got, want)
	}
}
