package breaker_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/belayrpc/belay/breaker"
)

func TestTransitionsTellTheStory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var got []breaker.Transition
		b := breaker.New(breaker.Config{
			Name:         "ledger",
			MinCalls:     4,
			Probes:       1,
			OnTransition: func(tr breaker.Transition) { got = append(got, tr) },
		})
		if s := b.Snapshot(); s.Last != (breaker.Transition{}) || !s.Since.Equal(start) {
			t.Errorf("a new breaker is closed since %v by %+v", s.Since, s.Last)
		}
		call(t, b, breaker.Success, 1)
		call(t, b, breaker.Failure, 4)
		open1 := b.TimeLeft()
		waitOpen(t, b)
		call(t, b, breaker.Failure, 1)
		open2 := b.TimeLeft()
		waitOpen(t, b)
		call(t, b, breaker.Success, 1)
		call(t, b, breaker.Failure, 2)
		b.ForceOpen()
		b.ForceOpen() // no change, no transition
		b.ForceClose()
		call(t, b, breaker.Failure, 9)
		b.Resume()
		b.Resume()

		t1, t2 := start.Add(open1), start.Add(open1+open2)
		want := []breaker.Transition{
			{Name: "ledger", Seq: 1, From: breaker.Closed, To: breaker.Open, Cause: breaker.CauseFailureRate, At: start, OpenFor: open1, Counts: breaker.Counts{Calls: 5, Failures: 4}},
			{Name: "ledger", Seq: 2, From: breaker.Open, To: breaker.HalfOpen, Cause: breaker.CauseOpenTimeOver, At: t1},
			{Name: "ledger", Seq: 3, From: breaker.HalfOpen, To: breaker.Open, Cause: breaker.CauseProbeFailed, At: t1, OpenFor: open2},
			{Name: "ledger", Seq: 4, From: breaker.Open, To: breaker.HalfOpen, Cause: breaker.CauseOpenTimeOver, At: t2},
			{Name: "ledger", Seq: 5, From: breaker.HalfOpen, To: breaker.Closed, Cause: breaker.CauseProbesSucceeded, At: t2},
			{Name: "ledger", Seq: 6, From: breaker.Closed, To: breaker.ForcedOpen, Cause: breaker.CauseForced, At: t2, Counts: breaker.Counts{Calls: 2, Failures: 2}},
			{Name: "ledger", Seq: 7, From: breaker.ForcedOpen, To: breaker.ForcedClosed, Cause: breaker.CauseForced, At: t2},
			{Name: "ledger", Seq: 8, From: breaker.ForcedClosed, To: breaker.Closed, Cause: breaker.CauseResumed, At: t2, Counts: breaker.Counts{Calls: 9, Failures: 9}},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("transitions (-want +got):\n%s", diff)
		}
		if last := b.Snapshot().Last; last != want[len(want)-1] {
			t.Errorf("the snapshot's last transition is %+v", last)
		}
	})
}

// A listener may use the breaker. What it causes is told after it returns, in order.
func TestListenerMayUseTheBreaker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var b *breaker.Breaker
		var got []breaker.State
		running := false
		b = breaker.New(breaker.Config{ConsecutiveFailures: 1, OnTransition: func(tr breaker.Transition) {
			if running {
				t.Error("a listener runs inside another")
			}
			running = true
			defer func() { running = false }()
			got = append(got, tr.To)
			if tr.To == breaker.Open {
				wantState(t, b, breaker.Open)
				if s := b.Snapshot(); s.Last != tr {
					t.Errorf("inside the listener the last transition is %+v, want %+v", s.Last, tr)
				}
				refused(t, b)
				b.ForceOpen()
				b.ForceClose()
				b.Resume()
			}
		}})
		call(t, b, breaker.Failure, 1)
		want := []breaker.State{breaker.Open, breaker.ForcedOpen, breaker.ForcedClosed, breaker.Closed}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("transitions (-want +got):\n%s", diff)
		}
	})
}

