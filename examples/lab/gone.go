package main

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

func channels(conns ...*grpc.ClientConn) []*grpc.ClientConn { return conns }

var goneExperiment = experiment{
	name:  "gone",
	title: "GONE: a server that is no longer there",
	text: `After a healthy ten seconds every connection breaks and none can be made, for a minute; users allow 20 s, and 100 of them come each second.
Nobody should wait for a server that will not come: longest_ms is the longest call, most_in_flight how many calls there were at once.`,
	cells: func(p plan) []cell {
		return p.cross("gone", slices.Concat(peers, []string{stackBelay, stackNoBreaker}))
	},
	run: runGone,
}

func runGone(w *world) (outcome, error) {
	outage := time.Minute
	if w.cell.Quick {
		outage = 10 * time.Second
	}
	t := newTally()
	s, err := newStack(w.cell.Stack)
	if err != nil {
		return outcome{}, err
	}
	n, err := w.serve(func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		return work(ctx, chainWork)
	}, s.serve...)
	if err != nil {
		return outcome{}, err
	}
	l := n.link()
	conn, err := w.channel(l, s.dial()...)
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: chainRate, timeout: 20 * time.Second, random: w.random(2), channels: channels(conn)}
	ctx := context.Background()
	at := u.arrive(ctx, t.zero, 10*time.Second)
	u.wait()
	t.mostFly.Store(0)
	l.set(true)
	at = later(at)
	u.arrive(ctx, at, outage)
	u.wait()
	p := t.between(at.Sub(t.zero), forever)
	var o outcome
	o.add("longest_ms", quantile(p.took, 1).Seconds()*1e3)
	o.add("p50_ms", quantile(p.took, 0.5).Seconds()*1e3)
	o.add("most_in_flight", float64(t.mostFly.Load()))
	o.add("calls", float64(p.calls))
	return o, nil
}
