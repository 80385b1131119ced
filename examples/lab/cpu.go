package main

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var cpuExperiment = experiment{
	name:  "cpu",
	title: "CPU: refusing costs something too",
	text: `Over loopback, in real time, with work that burns the processor: the server has one core, a call takes 2 ms of it, and a refusal 50 µs. over=2: twice as many calls come as it can do; what finds eight waiting is refused with UNAVAILABLE.
Where work is a sleep, refusing is free and every stack looks better than it is. share: calls that succeed a second, as a share of what the core could do; load: attempts at the server for each call; refused: refusals a second.`,
	cells: func(p plan) []cell {
		return p.cross("cpu", slices.Concat(peers, []string{stackBelay, stackNoBreaker}), "clock=real over=2", "clock=real over=4")
	},
	run:   runCPU,
	alone: true,
	plots: []plotSpec{
		{title: "Attempts at the server per second", curve: "load", variant: "clock=real over=2", x: "seconds", y: "attempts/s"},
		{title: "Calls that succeed per second", curve: "goodput", variant: "clock=real over=2", x: "seconds", y: "calls/s"},
	},
}

const (
	cpuWork    = 2 * time.Millisecond
	cpuRefusal = 50 * time.Microsecond
	cpuQueue   = 8
)

func runCPU(w *world) (outcome, error) {
	d := 4 * time.Second
	if w.cell.Quick {
		d = 2 * time.Second
	}
	s, err := newStack(w.cell.Stack)
	if err != nil {
		return outcome{}, err
	}
	t := newTally()
	var core sync.Mutex // one thing at a time
	var waiting, refused atomic.Int64
	n, err := w.serve(func(_ context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if waiting.Add(1) > cpuQueue {
			waiting.Add(-1)
			refused.Add(1)
			core.Lock()
			defer core.Unlock()
			burn(cpuRefusal)
			return errDown
		}
		core.Lock()
		defer core.Unlock()
		burn(cpuWork)
		waiting.Add(-1)
		return nil
	}, s.serve...)
	if err != nil {
		return outcome{}, err
	}
	conn, err := w.channel(n.link(), s.dial()...)
	if err != nil {
		return outcome{}, err
	}
	const capacity = float64(time.Second / cpuWork)
	u := &users{tally: t, rate: capacity / 2, timeout: time.Second, random: w.random(2), channels: channels(conn)}
	ctx := context.Background()
	at := u.arrive(ctx, t.zero, d/4)
	u.wait()
	at = later(at)
	u.rate = float64(w.cell.param("over")) * capacity
	refused.Store(0)
	u.arrive(ctx, at, d)
	u.wait()
	p := t.between(at.Sub(t.zero), forever)
	var o outcome
	o.add("share", float64(p.ok)/d.Seconds()/capacity)
	o.add("load", p.load())
	o.add("refused", float64(refused.Load())/d.Seconds())
	o.add("p99_ms", quantile(p.took, 0.99).Seconds()*1e3)
	o.Curves = t.curves(500 * time.Millisecond)
	return o, nil
}

// burn keeps a processor busy.
func burn(d time.Duration) {
	until := time.Now().Add(d)
	for time.Now().Before(until) {
		continue // nothing else is the point
	}
}
