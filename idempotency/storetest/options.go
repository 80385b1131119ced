package storetest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// Option tells the suite what the store is. A store without options is leased,
// not atomic, and tested in real time.
type Option func(*suite)

// Atomic says that the store's executions are atomic.
func Atomic() Option { return func(s *suite) { s.atomic = true } }

// NoLease says that the store has no leases: an execution holds its record by
// its connection. A claim that meets another execution may then block for a
// while and be told RUNNING, and a release may leave no record.
func NoLease() Option { return func(s *suite) { s.noLease = true } }

// FakeTime runs every test in a testing/synctest bubble. It needs a store that
// lives in the process and reads time.Now.
func FakeTime() Option { return func(s *suite) { s.fake = true } }

// Lease sets the lease that tests let run out, of which every other duration of
// Run is a multiple. Default 300 ms; a slow store in real time may need more.
func Lease(d time.Duration) Option { return func(s *suite) { s.lease = d } }

// Effect is called by every handler of Cases with the context that it got: a
// transactional store's test writes a row through it.
func Effect(f func(ctx context.Context) error) Option { return func(s *suite) { s.effect = f } }

// suite is one call of Run or Cases.
type suite struct {
	newStore func(t *testing.T) idempotency.Store
	atomic   bool
	noLease  bool
	fake     bool
	lease    time.Duration
	effect   func(ctx context.Context) error
}

func newSuite(newStore func(t *testing.T) idempotency.Store, opts []Option) *suite {
	s := &suite{
		newStore: newStore,
		lease:    300 * time.Millisecond,
		effect:   func(context.Context) error { return nil },
	}
	for _, o := range opts {
		o(s)
	}
	return s
}

// test runs one test with a store of its own.
func (s *suite) test(t *testing.T, name string, f func(t *testing.T, store idempotency.Store)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		if !s.fake {
			f(t, s.newStore(t))
			return
		}
		synctest.Test(t, func(t *testing.T) { f(t, s.newStore(t)) })
	})
}

// wait lets the store's clock run on: a database in real time leaves no choice.
func (s *suite) wait(d time.Duration) { time.Sleep(d) }
