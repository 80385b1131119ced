package sqlstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/belayrpc/belay/idempotency"
)

// maxClaimTries bounds how often one Begin goes round: a record that conflicts,
// and is gone or changed when it is looked at, is claimed again.
const maxClaimTries = 16

// Begin claims the identity; see idempotency.Store.
//
// In SameTransaction mode it waits for the execution that it meets, here or in
// another process, for Config.LockTimeout and within ctx, and then says RUNNING;
// usually it has the outcome by then. In Lease mode it says RUNNING at once.
//
// Claims of one identity queue in this process, outside the pool. What is more
// than Config.MaxConcurrent gets idempotency.ErrBusy.
func (s *Store) Begin(ctx context.Context, c idempotency.Claim) (idempotency.Execution, *idempotency.Record, error) {
	if err := c.Validate(); err != nil {
		return nil, nil, err
	}
	leave, waited, e, rec, err := s.queue.join(ctx, &c, s.cfg.LockTimeout)
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("sqlstore: claim: %w", err)
	case rec != nil:
		return nil, rec, nil
	case e != nil:
		return e, nil, nil
	}
	e, rec, err = s.claim(ctx, &c, waited)
	if e == nil {
		leave()
		return nil, rec, err
	}
	if e.joined {
		e.leave = leave
		s.queue.hold(e)
	} else {
		leave()
	}
	return e, nil, nil
}

// claim goes round until the record is this claim's or somebody else's. Whoever
// waited looks first: most likely there is an outcome now, and looking is one
// statement where claiming would be two. So does whoever would have to wait for
// the one writer, for it takes none to say what is there.
func (s *Store) claim(ctx context.Context, c *idempotency.Claim, lookFirst bool) (*execution, *idempotency.Record, error) {
	lookFirst = lookFirst || c.Late || s.dialect.oneWriter() && len(s.turns) == cap(s.turns)
	for range maxClaimTries {
		if !lookFirst {
			e, err := s.take(ctx, c, nil, 1)
			if e != nil || err != nil {
				return s.answer(ctx, c, e, err)
			}
		}
		r, err := s.lookUp(ctx, c.ID)
		if err != nil {
			return nil, nil, err
		}
		if r == nil {
			if !c.Late {
				lookFirst = false
				continue // R7: it conflicted and is gone, which is no permission to run
			}
			return s.claimLate(ctx, c)
		}
		rec, epoch := decide(r, c)
		if rec != nil {
			return nil, rec, nil
		}
		e, err := s.take(ctx, c, r, epoch)
		if e != nil || err != nil {
			return s.answer(ctx, c, e, err)
		}
	}
	return nil, nil, s.busy("the record changed %d times while it was claimed", maxClaimTries)
}

// answer tells a lock that was not to be had from other errors.
func (s *Store) answer(ctx context.Context, c *idempotency.Claim, e *execution, err error) (*execution, *idempotency.Record, error) {
	if err == nil || s.dialect.fault(err) != faultLocked && !errors.Is(err, idempotency.ErrBusy) {
		return e, nil, err
	}
	if !s.dialect.oneWriter() {
		if errors.Is(err, idempotency.ErrBusy) {
			return nil, nil, err
		}
		// The only lock that a claim waits for is the record's. Its holder has not
		// committed it, so this is all that can be known of it.
		return nil, &idempotency.Record{State: idempotency.StateRunning}, nil
	}
	// Somebody writes, for longer than we can wait: perhaps with this very key.
	if r, readErr := s.lookUp(ctx, c.ID); readErr == nil && r != nil {
		if rec, _ := decide(r, c); rec != nil {
			return nil, rec, nil
		}
	}
	return nil, nil, err
}

// claimLate answers a claim whose record may have been swept, when there is none
// to be seen. In SameTransaction mode a record may be there and not be seen yet,
// so the claim is made, which waits for it, and undone.
func (s *Store) claimLate(ctx context.Context, c *idempotency.Claim) (*execution, *idempotency.Record, error) {
	absent := &idempotency.Record{State: idempotency.StateAbsent}
	if s.cfg.Mode != SameTransaction {
		return nil, absent, nil
	}
	e, err := s.take(ctx, c, nil, 1)
	switch {
	case err != nil:
		return s.answer(ctx, c, nil, err)
	case e != nil:
		tx, _ := e.session.close()
		tx.rollback(ctx)
		return nil, absent, nil
	}
	prompt := *c
	prompt.Late = false // there is a record: it is not absent
	return s.claim(ctx, &prompt, true)
}

// take makes the record c's: a new one when seen is nil, else the one that was
// seen. It returns neither an execution nor an error when that is not possible
// any more.
func (s *Store) take(ctx context.Context, c *idempotency.Claim, seen *row, epoch uint64) (*execution, error) {
	st := s.dialect.claim(c, s.waits(ctx, c.Lease))
	e := &execution{store: s, claim: *c, epoch: epoch, fingerprint: c.Fingerprint, joined: s.cfg.Mode == SameTransaction}
	if seen != nil {
		st = s.dialect.takeOver(c, seen, epoch, s.waits(ctx, c.Lease))
		e.prior, e.fingerprint = seen, seen.fingerprint
	}
	if !e.joined {
		n, err := s.write(ctx, st)
		if err != nil {
			return nil, wrapClaim(err)
		}
		if n == 0 {
			return nil, nil //nolint:nilnil // not possible any more
		}
		e.session = &session{store: s}
		return e, nil
	}

	tx, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	n, err := affected(tx.ExecContext(ctx, st.query, st.args...))
	if err == nil && n == 1 {
		e.session = &session{store: s, tx: tx}
		return e, nil
	}
	tx.rollback(ctx)
	if err != nil && s.dialect.fault(err) != faultRetry {
		return nil, wrapClaim(err)
	}
	return nil, nil //nolint:nilnil // a conflict, also when a stricter isolation level calls it one
}

func wrapClaim(err error) error {
	if errors.Is(err, idempotency.ErrBusy) {
		return err
	}
	return fmt.Errorf("sqlstore: claim: %w", err)
}

// lookUp reads what is committed.
func (s *Store) lookUp(ctx context.Context, id idempotency.ID) (r *row, err error) {
	err = s.patiently(ctx, func() (err error) {
		r, err = s.read(ctx, s.db, s.dialect.read(id, false))
		return err
	})
	return r, err
}
