package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// sweepBatch bounds one Sweep, so that a backlog is worked off in steps that
// hold no lock for long.
const sweepBatch = 1000

// RunSweeper sweeps s every so often until ctx ends, and then returns
// context.Cause(ctx). A backlog is swept batch after batch without waiting. An
// error of the store does not end it: the next tick tries again, and the last
// error is joined to the result. Run it in a goroutine of its own, once per
// store; several processes may sweep one store.
func RunSweeper(ctx context.Context, s Store, every time.Duration) error {
	if s == nil {
		return errors.New("idempotency: RunSweeper: store is nil: must be set")
	}
	if every <= 0 {
		return fmt.Errorf("idempotency: RunSweeper: every is %v: must be positive", every)
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var last error
	for {
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), last)
		case <-ticker.C:
			last = sweepAll(ctx, s)
		}
	}
}

func sweepAll(ctx context.Context, s Store) error {
	for ctx.Err() == nil {
		n, err := s.Sweep(ctx, sweepBatch)
		if err != nil {
			return err
		}
		if n < sweepBatch {
			return nil
		}
	}
	return nil
}
