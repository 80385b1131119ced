package breaker_test

import (
	"errors"
	"testing"
	"time"

	"github.com/belayrpc/belay/breaker"
)

// call makes n calls one after the other, each admitted and each with the same outcome.
func call(tb testing.TB, b *breaker.Breaker, outcome breaker.Outcome, n int) {
	tb.Helper()
	for range n {
		admitted(tb, b).Done(outcome, 0)
	}
}

// admitted asks for a permit and must get one. The caller reports its end.
func admitted(tb testing.TB, b *breaker.Breaker) breaker.Permit {
	tb.Helper()
	if !b.Ready() {
		tb.Fatalf("%v: not ready, want ready", b.State())
	}
	permit, err := b.Allow()
	if err != nil {
		tb.Fatalf("%v: refused (%v), want admitted", b.State(), err)
	}
	return permit
}

// refused asks for a permit and must not get one.
func refused(tb testing.TB, b *breaker.Breaker) {
	tb.Helper()
	_ = refusal(tb, b)
}

// refusal is refused, and returns the error.
func refusal(tb testing.TB, b *breaker.Breaker) *breaker.OpenError {
	tb.Helper()
	if b.Ready() {
		tb.Fatalf("%v: ready, want not", b.State())
	}
	permit, err := b.Allow()
	if !errors.Is(err, breaker.ErrOpen) {
		tb.Fatalf("%v: Allow() error = %v, want ErrOpen", b.State(), err)
	}
	if permit != (breaker.Permit{}) {
		tb.Fatalf("refused with the permit %+v, want the zero one", permit)
	}
	open, ok := errors.AsType[*breaker.OpenError](err)
	if !ok {
		tb.Fatalf("Allow() error is a %T, want *OpenError", err)
	}
	return open
}

func wantState(tb testing.TB, b *breaker.Breaker, want breaker.State) {
	tb.Helper()
	if got := b.State(); got != want {
		tb.Fatalf("State() = %v, want %v", got, want)
	}
}

// waitOpen sleeps until an open breaker lets probes through.
func waitOpen(tb testing.TB, b *breaker.Breaker) {
	tb.Helper()
	wantState(tb, b, breaker.Open)
	time.Sleep(b.TimeLeft())
}
