package breaker_test

import (
	"testing"
	"time"

	"github.com/belayrpc/belay/breaker"
)

// The clock is read once and passed in, as the interceptor does.
func BenchmarkAllowDone(b *testing.B) {
	brk := breaker.New(breaker.Config{})
	now := time.Now()
	b.ReportAllocs()
	for b.Loop() {
		permit, err := brk.AllowAt(now)
		if err != nil {
			b.Fatal(err)
		}
		permit.DoneAt(breaker.Success, time.Millisecond, now)
	}
}

func BenchmarkAllowDoneParallel(b *testing.B) {
	brk := breaker.New(breaker.Config{})
	now := time.Now()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			permit, err := brk.AllowAt(now)
			if err != nil {
				b.Error(err)
				return
			}
			permit.DoneAt(breaker.Success, time.Millisecond, now)
		}
	})
}

// All that can be configured, and one failure in two.
func BenchmarkAllowDoneEverythingOn(b *testing.B) {
	brk := breaker.New(breaker.Config{ConsecutiveFailures: 5, SlowCall: time.Second})
	now := time.Now()
	outcome := breaker.Success
	b.ReportAllocs()
	for b.Loop() {
		permit, err := brk.AllowAt(now)
		if err != nil {
			b.Fatal(err)
		}
		permit.DoneAt(outcome, time.Millisecond, now)
		outcome = breaker.Success + breaker.Failure - outcome
	}
}

// What a caller pays that has no clock at hand: two readings.
func BenchmarkAllowDoneReadingTheClock(b *testing.B) {
	brk := breaker.New(breaker.Config{})
	b.ReportAllocs()
	for b.Loop() {
		permit, err := brk.Allow()
		if err != nil {
			b.Fatal(err)
		}
		permit.Done(breaker.Success, time.Millisecond)
	}
}

func BenchmarkRefusal(b *testing.B) {
	brk := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Hour})
	now := time.Now()
	permit, _ := brk.AllowAt(now)
	permit.DoneAt(breaker.Failure, 0, now)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := brk.AllowAt(now); err == nil {
			b.Fatal("admitted by an open breaker")
		}
	}
}

func BenchmarkRefusalParallel(b *testing.B) {
	brk := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Hour})
	now := time.Now()
	permit, _ := brk.AllowAt(now)
	permit.DoneAt(breaker.Failure, 0, now)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := brk.AllowAt(now); err == nil {
				b.Error("admitted by an open breaker")
				return
			}
		}
	})
}

func BenchmarkGroupGet(b *testing.B) {
	group := breaker.NewGroup(breaker.Config{}, 0)
	b.ReportAllocs()
	for b.Loop() {
		group.Get("acme.payments.v1.Payments")
	}
}

// Half-open with all probes under way takes the lock.
func BenchmarkRefusalHalfOpen(b *testing.B) {
	brk := breaker.New(breaker.Config{ConsecutiveFailures: 1, Probes: 1, ProbeLease: time.Hour})
	now := time.Now()
	permit, _ := brk.AllowAt(now)
	permit.DoneAt(breaker.Failure, 0, now)
	now = now.Add(time.Second)
	if _, err := brk.AllowAt(now); err != nil { // the probe
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := brk.AllowAt(now); err == nil {
			b.Fatal("admitted though all probes are under way")
		}
	}
}

func BenchmarkGroupGetParallel(b *testing.B) {
	group := breaker.NewGroup(breaker.Config{}, 0)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			group.Get("acme.payments.v1.Payments")
		}
	})
}
