package sqlstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// execution is the right to run one call once, in either mode.
type execution struct {
	// Read-only after Begin.
	store       *Store
	claim       idempotency.Claim
	epoch       uint64
	fingerprint idempotency.Fingerprint // as stored
	joined      bool                    // the claim is a part of the handler's transaction
	prior       *row                    // what was taken over; nil for a new record
	session     *session
	leave       func() // the queue; nil when not joined

	ended atomic.Bool
}

var _ idempotency.Execution = (*execution)(nil)

// Context gives the handler its transaction and its epoch.
func (e *execution) Context(ctx context.Context) context.Context {
	return idempotency.ContextWithEpoch(e.store.withSession(ctx, e.session), e.epoch)
}

// Atomic: Release undoes whatever was written through Tx.
func (e *execution) Atomic() bool { return true }

// Renew starts the lease again. In SameTransaction mode there is none.
func (e *execution) Renew(ctx context.Context) (time.Duration, error) {
	if e.joined {
		return 0, nil
	}
	if e.store.dialect.oneWriter() && e.session.open() {
		// Nobody can take the record while this very transaction keeps everybody
		// from writing, and this store with them.
		return e.claim.Lease, nil
	}
	n, err := e.store.write(ctx, e.store.dialect.renew(&e.claim))
	switch {
	case err != nil:
		return 0, fmt.Errorf("sqlstore: renew: %w", err)
	case n == 0:
		return 0, idempotency.ErrLost
	default:
		return e.claim.Lease, nil
	}
}

// Finish commits the handler's writes with the outcome, or undoes them and
// records the outcome alone. See finish.go.
func (e *execution) Finish(ctx context.Context, o *idempotency.Outcome) (*idempotency.Record, error) {
	if o == nil {
		return nil, errors.New("sqlstore: Finish: outcome is nil: must be set")
	}
	if !e.ended.CompareAndSwap(false, true) {
		return e.standing(ctx)
	}
	defer e.depart()
	tx, asked := e.session.close()
	if o.Undo {
		if err := e.undo(ctx, tx); err != nil {
			return nil, err
		}
		return e.note(ctx, idempotency.StateDone, outcomeData(o))
	}
	if !asked {
		e.store.emit(ctx, Event{Kind: EventTxUnused, ID: e.claim.ID, Method: e.claim.Method})
		if e.store.cfg.FailOnTxUnused {
			return nil, errors.Join(ErrTxUnused, e.giveBack(ctx, tx))
		}
	}
	return e.finish(ctx, tx, outcomeData(o))
}

// Release undoes the handler's writes and frees the key.
func (e *execution) Release(ctx context.Context) error {
	if !e.ended.CompareAndSwap(false, true) {
		return e.expect(ctx, idempotency.StateFree)
	}
	defer e.depart()
	tx, _ := e.session.close()
	return e.giveBack(ctx, tx)
}

// Abandon undoes the handler's writes and records that it had effects elsewhere
// of which nobody knows.
func (e *execution) Abandon(ctx context.Context) error {
	if !e.ended.CompareAndSwap(false, true) {
		return e.expect(ctx, idempotency.StateUnknown)
	}
	defer e.depart()
	tx, _ := e.session.close()
	if err := e.undo(ctx, tx); err != nil {
		return err
	}
	_, err := e.note(ctx, idempotency.StateUnknown, nil)
	return err
}

// depart lets the next claim of the identity go to the database.
func (e *execution) depart() {
	if e.leave != nil {
		e.leave()
	}
}

// undo rolls the handler's transaction back. It fails only where the handler has
// ended it itself, so that there is nothing to roll back and nobody knows what
// is committed.
func (e *execution) undo(ctx context.Context, tx transaction) error {
	if tx == nil {
		return nil
	}
	err := tx.intact(ctx, &e.claim)
	tx.rollback(ctx)
	if errors.Is(err, errTxSevered) {
		return e.severed(ctx, err)
	}
	return nil // any other error is the connection's, which takes the transaction along
}

// giveBack undoes the handler's writes and frees the key. The record that says
// FREE keeps fingerprint and epoch. In SameTransaction mode, where undoing has
// freed the key already, it is written if nobody else has the key by now, and
// for the same reason an error of writing it is not one of giving back.
func (e *execution) giveBack(ctx context.Context, tx transaction) error {
	if err := e.undo(ctx, tx); err != nil {
		return err
	}
	if e.joined {
		_, _ = e.writeNote(ctx, idempotency.StateFree, nil, waits{lock: time.Millisecond})
		return nil
	}
	_, err := e.note(ctx, idempotency.StateFree, nil)
	return err
}