// A listener's panic reaches the call that ran it. Nothing is lost by it: not the state, not the
// transitions behind it, not later ones.
func TestListenerPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var b *breaker.Breaker
		var got []uint64
		b = breaker.New(breaker.Config{ConsecutiveFailures: 1, OnTransition: func(tr breaker.Transition) {
			got = append(got, tr.Seq)
			if tr.Seq == 1 {
				b.ForceClose()
				panic("listener")
			}
		}})
		func() {
			defer func() {
				if r := recover(); r != "listener" {
					t.Errorf("recovered %v, want the listener's panic", r)
				}
			}()
			call(t, b, breaker.Failure, 1)
		}()
		if diff := cmp.Diff([]uint64{1, 2}, got); diff != "" {
			t.Errorf("transitions told by the time of the panic (-want +got):\n%s", diff)
		}
		wantState(t, b, breaker.ForcedClosed)
		b.Resume()
		call(t, b, breaker.Success, 1)
		if diff := cmp.Diff([]uint64{1, 2, 3}, got); diff != "" {
			t.Errorf("transitions (-want +got):\n%s", diff)
		}
	})
}

// While a listener hangs, transitions wait, but not without bound: the oldest are left out, the
// newest never.
func TestTransitionsThatWaitAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var got []uint64
		b := breaker.New(breaker.Config{OnTransition: func(tr breaker.Transition) {
			if tr.Seq == 1 {
				<-release
			}
			got = append(got, tr.Seq)
		}})
		delivered := make(chan struct{})
		go func() { b.ForceOpen(); close(delivered) }()
		synctest.Wait()

		const more = 1000
		for range more / 2 {
			b.ForceClose() // does not hang, though the listener does
			b.ForceOpen()
		}
		close(release)
		<-delivered

		if len(got) < 2 || len(got) > 100 {
			t.Fatalf("%d transitions were told, want the first and a bounded rest", len(got))
		}
		if got[len(got)-1] != more+1 {
			t.Errorf("the last transition told is number %d, want %d", got[len(got)-1], more+1)
		}
		for i := 2; i < len(got); i++ {
			if got[i] != got[i-1]+1 {
				t.Fatalf("transition %d was told after %d: %v", got[i], got[i-1], got)
			}
		}
	})
}

// Whoever causes them, transitions are told one at a time and in order.
func TestTransitionsAreOrderedAcrossGoroutines(t *testing.T) {
	t.Parallel()
	var (
		last breaker.Transition // not guarded: the race detector checks "one at a time"
		told int
	)
	b := breaker.New(breaker.Config{OnTransition: func(tr breaker.Transition) {
		if tr.Seq <= last.Seq || tr.Seq == last.Seq+1 && tr.From != last.To {
			t.Errorf("%d %v→%v was told after %d %v→%v", tr.Seq, tr.From, tr.To, last.Seq, last.From, last.To)
		}
		last = tr
		told++
	}})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				b.ForceOpen()
				b.ForceClose()
				b.Resume()
			}
		})
	}
	wg.Wait()
	if s := b.Snapshot(); last != s.Last {
		t.Errorf("last told is %+v, the breaker's last is %+v", last, s.Last)
	}
	if told == 0 {
		t.Error("nothing was told")
	}
}

func TestForce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		before := admitted(t, b)
		b.ForceOpen()
		before.Done(breaker.Success, 0)
		time.Sleep(time.Hour) // no time ends it
		refused(t, b)
		wantState(t, b, breaker.ForcedOpen)

		b.Resume()
		wantState(t, b, breaker.Closed)
		b.ForceClose()
		call(t, b, breaker.Failure, 100)
		wantState(t, b, breaker.ForcedClosed)
		if got, want := b.Snapshot().Counts, (breaker.Counts{Calls: 100, Failures: 100}); got != want {
			t.Errorf("forced closed, the window holds %+v, want %+v", got, want)
		}

		b.Resume() // what happened while it was forced is not held against the server
		call(t, b, breaker.Success, 1)
		wantState(t, b, breaker.Closed)
		call(t, b, breaker.Failure, 1)
		wantState(t, b, breaker.Open)

		b.Resume() // nothing to resume
		wantState(t, b, breaker.Open)
		b.ForceClose() // an open breaker can be forced too
		call(t, b, breaker.Success, 1)
		b.Resume()
		call(t, b, breaker.Failure, 1)
		if left := b.TimeLeft(); left > time.Second {
			t.Errorf("the first opening after Resume lasts %v, want at most 1s", left)
		}
	})
}
