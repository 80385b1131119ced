package interceptors

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

const (
	// maxConnectWaiters bounds the calls of one channel that wait for it to
	// connect. Those beyond it do not wait: their next attempt fails at once.
	maxConnectWaiters = 256

	// gRPC waits for a second before it connects again, and 1.6 times as long
	// each further time (its connection-backoff.md). A server that restarts is
	// away for a few seconds and would be missed for as long again; so for the
	// first hurryFor of an outage, and only while calls need the channel, it is
	// asked to connect again after hurryEvery at the most and half of it at
	// least, at random, or the clients of one server would come back together.
	// A longer outage is left to gRPC's own waits.
	hurryEvery = time.Second
	hurryFor   = 10 * time.Second
)

// connectGrace bounds how long a channel that lost its connection is waited
// for: counted from the first attempt that could not be sent since one could.
type connectGrace struct {
	since   atomic.Int64 // on the channel's clock; 0 while attempts are sent
	hurryAt atomic.Int64 // likewise: when to connect again, unless gRPC has
	waiters atomic.Int32
}

func (g *connectGrace) sent() {
	if g.since.Load() != 0 {
		g.since.Store(0)
	}
}

// notSent returns how much of the grace is left, starting it where it was not.
func (g *connectGrace) notSent(t int64, grace time.Duration) time.Duration {
	if g.since.CompareAndSwap(0, t) {
		g.hurryAt.Store(t + hurryAfter())
		return grace
	}
	return grace - time.Duration(t-g.since.Load())
}

func hurryAfter() int64 {
	return int64(hurryEvery/2) + rand.Int64N(int64(hurryEvery/2)) //nolint:gosec // spreads clients; nothing is secret
}

// hurry makes the channel connect again if it is time, and returns how long it
// is until the next time; 0 when there is none.
func (g *connectGrace) hurry(t int64, cc *grpc.ClientConn) time.Duration {
	since, at := g.since.Load(), g.hurryAt.Load()
	if cc == nil || since == 0 || t-since >= int64(hurryFor) {
		return 0
	}
	if t < at {
		return time.Duration(at - t)
	}
	next := hurryAfter()
	if g.hurryAt.CompareAndSwap(at, t+next) && cc.GetState() == connectivity.TransientFailure {
		cc.ResetConnectBackoff()
	}
	return time.Duration(next)
}

// wait blocks until cc is connected, limit passed or ctx is done.
func (g *connectGrace) wait(ctx context.Context, clock clock, cc *grpc.ClientConn, limit time.Duration) {
	if cc == nil || limit <= 0 {
		return
	}
	if g.waiters.Add(1) > maxConnectWaiters {
		g.waiters.Add(-1)
		return
	}
	defer g.waiters.Add(-1)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		switch state := cc.GetState(); state {
		case connectivity.Ready, connectivity.Shutdown:
			return
		case connectivity.Idle:
			cc.Connect()
			fallthrough
		default:
			g.waitForChange(ctx, clock, cc, state)
			if ctx.Err() != nil {
				return
			}
		}
	}
}

// waitForChange blocks until cc leaves the state, it is time to hurry, or ctx is
// done.
func (g *connectGrace) waitForChange(ctx context.Context, clock clock, cc *grpc.ClientConn, state connectivity.State) {
	if next := g.hurry(clock.at(time.Now()), cc); next > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, next)
		defer cancel()
	}
	cc.WaitForStateChange(ctx, state)
}
