package sqlstore

import (
	"context"
	"fmt"

	"github.com/belayrpc/belay/idempotency"
)

// Resolve ends a record that nobody else will; see idempotency.Store. In
// SameTransaction mode a running execution's record is not visible, and a
// resolution waits for it, for Config.LockTimeout.
func (s *Store) Resolve(ctx context.Context, id idempotency.ID, r idempotency.Resolution) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if r.Retention == 0 {
		r.Retention = idempotency.DefaultRetention
	}
	for range maxClaimTries {
		done, err := s.resolve(ctx, id, &r)
		if err != nil {
			return fmt.Errorf("sqlstore: resolve: %w", err)
		}
		if done {
			return nil
		}
		seen, err := s.lookUp(ctx, id)
		switch {
		case err != nil:
			return err
		case seen == nil && r.State == idempotency.StateCancelled:
			continue // it conflicted and is gone
		case seen == nil:
			return fmt.Errorf("sqlstore: resolve: %w: there is no record", idempotency.ErrNotResolvable)
		case seen.state == idempotency.StateCancelled && r.State == idempotency.StateCancelled:
			return nil
		default:
			return fmt.Errorf("sqlstore: resolve: %w: state is %v", idempotency.ErrNotResolvable, seen.state)
		}
	}
	return s.busy("the record changed %d times while it was resolved", maxClaimTries)
}

// resolve is one guarded step on the record, and one where there is none.
func (s *Store) resolve(ctx context.Context, id idempotency.ID, r *idempotency.Resolution) (bool, error) {
	n, err := s.write(ctx, s.dialect.resolve(id, r))
	if n > 0 || err != nil || r.State != idempotency.StateCancelled {
		return n > 0, err
	}
	n, err = s.write(ctx, s.dialect.cancelAbsent(id, r, s.waits(ctx, 0)))
	if err != nil && s.dialect.fault(err) == faultLocked && !s.dialect.oneWriter() {
		return false, fmt.Errorf("%w: it is running", idempotency.ErrNotResolvable)
	}
	return n > 0, err
}
