package main

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"
)

// worker does n operations in a row, in one goroutine. The loop is the worker's
// own: a call through a function value would be a tenth of what some of them
// take.
type worker func(n int) error

// subject is what a contestant brings to one run.
type subject struct {
	worker func() worker // for each goroutine its own
	close  func() error  // nil where there is nothing to close
}

// contestant is one stack in a race. Each run opens it anew: what a run uses up
// is there again, and no run inherits a lucky place in memory.
type contestant struct {
	stack string
	open  func() (subject, error)
}

// sample is what one run of a contestant measured, for one operation.
type sample struct {
	ns     float64 // by the clock on the wall
	cpu    float64 // nanoseconds of processor time, the collector's included
	allocs float64
	bytes  float64
}

// measure runs a contestant once, n operations shared between the goroutines.
func measure(c contestant, goroutines, n int) (s sample, elapsed time.Duration, err error) {
	sub, err := c.open()
	if err != nil {
		return s, 0, fmt.Errorf("%s: %w", c.stack, err)
	}
	if sub.close != nil {
		defer func() { err = errors.Join(err, sub.close()) }()
	}
	workers := make([]worker, goroutines)
	for i := range workers {
		workers[i] = sub.worker()
	}
	share := max(1, n/goroutines)
	// Connections are made, pools filled, branches learnt and the heap's pages
	// fetched from the system before the clock runs: what another contestant has
	// left is collected, and this one's first operations are its own to collect.
	runtime.GC()
	warmUp := newTeam(workers, share)
	warmUp.race()
	if err := warmUp.wait(); err != nil {
		return s, 0, fmt.Errorf("%s: %w", c.stack, err)
	}

	team := newTeam(workers, share)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, start := processorTime(), time.Now()
	team.race()
	err = team.wait()
	elapsed = time.Since(start)
	cpu = processorTime() - cpu
	runtime.ReadMemStats(&after)
	if err != nil {
		return s, elapsed, fmt.Errorf("%s: %w", c.stack, err)
	}
	total := float64(share * goroutines)
	return sample{
		ns:     float64(elapsed.Nanoseconds()) / total,
		cpu:    float64(cpu.Nanoseconds()) / total,
		allocs: float64(after.Mallocs-before.Mallocs) / total,
		bytes:  float64(after.TotalAlloc-before.TotalAlloc) / total,
	}, elapsed, nil
}

// leastOfThree is how long n operations take when nothing gets in their way. One
// measurement will not do: a single operation that waits for a processor as long
// as a whole run should take would pass for a slow one.
func leastOfThree(c contestant, goroutines, n int) (time.Duration, error) {
	least := time.Duration(math.MaxInt64)
	for range 3 {
		_, elapsed, err := measure(c, goroutines, n)
		if err != nil {
			return 0, err
		}
		least = min(least, elapsed)
	}
	return least, nil
}

// team is a set of goroutines that are there before the clock starts.
type team struct {
	start chan struct{}
	done  sync.WaitGroup
	errs  []error
}

func newTeam(workers []worker, n int) *team {
	t := &team{start: make(chan struct{}), errs: make([]error, len(workers))}
	var ready sync.WaitGroup
	ready.Add(len(workers))
	for i, w := range workers {
		t.done.Go(func() {
			ready.Done()
			<-t.start
			t.errs[i] = w(n)
		})
	}
	ready.Wait()
	return t
}

func (t *team) race() { close(t.start) }

func (t *team) wait() error {
	t.done.Wait()
	return errors.Join(t.errs...)
}

// calibrate finds how many operations take about as long as a run should.
func calibrate(c contestant, goroutines int, perRun time.Duration) (int, error) {
	const most = 1 << 30
	n := goroutines
	for {
		elapsed, err := leastOfThree(c, goroutines, n)
		if err != nil {
			return 0, err
		}
		factor := float64(perRun) / float64(max(elapsed, 1))
		if factor < 2 || n >= most {
			return max(goroutines, int(float64(n)*factor)), nil
		}
		// A short run foretells little: take small steps first.
		n = int(float64(n) * min(factor, 20))
	}
}