// severed records that nobody knows what became of the call.
func (e *execution) severed(ctx context.Context, cause error) error {
	e.store.emit(ctx, Event{Kind: EventTxSevered, ID: e.claim.ID, Method: e.claim.Method, Err: cause})
	// The record may have been committed, or be gone with a ROLLBACK. Either way
	// it must not stay claimable.
	n, err := e.store.write(ctx, e.store.dialect.conclude(&e.claim, idempotency.StateUnknown, nil))
	if n == 0 && err == nil && e.joined {
		_, err = e.writeNote(ctx, idempotency.StateUnknown, nil, e.store.waits(ctx, e.claim.Lease))
	}
	return errors.Join(fmt.Errorf("sqlstore: %w: %w", idempotency.ErrInDoubt, cause), err)
}

// note records a verdict after the handler's transaction is out of the way, and
// returns the record that stands, or ErrLost.
func (e *execution) note(ctx context.Context, state idempotency.State, data []byte) (*idempotency.Record, error) {
	n, err := e.writeNote(ctx, state, data, e.store.waits(ctx, e.claim.Lease))
	if err != nil && e.store.dialect.fault(err) == faultOther && ctx.Err() == nil {
		// The reply may be lost and the verdict written: then it is found to stand.
		n, err = e.writeNote(ctx, state, data, e.store.waits(ctx, e.claim.Lease))
	}
	switch {
	case err != nil && e.joined && e.store.dialect.fault(err) == faultLocked && !e.store.dialect.oneWriter():
		return nil, idempotency.ErrLost // somebody else runs with the key by now
	case err != nil:
		return nil, fmt.Errorf("sqlstore: record %v: %w", state, err)
	case n == 0 && state != idempotency.StateDone:
		return nil, e.expect(ctx, state)
	case n == 0:
		return e.standing(ctx)
	default:
		return e.record(state, data), nil
	}
}

// writeNote is one guarded step, and in SameTransaction mode at most three: the
// record is new, or it is what it was before this execution, or it has been
// claimed and freed since.
func (e *execution) writeNote(ctx context.Context, state idempotency.State, data []byte, w waits) (int64, error) {
	s := e.store
	if !e.joined {
		return s.write(ctx, s.dialect.conclude(&e.claim, state, data))
	}
	if e.prior == nil {
		n, err := s.write(ctx, s.dialect.insert(&e.claim, e.epoch, state, data, w))
		if n > 0 || err != nil {
			return n, err
		}
	}
	r, err := s.lookUp(ctx, e.claim.ID)
	if err != nil || r == nil {
		return 0, err
	}
	unchanged := e.prior != nil && r.state == e.prior.state && r.owner == e.prior.owner && r.epoch == e.prior.epoch
	if !unchanged && r.state != idempotency.StateFree || r.owner == e.claim.Owner && r.state == state {
		return 0, nil
	}
	return s.write(ctx, s.dialect.replace(&e.claim, r, max(e.epoch, r.epoch), state, data, w))
}

// record is what this execution has written. The data is a copy: the caller may
// use its own again.
func (e *execution) record(state idempotency.State, data []byte) *idempotency.Record {
	rec := &idempotency.Record{State: state, Fingerprint: e.fingerprint, Epoch: e.epoch}
	if state == idempotency.StateDone {
		rec.Outcome = &idempotency.Outcome{Data: bytes.Clone(data)}
	}
	if e.prior != nil {
		rec.Created = e.prior.created
	}
	return rec
}

// standing returns the outcome that stands, whoever wrote it, or ErrLost.
func (e *execution) standing(ctx context.Context) (*idempotency.Record, error) {
	r, err := e.store.lookUp(ctx, e.claim.ID)
	switch {
	case err != nil:
		return nil, err
	case r == nil || r.state != idempotency.StateDone:
		return nil, idempotency.ErrLost
	default:
		return r.record(), nil
	}
}

// expect returns nil when the record already is what this owner wants it to be.
func (e *execution) expect(ctx context.Context, state idempotency.State) error {
	r, err := e.store.lookUp(ctx, e.claim.ID)
	switch {
	case err != nil:
		return err
	case r == nil || r.state != state || r.owner != e.claim.Owner:
		return idempotency.ErrLost
	default:
		return nil
	}
}
