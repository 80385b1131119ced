package main

import (
	"context"
	"io"
	"strings"
	"sync"
	"time"
)

// runAll runs the cells and says on progress how it goes. The outcomes are in
// the order of the cells. The first error ends it all.
//
// Cells in real time run first, more at a time than those in fake time, which
// never wait: these would take the processors away from the others.
func runAll(ctx context.Context, cells []cell, parallel int, progress io.Writer) ([]outcome, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	var alone, waiting, busy []int
	for i, c := range cells {
		e, err := experimentNamed(c.Experiment)
		switch {
		case err != nil:
			return nil, err
		case e.alone:
			alone = append(alone, i)
		case c.fake():
			busy = append(busy, i)
		default:
			waiting = append(waiting, i)
		}
	}
	outcomes := make([]outcome, len(cells))
	p := &progressReporter{out: progress, total: len(cells), start: time.Now()}
	for _, group := range []struct {
		cells    []int
		parallel int
	}{{alone, 1}, {waiting, 3 * parallel}, {busy, parallel}} {
		turns := make(chan int, len(group.cells))
		for _, i := range group.cells {
			turns <- i
		}
		close(turns)
		var wg sync.WaitGroup
		for range min(group.parallel, len(group.cells)) {
			wg.Go(func() {
				for i := range turns {
					if ctx.Err() != nil {
						return
					}
					began := time.Now()
					o, err := runInProcess(ctx, cells[i])
					if err != nil {
						cancel(err)
						return
					}
					outcomes[i] = o
					p.finished(cells[i], o, time.Since(began))
				}
			})
		}
		wg.Wait()
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return outcomes, nil
}

// progressReporter says what has been done so far.
type progressReporter struct {
	out   io.Writer
	total int
	start time.Time

	mu   sync.Mutex // guards done and the order of lines
	done int
}

func (p *progressReporter) finished(c cell, o outcome, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done++
	var numbers strings.Builder
	for _, m := range o.Metrics {
		numbers.WriteString(" " + m.Key + "=" + number(m.Value))
	}
	sayf(p.out, "%5.0f s  %3d of %d  %v #%d, %.1f s:%s\n", time.Since(p.start).Seconds(), p.done, p.total, c, c.Repeat+1, took.Seconds(), numbers.String())
}
