package sqlstore

import (
	"context"
	"fmt"
)

// sweepBatch bounds one DELETE, so that it holds its locks for a moment only.
const sweepBatch = 500

// Sweep deletes at most limit records whose retention is over; see
// idempotency.Store. On PostgreSQL several processes may sweep at once and share
// the work.
func (s *Store) Sweep(ctx context.Context, limit int) (int, error) {
	if limit < 1 {
		return 0, fmt.Errorf("sqlstore: Sweep: limit is %d: must be at least 1", limit)
	}
	swept := 0
	for swept < limit {
		batch := min(limit-swept, sweepBatch)
		n, err := s.write(ctx, s.dialect.sweep(batch))
		if err != nil {
			return swept, fmt.Errorf("sqlstore: sweep: %w", err)
		}
		swept += int(n)
		if int(n) < batch {
			break
		}
	}
	return swept, nil
}
