package main

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var pushbackExperiment = experiment{
	name:  "pushback",
	title: "PUSHBACK: a server that says when, or never",
	text: `User → middle → leaf. Of ten calls the leaf fails the first attempt of one, with grpc-retry-pushback-ms.
ask=never: the value is -1. obeyed: failed calls that the middle did not send again; passed_up: of these, those that the user did not send again either, though the leaf spoke to the middle only.
ask=300ms: obeyed is the share of retries that came 300 ms later or more. success: users' calls that succeed.`,
	cells: func(p plan) []cell {
		return p.cross("pushback", slices.Concat(peers, []string{stackBelay}), "ask=never", "ask=300ms")
	},
	run: runPushback,
}

func runPushback(w *world) (outcome, error) {
	d := 60 * time.Second
	if w.cell.Quick {
		d = 10 * time.Second
	}
	never := w.cell.text("ask") == "never"
	value := "300"
	if never {
		value = "-1"
	}
	t := newTally()
	p := &pushbackCount{calls: map[int64]*pushbackCall{}}
	c, err := w.startChain(w.cell.Stack, 2, func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if req.GetNumber()%10 != 0 || !p.first(req.GetNumber()) {
			return nil
		}
		if err := grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", value)); err != nil {
			return err
		}
		return errDown
	}, func(_ context.Context, _ int, req *probev1.Request) error {
		p.passed(req.GetNumber())
		return nil
	})
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: 50, timeout: 5 * time.Second, random: w.random(2), channels: c.conns[:1]}
	u.arrive(context.Background(), t.zero, d)
	u.wait()

	again, passedUp, retries, early := p.count()
	var o outcome
	if never {
		failed := len(p.calls)
		o.add("obeyed", 1-ratio(again, failed))
		if again < failed {
			o.add("passed_up", 1-ratio(passedUp, failed-again))
		}
	} else {
		o.add("obeyed", 1-ratio(early, retries))
	}
	all := t.between(0, forever)
	o.add("success", all.success())
	o.add("load", all.load())
	return o, nil
}

// pushbackCount follows the calls that the leaf fails.
type pushbackCount struct {
	mu    sync.Mutex // guards calls and what is in them
	calls map[int64]*pushbackCall
}

type pushbackCall struct {
	failed         time.Time
	leaf, middle   int // how often each has seen it
	retries, early int // attempts after the failure, and those before they were asked for
}

func (p *pushbackCount) ofLocked(id int64) *pushbackCall {
	c := p.calls[id]
	if c == nil {
		c = &pushbackCall{}
		p.calls[id] = c
	}
	return c
}

// first notes an attempt at the leaf and reports whether it is the call's first.
func (p *pushbackCount) first(id int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.ofLocked(id)
	c.leaf++
	if c.leaf == 1 {
		c.failed = time.Now()
		return true
	}
	c.retries++
	if time.Since(c.failed) < pushbackAsked {
		c.early++
	}
	return false
}

const pushbackAsked = 300 * time.Millisecond

// passed notes that the middle has seen the call.
func (p *pushbackCount) passed(id int64) {
	if id%10 != 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ofLocked(id).middle++
}

// count returns the calls that the middle sent again, and that the user did; and
// all retries and the early ones.
func (p *pushbackCount) count() (byMiddle, byUser, retries, early int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.calls {
		if c.leaf > c.middle {
			byMiddle++
		}
		if c.middle > 1 {
			byUser++
		}
		retries += c.retries
		early += c.early
	}
	return byMiddle, byUser, retries, early
}
