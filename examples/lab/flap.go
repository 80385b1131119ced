package main

import (
	"context"
	"slices"
	"time"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var flapExperiment = experiment{
	name:  "flap",
	title: "FLAP: five seconds down, five seconds up, for five minutes",
	text: `One client, 100 calls a second. Whoever learns too well from the outage misses the recovery.
how=answers: while down the server answers UNAVAILABLE; how=gone: its connections break and none can be made; the wait before a channel connects again is then the least that a stack misses: gRPC's default is a second and then 1.6 times as long each time, Belay's DialOptions end at two.
retries_per_up: attempts at the server for each call of the up-phases; lost_up: up-phases of which less than half of the calls succeed; lowest_up: the least success of any up-phase; success_up: of all of them together.`,
	cells: func(p plan) []cell {
		return p.cross("flap", slices.Concat(peers, []string{stackBelay, stackNoBreaker}), "how=answers", "how=gone")
	},
	run: runFlap,
	plots: []plotSpec{
		{title: "Calls that succeed per second while the server answers UNAVAILABLE for 5 of 10 seconds", curve: "goodput", variant: "how=answers", x: "seconds", y: "calls/s", until: 60},
		{title: "Attempts at the server per second", curve: "load", variant: "how=answers", x: "seconds", y: "attempts/s", until: 60},
	},
}

func runFlap(w *world) (outcome, error) {
	const phase = 5 * time.Second
	rounds := 30
	if w.cell.Quick {
		rounds = 3
	}
	gone := w.cell.text("how") == "gone"
	t, f := newTally(), newFault(w.random(1))
	s, err := newStack(w.cell.Stack)
	if err != nil {
		return outcome{}, err
	}
	n, err := w.serve(func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if err := work(ctx, chainWork); err != nil {
			return err
		}
		return f.err()
	}, s.serve...)
	if err != nil {
		return outcome{}, err
	}
	l := n.link()
	conn, err := w.channel(l, s.dial()...)
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: chainRate, timeout: 5 * time.Second, random: w.random(2), channels: channels(conn)}
	ctx := context.Background()
	at := u.arrive(ctx, t.zero, 20*time.Second)
	var ups []time.Duration
	for range rounds {
		if gone {
			l.set(true)
		} else {
			f.set(1)
		}
		at = u.arrive(ctx, at, phase)
		l.set(false)
		f.set(0)
		ups = append(ups, at.Sub(t.zero))
		at = u.arrive(ctx, at, phase)
	}
	u.wait()

	var calls, ok, leaves, lost int
	lowest := 1.0
	for _, up := range ups {
		p := t.between(up, up+phase)
		calls, ok, leaves = calls+p.calls, ok+p.ok, leaves+p.leaves
		lowest = min(lowest, p.success())
		if p.success() < 0.5 {
			lost++
		}
	}
	var o outcome
	o.add("retries_per_up", ratio(leaves, calls))
	o.add("lost_up", float64(lost))
	o.add("lowest_up", lowest)
	o.add("success_up", ratio(ok, calls))
	o.Curves = t.curves(time.Second)
	return o, nil
}
