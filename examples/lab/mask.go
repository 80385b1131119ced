package main

import (
	"context"
	"slices"
	"time"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var maskExperiment = experiment{
	name:  "mask",
	title: "MASK: one call in ten fails at random",
	text: `Three hops; the leaf fails each attempt with a probability of 10 %, as when one replica of ten is bad. This is where retries earn their keep, with the very settings that CHAIN ran with.
success: the users' calls that succeed; load: attempts at the leaf for each of them.`,
	cells: func(p plan) []cell {
		stacks := slices.Concat(peers, []string{stackBelay, stackNoBreaker})
		if p.quick {
			return p.cross("mask", stacks, "hops=3 p=10")
		}
		return p.cross("mask", stacks, "hops=3 p=10", "hops=1 p=10", "hops=1 p=20", "clock=real hops=3 p=10")
	},
	run: runMask,
	plots: []plotSpec{
		{title: "Calls that succeed per second, of 100, three hops", curve: "goodput", variant: "hops=3 p=10", x: "seconds", y: "calls/s"},
	},
}

func runMask(w *world) (outcome, error) {
	d := 150 * time.Second
	switch {
	case w.cell.Quick:
		d = 20 * time.Second
	case !w.fake:
		d = 12 * time.Second
	}
	t, f := newTally(), newFault(w.random(1))
	c, err := w.startChain(w.cell.Stack, w.cell.param("hops"), func(ctx context.Context, req *probev1.Request, _ bool) error {
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
	onset := u.arrive(ctx, t.zero, 10*time.Second)
	u.wait()
	f.set(float64(w.cell.param("p")) / 100)
	onset = later(onset)
	u.arrive(ctx, onset, d)
	u.wait()
	all := t.between(onset.Sub(t.zero), forever)
	var o outcome
	o.add("success", all.success())
	o.add("load", all.load())
	o.add("p99_ms", quantile(all.took, 0.99).Seconds()*1e3)
	o.add("calls", float64(all.calls))
	o.Curves = t.curves(5 * time.Second)
	return o, nil
}
