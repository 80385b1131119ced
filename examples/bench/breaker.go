package main

import (
	"errors"
	"time"

	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	sony "github.com/sony/gobreaker/v2"

	"github.com/belayrpc/belay/breaker"
	adapter "github.com/belayrpc/belay/examples/gobreaker"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The breaker races: one call admitted and reported, one call refused. "belay"
// is given the time, as the interceptor has read it anyway; "belay-clock" reads
// it, as the peers do.

const (
	belayClock     = "belay-clock"
	failsafeCount  = "failsafe-count" // counts calls, not time: the fastest peer
	gobreakerFixed = "gobreaker-fixed"
)

func breakerRaces() []race {
	return []race{
		{what: "breaker", name: "success", base: failsafeCount, contestants: []contestant{
			{belay, belayBreaker(false, allowAndDoneAt)},
			{belayClock, belayBreaker(false, allowAndDone)},
			{failsafe, failsafeBreakers(failsafeTimed, false, acquireAndRecord)},
			{failsafeCount, failsafeBreakers(failsafeCountBreaker, false, acquireAndRecord)},
			{gobreaker, twoStep(gobreakerSettings(), false, stepAndReport)},
			{gobreakerFixed, twoStep(fixedWindow(), false, stepAndReport)},
			{adapted, adaptedBreaker(false, seamAndDone)},
		}},
		{what: "breaker-refusal", name: "refusal", base: failsafeCount, contestants: []contestant{
			{belay, belayBreaker(true, refuseAt)},
			{belayClock, belayBreaker(true, refuse)},
			{failsafe, failsafeBreakers(failsafeTimed, true, acquireRefused)},
			{failsafeCount, failsafeBreakers(failsafeCountBreaker, true, acquireRefused)},
			{gobreaker, twoStep(gobreakerSettings(), true, stepRefused)},
			{gobreakerFixed, twoStep(fixedWindow(), true, stepRefused)},
			{adapted, adaptedBreaker(true, seamRefused)},
		}},
	}
}

var (
	errOpen   = errors.New("a closed breaker refused")
	errClosed = errors.New("an open breaker admitted")
)

// trip fails calls until a breaker refuses.
func trip(allow func() (fail func(), err error)) {
	for {
		fail, err := allow()
		if err != nil {
			return
		}
		fail()
	}
}

// Belay.

func belayBreaker(isOpen bool, loop func(*breaker.Breaker, int) error) func() (subject, error) {
	return func() (subject, error) {
		b := breaker.New(breaker.Config{OpenFor: never, MaxOpenFor: never})
		if isOpen {
			trip(func() (func(), error) {
				permit, err := b.Allow()
				return func() { permit.Done(breaker.Failure, 0) }, err
			})
		}
		return subject{worker: func() worker { return func(n int) error { return loop(b, n) } }}, b.Err()
	}
}

func allowAndDoneAt(b *breaker.Breaker, n int) error {
	now := time.Now()
	for range n {
		permit, err := b.AllowAt(now)
		if err != nil {
			return errOpen
		}
		permit.DoneAt(breaker.Success, time.Millisecond, now)
	}
	return nil
}

func allowAndDone(b *breaker.Breaker, n int) error {
	for range n {
		permit, err := b.Allow()
		if err != nil {
			return errOpen
		}
		permit.Done(breaker.Success, time.Millisecond)
	}
	return nil
}

func refuseAt(b *breaker.Breaker, n int) error {
	now := time.Now()
	for range n {
		if _, err := b.AllowAt(now); err == nil {
			return errClosed
		}
	}
	return nil
}

func refuse(b *breaker.Breaker, n int) error {
	for range n {
		if _, err := b.Allow(); err == nil {
			return errClosed
		}
	}
	return nil
}

// failsafe-go, without its executor: the way that costs it least.

func failsafeTimed() failsafeCB { return failsafeBreaker(breakerRate, breakerCalls) }

type failsafeCB = circuitbreaker.CircuitBreaker[*probev1.Response]

func failsafeBreakers(build func() failsafeCB, isOpen bool, loop func(failsafeCB, int) error) func() (subject, error) {
	return func() (subject, error) {
		cb := build()
		if isOpen {
			cb.Open()
		}
		return subject{worker: func() worker { return func(n int) error { return loop(cb, n) } }}, nil
	}
}

func acquireAndRecord(cb failsafeCB, n int) error {
	for range n {
		if !cb.TryAcquirePermit() {
			return errOpen
		}
		cb.RecordSuccess()
	}
	return nil
}

func acquireRefused(cb failsafeCB, n int) error {
	for range n {
		if cb.TryAcquirePermit() {
			return errClosed
		}
	}
	return nil
}

// gobreaker, in its form for calls that end somewhere else.

type twoStepCB = *sony.TwoStepCircuitBreaker[struct{}]

// fixedWindow clears all counts at once every ten seconds.
func fixedWindow() sony.Settings {
	s := gobreakerSettings()
	s.BucketPeriod = 0
	return s
}

func twoStep(settings sony.Settings, isOpen bool, loop func(twoStepCB, int) error) func() (subject, error) {
	return func() (subject, error) {
		cb := sony.NewTwoStepCircuitBreaker[struct{}](settings)
		if isOpen {
			trip(func() (func(), error) {
				done, err := cb.Allow()
				return func() { done(errUnavailable) }, err
			})
		}
		return subject{worker: func() worker { return func(n int) error { return loop(cb, n) } }}, nil
	}
}

func stepAndReport(cb twoStepCB, n int) error {
	for range n {
		done, err := cb.Allow()
		if err != nil {
			return errOpen
		}
		done(nil)
	}
	return nil
}

func stepRefused(cb twoStepCB, n int) error {
	for range n {
		if _, err := cb.Allow(); err == nil {
			return errClosed
		}
	}
	return nil
}

// gobreaker through Belay's seam.

func adaptedBreaker(isOpen bool, loop func(*adapter.Breakers, int) error) func() (subject, error) {
	return func() (subject, error) {
		b, err := adapter.New(gobreakerSettings())
		if err != nil {
			return subject{}, err
		}
		if isOpen {
			trip(func() (func(), error) {
				done, err := b.Allow(service)
				return func() { done(breaker.Failure, 0) }, err
			})
		}
		return subject{worker: func() worker { return func(n int) error { return loop(b, n) } }}, nil
	}
}

func seamAndDone(b *adapter.Breakers, n int) error {
	for range n {
		done, err := b.Allow(service)
		if err != nil {
			return errOpen
		}
		done(breaker.Success, time.Millisecond)
	}
	return nil
}

func seamRefused(b *adapter.Breakers, n int) error {
	for range n {
		if _, err := b.Allow(service); err == nil {
			return errClosed
		}
	}
	return nil
}
