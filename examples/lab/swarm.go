package main

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var swarmExperiment = experiment{
	name:  "swarm",
	title: "SWARM: a thousand small clients",
	text: `1000 clients, each a process with a channel of its own, call once in ten seconds: 100 calls a second for the server, too few for any one client to learn from.
After a healthy minute the server fails each attempt with probability p, for ten minutes. A bank in each client cannot see the others; a server that speaks can.
replies=1: the failure arrives as a reply. replies=0: the connection breaks instead, so the server cannot say a thing and each client's own bank is all there is.
native-to-belay: plain grpc-go clients with their own retries, to a server with Belay. load: attempts at the server for each call, from the onset on; load_2s: from two seconds after it on; load_60s: in the first minute.`,
	cells: func(p plan) []cell {
		stacks := slices.Concat(peers, []string{stackBelay, stackNoBreaker, stackNativeOnBelay})
		all := p.cross("swarm", stacks, "p=50 replies=1", "p=100 replies=1")
		return append(all, p.cross("swarm", slices.Concat(peers, []string{stackBelay}), "p=100 replies=0")...)
	},
	run: runSwarm,
	plots: []plotSpec{
		{title: "Attempts at the server per second, p = 50 % from second 60", curve: "load", variant: "p=50 replies=1", x: "seconds", y: "attempts/s"},
		{title: "Attempts at the server per second, p = 100 % from second 60", curve: "load", variant: "p=100 replies=1", x: "seconds", y: "attempts/s"},
	},
}

// swarm is many clients of one server, each a process of its own.
func (w *world) swarm(name string, clients int, handle handler) ([]*grpc.ClientConn, []*link, error) {
	s, err := newStack(name)
	if err != nil {
		return nil, nil, err
	}
	n, err := w.serve(handle, s.serve...)
	if err != nil {
		return nil, nil, err
	}
	conns, links := make([]*grpc.ClientConn, clients), make([]*link, clients)
	for i := range conns {
		if s, err = newStack(name); err != nil {
			return nil, nil, err
		}
		links[i] = n.link()
		if conns[i], err = w.channel(links[i], s.dial()...); err != nil {
			return nil, nil, err
		}
	}
	return conns, links, nil
}

func runSwarm(w *world) (outcome, error) {
	clients, sick := 1000, 10*time.Minute
	if w.cell.Quick {
		clients, sick = 100, 30*time.Second
	}
	replies := w.cell.param("replies") == 1
	t, f := newTally(), newFault(w.random(1))
	var links []*link
	conns, links, err := w.swarm(w.cell.Stack, clients, func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if err := work(ctx, time.Millisecond); err != nil {
			return err
		}
		if !f.strikes() {
			return nil
		}
		if !replies {
			links[clientOf(req)].cut()
		}
		return errDown
	})
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: float64(clients) / 10, timeout: 5 * time.Second, random: w.random(2), channels: conns}
	ctx := context.Background()
	onset := u.arrive(ctx, t.zero, time.Minute)
	u.wait()
	f.set(float64(w.cell.param("p")) / 100)
	onset = later(onset)
	u.arrive(ctx, onset, sick)
	u.wait()
	start := onset.Sub(t.zero)
	all := t.between(start, forever)
	var o outcome
	o.add("load", all.load())
	o.add("load_2s", t.between(start+2*time.Second, forever).load())
	o.add("load_60s", t.between(start, start+time.Minute).load())
	o.add("success", all.success())
	o.add("calls", float64(all.calls))
	o.Curves = t.curves(5 * time.Second)
	return o, nil
}
