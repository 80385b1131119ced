package breaker_test

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/breaker"
)

// Nothing that ends is missed, whichever processors it ends on: all shards add up.
func TestNoResultIsLost(t *testing.T) {
	t.Parallel()
	const goroutines, calls = 1000, 50
	b := breaker.New(breaker.Config{Window: time.Hour, FailureRate: 1})
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := range calls {
				permit, err := b.Allow()
				if err != nil {
					t.Error(err)
					return
				}
				switch {
				case i%5 == 4:
					permit.Done(breaker.Neutral, 0)
				case i%2 == 1:
					permit.Done(breaker.Failure, 0)
				default:
					permit.Done(breaker.Success, 0)
				}
			}
		})
	}
	wg.Wait()
	want := breaker.Counts{Calls: goroutines * calls * 4 / 5, Failures: goroutines * calls * 2 / 5}
	if got := b.Snapshot().Counts; got != want {
		t.Errorf("the window holds %+v, want %+v", got, want)
	}
}

// Failures that end at the same moment on several processors are each one too many; the breaker
// opens once.
func TestOpensOnce(t *testing.T) {
	t.Parallel()
	for range 2000 {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		var wg sync.WaitGroup
		var ready atomic.Int32
		for range 2 {
			permit := admitted(t, b)
			wg.Go(func() {
				// Spin, so that both are running and not just woken when they report.
				for ready.Add(1); ready.Load() < 2; {
					runtime.Gosched()
				}
				permit.Done(breaker.Failure, 0)
			})
		}
		wg.Wait()
		if s := b.Snapshot(); s.Opens != 1 || s.Last.Seq != 1 {
			t.Fatalf("opened %d times in %d transitions, want once", s.Opens, s.Last.Seq)
		}
	}
}

// 1000 goroutines, random outcomes, panics, lost and doubled reports, and somebody forcing. At no
// moment are there more probes than allowed, and afterwards the breaker closes again.
func TestStress(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const probes = 3
		config := breaker.Config{
			FailureRate: 0.5, MinCalls: 10, Window: time.Second, ConsecutiveFailures: 20, SlowCall: 90 * time.Millisecond,
			OpenFor: 20 * time.Millisecond, MaxOpenFor: 100 * time.Millisecond, Probes: probes, ProbeLease: 50 * time.Millisecond,
		}
		var entered [5]int
		config.OnTransition = func(tr breaker.Transition) { entered[tr.To]++ }
		b := breaker.New(config)

		var refusals atomic.Int64
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(uint64(i), 1))
				for range 40 {
					time.Sleep(time.Duration(random.IntN(40)) * time.Millisecond)
					if s := b.Snapshot(); s.ProbesUnderWay < 0 || s.ProbesUnderWay > probes || s.ProbesSucceeded >= probes {
						t.Errorf("%d probes under way, %d succeeded, at most %d allowed", s.ProbesUnderWay, s.ProbesSucceeded, probes)
					}
					oneCall(b, random, &refusals)
				}
			})
		}
		wg.Go(func() {
			for range 5 {
				time.Sleep(150 * time.Millisecond)
				b.ForceOpen()
				time.Sleep(10 * time.Millisecond)
				b.ForceClose()
				time.Sleep(10 * time.Millisecond)
				b.Resume()
			}
		})
		wg.Wait()

		for state, n := range entered {
			if n == 0 {
				t.Errorf("never entered %v: the run shows less than it should", breaker.State(state))
			}
		}
		if refusals.Load() == 0 {
			t.Error("nothing was refused")
		}

		// Whatever was lost has run out; a working server closes the breaker.
		time.Sleep(config.MaxOpenFor + config.ProbeLease)
		call(t, b, breaker.Success, probes)
		wantState(t, b, breaker.Closed)
		if s := b.Snapshot(); s.ProbesUnderWay != 0 {
			t.Errorf("%d probes under way after the end", s.ProbesUnderWay)
		}
	})
}

func oneCall(b *breaker.Breaker, random *rand.Rand, refusals *atomic.Int64) {
	permit, err := b.Allow()
	if err != nil {
		refusals.Add(1)
		return
	}
	latency := time.Duration(random.IntN(100)) * time.Millisecond
	time.Sleep(latency)
	switch random.IntN(10) {
	case 0: // lost
	case 1:
		defer func() { _ = recover() }()
		defer permit.Done(breaker.Neutral, 0)
		panic("handler")
	case 2:
		permit.Done(breaker.Neutral, latency)
	case 3, 4:
		permit.Done(breaker.Success, latency)
		permit.Done(breaker.Failure, latency)
	case 5:
		permit.Done(breaker.Success, latency)
	default:
		permit.Done(breaker.Failure, latency)
	}
}
