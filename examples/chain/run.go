package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// cell is one scenario with one stack.
type cell struct {
	scenario scenario
	stack    string
}

// cellsOf returns the cells in the order of the table.
func cellsOf(scenarios []scenario, stacks []string) []cell {
	cells := make([]cell, 0, len(scenarios)*len(stacks))
	for _, s := range scenarios {
		for _, name := range stacks {
			if s.drill != nil && !slices.Contains(s.drill.stacks, name) {
				continue
			}
			cells = append(cells, cell{s, name})
		}
	}
	return cells
}

// runAll runs the cells, some chains at a time, and says on progress how it
// goes. The results are in the order of the cells. The first error ends it all.
func runAll(ctx context.Context, cells []cell, l load, parallel int, progress io.Writer) ([]result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	// The longest first, so that none is left to run alone at the end.
	turn := make([]int, len(cells))
	for i := range turn {
		turn[i] = i
	}
	slices.SortStableFunc(turn, func(a, b int) int {
		return int(cells[b].scenario.duration(l) - cells[a].scenario.duration(l))
	})
	next := make(chan int, len(turn))
	for _, i := range turn {
		next <- i
	}
	close(next)

	results := make([]result, len(cells))
	p := newProgress(progress, len(cells))
	var wg sync.WaitGroup
	for range min(parallel, len(cells)) {
		wg.Go(func() {
			for i := range next {
				if ctx.Err() != nil {
					return
				}
				r, err := runCell(ctx, cells[i].scenario, cells[i].stack, l)
				if err != nil {
					cancel(err)
					return
				}
				results[i] = r
				p.finished(r)
			}
		})
	}
	done := make(chan struct{})
	var ticking sync.WaitGroup
	ticking.Go(func() { p.tickUntil(done) })
	wg.Wait()
	close(done)
	ticking.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return results, nil
}

// progressReporter says what has been done so far.
type progressReporter struct {
	out   io.Writer
	total int
	start time.Time

	mu   sync.Mutex // guards done and the order of lines
	done int
}

func newProgress(out io.Writer, total int) *progressReporter {
	return &progressReporter{out: out, total: total, start: time.Now()}
}

func (p *progressReporter) finished(r result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done++
	if r.streams != nil {
		p.sayLocked(fmt.Sprintf("%-13s · %-15s  %d of %d streams lost, %d messages repeated", r.scenario, r.stack, r.streams.lost, r.streams.count, r.streams.repeated))
		return
	}
	p.sayLocked(fmt.Sprintf("%-13s · %-15s  success %.4f, %.2f leaf calls a call", r.scenario, r.stack, r.success, r.leafPerCall))
}

// tickUntil shows that something still happens while no cell ends.
func (p *progressReporter) tickUntil(done <-chan struct{}) {
	ticker := time.NewTicker(10 * time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
			p.mu.Lock()
			p.sayLocked("…")
			p.mu.Unlock()
		}
	}
}

// sayLocked writes a line. Where progress cannot be shown, the work goes on.
func (p *progressReporter) sayLocked(what string) {
	_, _ = fmt.Fprintf(p.out, "%4.0f s  %2d of %d  %s\n", time.Since(p.start).Seconds(), p.done, p.total, what)
}
