package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/belayrpc/belay/examples/chain/chainv1"
)

// warmUp is how long each chain runs in good health before the onset.
const warmUp = 2 * time.Second

// load is what each cell is put under.
type load struct {
	rate       float64 // users a second
	duration   time.Duration
	traceEvery int // one checkout in so many is traced
}

func (l load) users(d time.Duration) int { return int(l.rate * d.Seconds()) }

// duration is how long the users come in a scenario, from the onset on.
func (s scenario) duration(l load) time.Duration {
	if s.drill != nil {
		return drillTime
	}
	if s.stretch > 0 {
		return time.Duration(float64(l.duration) * s.stretch)
	}
	return l.duration
}

// runCell runs one scenario with one stack, on a chain of its own.
func runCell(ctx context.Context, s scenario, stackName string, l load) (_ result, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("scenario %s: %w", s.name, err)
		}
	}()
	if s.drill != nil {
		return runDrill(ctx, s, stackName)
	}
	t := newTally()
	c, err := startChain(stackName, s.leafless, t.keep)
	if err != nil {
		return result{}, err
	}
	defer c.stop()
	if s.spare {
		if err := c.keepSpare(); err != nil {
			return result{}, err
		}
	}
	conn, err := dialEdge(c.processes[roleEdge].addr)
	if err != nil {
		return result{}, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	tracer, err := newUserTracer(ctx, t)
	if err != nil {
		return result{}, err
	}
	defer tracer.close(ctx)
	u := users{load: l, edge: chainv1.NewEdgeServiceClient(conn), tally: t}

	u.arrive(ctx, l.users(warmUp), time.Time{})
	if err := c.apply(s.fault); err != nil {
		return result{}, err
	}
	scripted := make(chan error, 1)
	go func() {
		if s.script == nil {
			scripted <- nil
			return
		}
		scripted <- s.script(ctx, c)
	}()
	u.tracer = tracer
	u.arrive(ctx, l.users(s.duration(l)), time.Now())

	if err := errors.Join(<-scripted, ctx.Err()); err != nil {
		return result{}, err
	}
	if err := work(ctx, s.settle); err != nil {
		return result{}, err
	}
	// Asks for nothing but the acknowledgment, before which all facts come.
	if err := c.apply(s.fault); err != nil {
		return result{}, err
	}
	r := t.result(s.leafless)
	r.scenario, r.stack = s.name, stackName
	return r, nil
}
