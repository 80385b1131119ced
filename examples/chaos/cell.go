package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

const (
	cellLimit  = 6 * time.Minute  // a cell that has not reached its goals by then has missed them
	drainLimit = 20 * time.Second // for the calls under way when the goals are reached
	restTime   = 2 * staleTime    // until nothing is held up any more
	replays    = 200

	progressEvery = 3 * time.Second
)

// run is one cell from an empty database to its audit.
func (c cell) run(ctx context.Context, h *harness) (result, error) {
	start := time.Now()
	program, err := h.binaries.of(ctx, c.mutant)
	if err != nil {
		return result{}, err
	}
	base, err := h.databases.open(ctx, c)
	if err != nil {
		return result{}, fmt.Errorf("make a database: %w", err)
	}
	defer base.close()

	o := newOrders(c, c.goals(h.quick))
	servers, err := startFleet(program, c.server(base.dsn), o)
	if err != nil {
		return result{}, err
	}
	defer servers.close()
	l, err := newLoad(servers.addrs, o)
	if err != nil {
		return result{}, err
	}
	defer l.close()

	c.wreck(ctx, h.progress, base, o, l)
	l.replay(ctx, replays)
	l.close()
	if err := servers.failure(); err != nil {
		return result{}, err
	}
	servers.close()
	if err := base.settle(ctx); err != nil {
		return result{}, err
	}
	r := result{cell: c, takeovers: servers.repeats(), took: time.Since(start)}
	r.kills, r.byPoint, r.stales = o.counts()
	if base.proxy != nil {
		r.drops = int(base.proxy.drops.Load())
	}
	return r, errors.Join(ctx.Err(), r.audit(ctx, base, l.intents))
}

// wreck lets the clients call until the goals are reached, and returns when every
// call is answered and nothing is held up.
func (c cell) wreck(ctx context.Context, progress io.Writer, base *database, o *orders, l *load) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	limit := time.AfterFunc(cellLimit, o.end)
	defer limit.Stop()
	if base.proxy != nil {
		base.proxy.on.Store(true)
		defer base.proxy.on.Store(false)
	}
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		l.run(ctx, o.enough)
	}()
	start, enough := time.Now(), o.enough
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			o.print(progress, c, time.Since(start))
		case <-enough:
			enough = nil
			drained := time.AfterFunc(drainLimit, cancel)
			defer drained.Stop()
		case <-finished:
			rest := time.NewTimer(restTime)
			defer rest.Stop()
			select {
			case <-rest.C:
			case <-ctx.Done():
			}
			return
		}
	}
}

// print says how far a cell is.
func (o *orders) print(to io.Writer, c cell, after time.Duration) {
	kills, _, stales := o.counts()
	_, _ = fmt.Fprintf(to, "%3.0f s  %s: %d/%d kills, %d/%d stale\n", after.Seconds(), c, kills, o.goals.kills, stales, o.goals.stales)
}
