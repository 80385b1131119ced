package main

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var tailExperiment = experiment{
	name:  "tail",
	title: "TAIL: one call in a hundred takes 200 ms more",
	text: `One hop; work takes 5 ms on average, exponentially distributed, and 200 ms more for 1 % of the attempts. Stacks that hedge send a second attempt beside those slower than the 98th percentile.
extra: attempts beyond one a call, as a share. shed=1: the server takes five sixths of the load and answers the rest with RESOURCE_EXHAUSTED and pushback -1: nobody should send it second copies then; hedges is their share of the calls.`,
	cells: func(p plan) []cell {
		return p.cross("tail", []string{stackNone, stackFailsafeHedge, stackBelay, stackHedge}, "shed=0", "shed=1")
	},
	run: runTail,
	plots: []plotSpec{
		{title: "Share of calls that take longer", curve: "tail", variant: "shed=0", x: "milliseconds", y: "share of calls", logY: true},
	},
}

const tailRate = 200.0

func runTail(w *world) (outcome, error) {
	warm, measured := 30*time.Second, 500*time.Second
	if w.cell.Quick {
		measured = 60 * time.Second
	}
	shed := w.cell.param("shed") == 1
	s, err := newStack(w.cell.Stack)
	if err != nil {
		return outcome{}, err
	}
	t := newTally()
	b := &tailWork{random: w.random(1)}
	n, err := w.serve(func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if b.full() {
			if err := grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "-1")); err != nil {
				return err
			}
			return status.Error(codes.ResourceExhausted, "more than I can do")
		}
		return work(ctx, b.next())
	}, s.serve...)
	if err != nil {
		return outcome{}, err
	}
	conn, err := w.channel(n.link(), s.dial()...)
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: tailRate, timeout: 5 * time.Second, random: w.random(2), channels: channels(conn)}
	ctx := context.Background()
	at := u.arrive(ctx, t.zero, warm)
	u.wait()
	if shed {
		b.limit(tailRate / 1.2)
	}
	at = later(at)
	u.arrive(ctx, at, measured)
	u.wait()
	p := t.between(at.Sub(t.zero), forever)
	var o outcome
	o.add("p50_ms", quantile(p.took, 0.5).Seconds()*1e3)
	o.add("p99_ms", quantile(p.took, 0.99).Seconds()*1e3)
	o.add("p999_ms", quantile(p.took, 0.999).Seconds()*1e3)
	if shed {
		o.add("hedges", ratio(p.extra, p.calls))
	} else {
		o.add("extra", ratio(p.extra, p.calls))
	}
	o.add("success", p.success())
	o.add("calls", float64(p.calls))
	o.Curves = []curve{exceedance(p.took)}
	return o, nil
}

// exceedance is the share of calls that take longer, over how long.
func exceedance(took []time.Duration) curve {
	c := curve{Plot: "tail"}
	step := max(len(took)/400, 1)
	for i := 0; i < len(took); i += step {
		if i > len(took)*99/100 {
			step = max(len(took)/20_000, 1)
		}
		c.X = append(c.X, took[i].Seconds()*1e3)
		c.Y = append(c.Y, float64(len(took)-i)/float64(len(took)))
	}
	return c
}

// tailWork draws work times and, when it has a limit, sheds what is above.
type tailWork struct {
	mu     sync.Mutex // guards all below
	random *rand.Rand
	rate   float64 // attempts a second that are taken; 0: all
	tokens float64
	last   time.Time
}

func (b *tailWork) next() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := time.Duration(b.random.ExpFloat64() * float64(5*time.Millisecond))
	if b.random.Float64() < 0.01 {
		d += 200 * time.Millisecond
	}
	return d
}

func (b *tailWork) limit(rate float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rate, b.last = rate, time.Now()
}

// full reports whether an attempt is too many: a bucket of a tenth of a second.
func (b *tailWork) full() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rate == 0 {
		return false
	}
	now := time.Now()
	b.tokens = min(b.tokens+now.Sub(b.last).Seconds()*b.rate, b.rate/10)
	b.last = now
	if b.tokens < 1 {
		return true
	}
	b.tokens--
	return false
}
