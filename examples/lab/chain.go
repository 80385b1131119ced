package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

const (
	chainRate = 100.0
	chainWork = 2 * time.Millisecond
)

// chain is hops services in a row. Every hop's caller is of the stack, the user
// at the first hop included; the leaf is the last.
type chain struct {
	stacks []*stack // by the caller's place: stacks[0] is the user's
	conns  []*grpc.ClientConn
}

// startChain starts the services from the leaf up. Those above the leaf first do
// what middle says, if it is not nil; the user is hop 0, the first service hop 1.
// The hop w.detached calls the next without the context that it was called with.
func (w *world) startChain(name string, hops int, leaf handler, middle func(ctx context.Context, hop int, req *probev1.Request) error) (*chain, error) {
	c := &chain{stacks: make([]*stack, hops+1), conns: make([]*grpc.ClientConn, hops)}
	for i := range c.stacks {
		var err error
		if c.stacks[i], err = newStack(name); err != nil {
			return nil, err
		}
	}
	handle := leaf
	for i := hops - 1; i >= 0; i-- {
		n, err := w.serve(handle, c.stacks[i+1].serve...)
		if err != nil {
			return nil, err
		}
		if c.conns[i], err = w.channel(n.link(), w.watched(i, c.stacks[i].dial())...); err != nil {
			return nil, err
		}
		below := probev1.NewProbeServiceClient(c.conns[i])
		handle = func(ctx context.Context, req *probev1.Request, _ bool) error { //nolint:contextcheck // what a detached hop forgets
			if middle != nil {
				if err := middle(ctx, i, req); err != nil {
					return err
				}
			}
			if i == w.detached {
				ctx = context.Background()
			}
			_, err := below.Read(ctx, req)
			return err // as most handlers do
		}
	}
	return c, nil
}

// watched puts the cell's own interceptors around those of a stack.
func (w *world) watched(hop int, opts []grpc.DialOption) []grpc.DialOption {
	if w.watch == nil {
		return opts
	}
	outer, inner := w.watch(hop)
	return slices.Concat([]grpc.DialOption{grpc.WithChainUnaryInterceptor(outer)}, opts, []grpc.DialOption{grpc.WithChainUnaryInterceptor(inner)})
}

// bank is the most retries that any one layer of Belay could make now.
func (c *chain) bank() float64 {
	most := 0.0
	for i, conn := range c.conns {
		if client := c.stacks[i].client; client != nil {
			most = max(most, client.Budget(conn).Snapshot().Balance)
		}
	}
	return most
}

var chainExperiment = experiment{
	name:  "chain",
	title: "CHAIN: a leaf that is down under 1 to 8 retrying hops",
	text: `All hops are healthy for a minute, then the leaf answers UNAVAILABLE to everything. A stack that retries at every hop multiplies.
leaf_per_root: attempts at the leaf for each user's call since the onset; steady: the same a second later; extra_total: the attempts beyond one a call, in all;
bank: what one layer of Belay could spend at the onset. The middleware stack gets fewer calls on long chains, as each costs thousands; only its users' deadline of 10 s ends them there.
With its breakers on, Belay stops sending first attempts too; belay-nobreaker shows that the bound does not need them.`,
	cells: func(p plan) []cell {
		all := slices.Concat(peers, []string{stackBelay, stackNoBreaker})
		if p.quick {
			return p.cross("chain", all, variants("hops=%d", []int{1, 3, 8})...)
		}
		var cells []cell
		for hops := 1; hops <= 8; hops++ {
			stacks := all
			if hops == 2 || hops == 4 || hops >= 6 && hops <= 7 {
				stacks = []string{stackBelay, stackNoBreaker} // the peers' lines are clear without these
			}
			cells = append(cells, p.cross("chain", stacks, fmt.Sprintf("hops=%d", hops))...)
		}
		return append(cells, p.cross("chain", all, "clock=real hops=3")...)
	},
	run: runChain,
	plots: []plotSpec{
		{title: "Attempts at the leaf per second, 3 hops, the leaf down from second 60", curve: "load", variant: "hops=3", x: "seconds", y: "attempts/s", logY: true},
		{title: "Attempts at the leaf for each user's call", metric: "leaf_per_root", over: "hops", x: "retrying hops", y: "attempts per call", logY: true},
	},
}

func runChain(w *world) (outcome, error) {
	healthy, sick := 60*time.Second, 50*time.Second+time.Second
	if w.cell.Quick {
		healthy, sick = 12*time.Second, 8*time.Second
	} else if !w.fake {
		healthy, sick = 8*time.Second, 12*time.Second
	}
	hops := w.cell.param("hops")
	t, f := newTally(), newFault(w.random(1))
	c, err := w.startChain(w.cell.Stack, hops, func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if err := work(ctx, chainWork); err != nil {
			return err
		}
		return f.err()
	}, nil)
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: chainRate, timeout: 10 * time.Second, random: w.random(2), channels: c.conns[:1]}
	ctx := context.Background()
	onset := u.arrive(ctx, t.zero, healthy)
	u.wait() // so that no healthy call's retry counts as the outage's
	f.set(1)
	bank := c.bank()
	u.rate, u.enough = gently(w.cell, t, sick)
	onset = u.arrive(ctx, later(onset), sick)
	u.wait()

	start := onset.Add(-sick).Sub(t.zero)
	all, steady := t.between(start, forever), t.between(start+time.Second, forever)
	if all.calls == 0 {
		return outcome{}, fmt.Errorf("%v: no calls after the onset", w.cell)
	}
	var o outcome
	o.add("leaf_per_root", all.load())
	if steady.calls > 0 {
		o.add("steady", steady.load())
	}
	o.add("extra_total", float64(all.extra))
	if isBelay(w.cell.Stack) {
		o.add("bank", bank)
	}
	o.add("calls", float64(all.calls))
	o.Curves = t.curves(time.Second)
	return o, nil
}

// later is t, or now where that has passed.
func later(t time.Time) time.Time {
	if now := time.Now(); now.After(t) {
		return now
	}
	return t
}

// gently returns the rate during the outage and when to end it early: a stack
// that multiplies without bound would take all day.
func gently(c cell, t *tally, d time.Duration) (rate float64, enough func() bool) {
	limit := 30_000
	if c.Quick {
		limit = 4_000
	}
	rate = chainRate
	if c.Stack == stackMiddleware {
		most := 700 // what the users' deadline leaves of 3^hops
		attempts := 1
		for range c.param("hops") {
			attempts = min(attempts*3, most)
		}
		rate = min(rate, float64(limit/attempts)/d.Seconds())
	}
	before := t.leafCount()
	return rate, func() bool { return t.leafCount()-before > 2*limit }
}
