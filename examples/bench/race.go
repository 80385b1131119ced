package main

import (
	"fmt"
	"slices"
	"time"
)

// race is a set of contestants that do the same thing.
type race struct {
	what, name  string
	base        string // the stack to which the ratios are
	contestants []contestant
}

// mode is how many goroutines a contestant runs in.
type mode struct {
	name       string
	goroutines int
}

var modes = []mode{{"seq", 1}, {"par64", 64}}

// again is what the A/A control's name ends in.
const again = "-again"

// result is what is known of a contestant after all rounds, in one mode.
type result struct {
	what, name, stack, mode, base string

	ns, best, cpu, allocs, bytes float64

	ratio              float64 // to the base, round by round
	control            float64 // the same of the A/A control
	overNs, overAllocs float64 // over the base, round by round
}

func (r result) String() string {
	return fmt.Sprintf("RESULT bench what=%s stack=%s ns=%.1f allocs=%.2f ratio=%.3f mode=%s case=%s base=%s control=%.3f over_ns=%.1f over_allocs=%.2f best_ns=%.1f cpu_ns=%.1f bytes=%.0f",
		r.what, r.stack, r.ns, r.allocs, r.ratio, r.mode, r.name, r.base, r.control, r.overNs, r.overAllocs, r.best, r.cpu, r.bytes)
}

// run lets the contestants take turns. Modes take turns too, so that sequential
// and parallel figures can be compared.
func (r race) run(rounds int, perRun time.Duration) ([]result, error) {
	entries, err := r.entries(perRun)
	if err != nil {
		return nil, err
	}
	for round := range rounds {
		for i := range entries {
			e := entries[(i+round)%len(entries)]
			s, _, err := measure(e.contestant, e.mode.goroutines, e.n)
			if err != nil {
				return nil, err
			}
			e.samples = append(e.samples, s)
		}
	}
	return r.results(entries), nil
}

// entry is a contestant in one mode.
type entry struct {
	contestant

	mode    mode
	n       int
	samples []sample // one for each round
}

func (r race) entries(perRun time.Duration) ([]*entry, error) {
	var all []*entry
	for _, m := range modes {
		for _, c := range r.contestants {
			n, err := calibrate(c, m.goroutines, perRun)
			if err != nil {
				return nil, err
			}
			all = append(all, &entry{contestant: c, mode: m, n: n})
			if c.stack == r.base {
				control := c
				control.stack += again
				all = append(all, &entry{contestant: control, mode: m, n: n})
			}
		}
	}
	return all, nil
}

func (r race) results(entries []*entry) []result {
	find := func(stack string, m mode) *entry {
		i := slices.IndexFunc(entries, func(e *entry) bool { return e.stack == stack && e.mode == m })
		return entries[i]
	}
	out := make([]result, 0, len(entries))
	for _, e := range entries {
		base, control := find(r.base, e.mode), find(r.base+again, e.mode)
		ns := column(e.samples, sample.time)
		out = append(out, result{
			what: r.what, name: r.name, stack: e.stack, mode: e.mode.name, base: r.base,
			ns:         median(ns),
			best:       slices.Min(ns),
			cpu:        median(column(e.samples, func(s sample) float64 { return s.cpu })),
			allocs:     median(column(e.samples, func(s sample) float64 { return s.allocs })),
			bytes:      median(column(e.samples, func(s sample) float64 { return s.bytes })),
			ratio:      median(pairs(e.samples, base.samples, func(s, b sample) float64 { return s.ns / b.ns })),
			control:    median(pairs(control.samples, base.samples, func(s, b sample) float64 { return s.ns / b.ns })),
			overNs:     median(pairs(e.samples, base.samples, func(s, b sample) float64 { return s.ns - b.ns })),
			overAllocs: median(pairs(e.samples, base.samples, func(s, b sample) float64 { return s.allocs - b.allocs })),
		})
	}
	return out
}

func (s sample) time() float64 { return s.ns }

func column(samples []sample, of func(sample) float64) []float64 {
	out := make([]float64, len(samples))
	for i, s := range samples {
		out[i] = of(s)
	}
	return out
}

// pairs compares what two contestants measured in the same round.
func pairs(a, b []sample, of func(a, b sample) float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = of(a[i], b[i])
	}
	return out
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}
