package breaker_test

import (
	"math"
	"testing"
	"time"

	"github.com/belayrpc/belay/breaker"
)

// The bars of the package: no call allocates, admitted or refused.
//
//nolint:paralleltest // AllocsPerRun counts the whole process
func TestNothingAllocates(t *testing.T) {
	closed := breaker.New(breaker.Config{ConsecutiveFailures: math.MaxInt, SlowCall: time.Second, MinCalls: math.MaxInt})
	open := breaker.New(breaker.Config{OpenFor: time.Hour, ConsecutiveFailures: 1})
	call(t, open, breaker.Failure, 1)
	forced := breaker.New(breaker.Config{})
	forced.ForceOpen()
	group := breaker.NewGroup(breaker.Config{}, 0)
	key := string([]byte("acme.payments.v1.Payments")) // not a constant
	group.Get(key)

	// Its probes are neutral, so that it stays half-open.
	half := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Nanosecond})
	call(t, half, breaker.Failure, 1)
	admitted(t, half).Done(breaker.Neutral, 0)
	wantState(t, half, breaker.HalfOpen)

	outcome := func(b *breaker.Breaker, o breaker.Outcome) func() {
		return func() {
			permit, err := b.Allow()
			if err != nil {
				t.Error(err)
			}
			permit.Done(o, time.Minute)
		}
	}
	refuse := func(b *breaker.Breaker) func() {
		return func() {
			if _, err := b.Allow(); err == nil {
				t.Error("admitted")
			}
		}
	}
	rows := []struct {
		name string
		run  func()
	}{
		{"success", outcome(closed, breaker.Success)},
		{"failure", outcome(closed, breaker.Failure)},
		{"neutral", outcome(closed, breaker.Neutral)},
		{"probe", outcome(half, breaker.Neutral)},
		{"refusal_open", refuse(open)},
		{"refusal_forced_open", refuse(forced)},
		{"ready", func() { open.Ready() }},
		{"state", func() { open.State() }},
		{"time_left", func() { open.TimeLeft() }},
		{"snapshot", func() { closed.Snapshot() }},
		{"group_get", func() { group.Get(key) }},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			allocs := testing.AllocsPerRun(1000, row.run)
			if !raceEnabled && allocs != 0 {
				t.Errorf("%v allocations, want 0", allocs)
			}
		})
	}
}
