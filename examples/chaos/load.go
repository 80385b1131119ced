package main

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/belayrpc/belay/examples/chaos/chaosv1"
	"github.com/belayrpc/belay/examples/chaos/order"
	"github.com/belayrpc/belay/idempotency"
)

const (
	clientCount      = 4
	workersPerClient = 5
	pauseMax         = 20 * time.Millisecond // between two intents of a worker
)

// load is the clients of a cell and what they were told.
type load struct {
	orders  *orders
	clients []*client

	mu      sync.Mutex // guards intents
	intents []*intent
}

func newLoad(addrs []string, o *orders) (*load, error) {
	l := &load{orders: o}
	for range clientCount {
		c, err := newClient(addrs)
		if err != nil {
			l.close()
			return nil, err
		}
		l.clients = append(l.clients, c)
	}
	return l, nil
}

func (l *load) close() {
	for _, c := range l.clients {
		c.close()
	}
}

// run makes calls until enough is closed, and then ends those under way, for as
// long as ctx lasts.
func (l *load) run(ctx context.Context, enough <-chan struct{}) {
	var workers sync.WaitGroup
	for n := range clientCount * workersPerClient {
		workers.Go(func() {
			for ctx.Err() == nil {
				select {
				case <-enough:
					return
				case <-ctx.Done():
					return
				case <-time.After(rand.N(pauseMax)): //nolint:forbidigo,gosec // short, and nothing depends on it
				}
				l.pursue(ctx, n)
			}
		})
	}
	workers.Wait()
}

// pursue has one thing done, with what is to go wrong on the way.
func (l *load) pursue(ctx context.Context, worker int) {
	i := &intent{key: idempotency.NewKey(), ending: endingFor(rand.IntN(100))} //nolint:gosec // a choice, not a secret
	l.mu.Lock()
	l.intents = append(l.intents, i)
	l.mu.Unlock()

	o := l.orders.take()
	defer l.orders.over(o)
	if o != nil {
		i.ending = chaosv1.Ending_ENDING_OK // so that the call passes every point
	}
	var rivals sync.WaitGroup
	defer rivals.Wait()
	for n, delay := range rivalsFor(o) {
		rivals.Go(func() {
			time.Sleep(delay)
			l.clients[(worker+n+1)%clientCount].insist(ctx, i)
		})
	}
	l.clients[worker%clientCount].insist(withOrder(ctx, o), i)
}

// endingFor spreads the endings over a die with a hundred sides.
func endingFor(die int) chaosv1.Ending {
	switch {
	case die < 8:
		return chaosv1.Ending_ENDING_DECLINED
	case die < 14:
		return chaosv1.Ending_ENDING_FLAKY
	default:
		return chaosv1.Ending_ENDING_OK
	}
}

// rivalsFor is when others call with the same key: sometimes at once, and while
// the first is held up, when its lease has just begun and when it has just ended.
func rivalsFor(o *order.Order) []time.Duration {
	switch {
	case o == nil && rand.IntN(10) == 0: //nolint:gosec // a choice, not a secret
		return []time.Duration{rand.N(5 * time.Millisecond)} //nolint:gosec // see above
	case o == nil || o.Deed == order.Kill:
		return nil
	default:
		return []time.Duration{20 * time.Millisecond, leaseTime + 15*time.Millisecond, leaseTime + 60*time.Millisecond}
	}
}

// replay calls once more for at most n intents that were settled, spread over
// all: what is on record must be what was said.
func (l *load) replay(ctx context.Context, n int) {
	var callers sync.WaitGroup
	step := max(1, len(l.intents)/n)
	next := make(chan *intent)
	for w := range clientCount {
		callers.Go(func() {
			for i := range next {
				l.clients[w].insist(ctx, i)
			}
		})
	}
	for k := 0; k < len(l.intents); k += step {
		if l.intents[k].settled() {
			next <- l.intents[k]
		}
	}
	close(next)
	callers.Wait()
}
