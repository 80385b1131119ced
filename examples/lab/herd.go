package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var herdExperiment = experiment{
	name:  "herd",
	title: "HERD: a thousand clients fail in the same millisecond",
	text: `1000 clients have a call in flight when the server fails all of them at once; whatever comes later succeeds. How do they come back?
peak_over_mean: the fullest 10 ms of the retries over their mean, from the failure to the last retry; peak: how many come in the fullest 10 ms. All back off from 50 ms; how they spread it is their own.`,
	cells: func(p plan) []cell {
		return p.cross("herd", slices.Concat(peers[1:], []string{stackBelay}))
	},
	run: runHerd,
	plots: []plotSpec{
		{title: "Retries in each 10 ms after the failure", curve: "retries", x: "milliseconds after the failure", y: "retries in 10 ms"},
	},
}

func runHerd(w *world) (outcome, error) {
	clients := 1000
	if w.cell.Quick {
		clients = 300
	}
	t := newTally()
	blip := make(chan struct{}) // closed when all fail
	var mu sync.Mutex
	waiting := false // guarded by mu: calls that arrive wait for the blip
	conns, _, err := w.swarm(w.cell.Stack, clients, func(_ context.Context, req *probev1.Request, _ bool) error {
		mu.Lock()
		doomed := waiting
		mu.Unlock()
		if doomed {
			<-blip
			return errDown
		}
		t.arrived(req.GetNumber())
		return nil
	})
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: 100, timeout: 5 * time.Second, random: w.random(2), channels: conns}
	ctx := context.Background()
	u.arrive(ctx, t.zero, time.Minute)
	u.wait()

	mu.Lock()
	waiting = true
	mu.Unlock()
	calls := startAll(ctx, conns)
	time.Sleep(time.Second) // all have arrived
	mu.Lock()
	waiting = false
	mu.Unlock()
	failed := time.Since(t.zero)
	before := t.leafCount()
	close(blip)
	calls.Wait()

	const bin = 10 * time.Millisecond
	var bins []float64
	t.mu.Lock()
	defer t.mu.Unlock()
	retries := t.leaves[before:]
	for _, l := range retries {
		i := int((l.at - failed) / bin)
		for len(bins) <= i {
			bins = append(bins, 0)
		}
		bins[i]++
	}
	if len(bins) == 0 {
		return outcome{}, fmt.Errorf("%v: nobody retried", w.cell)
	}
	peak := slices.Max(bins)
	var o outcome
	o.add("peak_over_mean", peak*float64(len(bins))/float64(len(retries)))
	o.add("peak", peak)
	o.add("retries", float64(len(retries)))
	x := make([]float64, len(bins))
	for i := range x {
		x[i] = float64(i) * 10
	}
	o.Curves = []curve{{Plot: "retries", X: x, Y: bins}}
	return o, nil
}

// startAll makes one call on each channel, all at once.
func startAll(ctx context.Context, conns []*grpc.ClientConn) *sync.WaitGroup {
	var calls sync.WaitGroup
	for i, conn := range conns {
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			// How it ends is counted at the server.
			_, _ = probev1.NewProbeServiceClient(conn).Read(ctx, &probev1.Request{Number: int64(-i)})
		})
	}
	return &calls
}
