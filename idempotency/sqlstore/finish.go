package sqlstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// finish commits the handler's writes and the outcome together.
func (e *execution) finish(ctx context.Context, tx transaction, data []byte) (*idempotency.Record, error) {
	if tx == nil {
		// The handler asked for no transaction: there is nothing to commit the
		// outcome with.
		return e.note(ctx, idempotency.StateDone, data)
	}
	if broken := e.session.broken.Load(); broken != nil {
		tx.rollback(ctx)
		return nil, e.refused(ctx, *broken)
	}
	if !tx.finishGuarded() {
		if err := tx.intact(ctx, &e.claim); err != nil {
			return nil, e.notFinished(ctx, tx, err)
		}
	}
	st := e.store.dialect.finish(&e.claim, data, e.joined)
	n, err := affected(tx.ExecContext(ctx, st.query, st.args...))
	switch {
	case err != nil:
		return nil, e.notFinished(ctx, tx, fmt.Errorf("sqlstore: write the outcome: %w", err))
	case n == 0:
		return e.overtaken(ctx, tx)
	}

	// Half of what is left is for the COMMIT, the other for finding out what
	// became of it when it does not answer.
	commitCtx, cancel := share(ctx)
	err = tx.commit(commitCtx)
	cancel()
	switch {
	case err == nil:
		return e.record(idempotency.StateDone, data), nil
	case e.store.dialect.fault(err) == faultOther, errors.Is(err, errTxSevered):
		return e.settle(ctx, data, err)
	default:
		return nil, e.refused(ctx, err)
	}
}

// notFinished ends a transaction that is not going to be committed, and says
// whose fault it is.
func (e *execution) notFinished(ctx context.Context, tx transaction, err error) error {
	tx.rollback(ctx)
	if errors.Is(err, errTxSevered) {
		return e.severed(ctx, err)
	}
	switch e.store.dialect.fault(err) {
	case faultOther, faultLocked:
		e.free(ctx)
		return err
	default:
		return e.refused(ctx, err)
	}
}

// refused frees the key of a transaction that the database did not want.
func (e *execution) refused(ctx context.Context, cause error) error {
	e.free(ctx)
	return fmt.Errorf("sqlstore: %w: %w", idempotency.ErrConflict, cause)
}

// free gives a key back whose transaction is undone. When it cannot, the key is
// free all the same: at once in SameTransaction mode, else after the lease.
func (e *execution) free(ctx context.Context) {
	_ = e.giveBack(ctx, nil)
}

// overtaken: the record is not this execution's, or the transaction is not the
// handler's any more.
func (e *execution) overtaken(ctx context.Context, tx transaction) (*idempotency.Record, error) {
	tx.rollback(ctx)
	if e.joined {
		// Nobody else can have touched an uncommitted record.
		return nil, e.severed(ctx, errTxSevered)
	}
	r, err := e.store.lookUp(ctx, e.claim.ID)
	switch {
	case err != nil:
		return nil, err
	case r.held(e.claim.Owner):
		return nil, e.severed(ctx, errTxSevered)
	case r != nil && r.state == idempotency.StateDone:
		return r.record(), nil
	default:
		return nil, idempotency.ErrLost
	}
}

// settleTime bounds the search for a COMMIT's fate under a context that has no
// end of its own.
const settleTime = 5 * time.Second

// settle finds out what became of a COMMIT that did not answer. It asks on
// another connection, in a way that waits for the old backend, which may still
// be committing.
func (e *execution) settle(ctx context.Context, data []byte, cause error) (*idempotency.Record, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, settleTime)
		defer cancel()
	}
	for delay := busyDelay; ; delay = nextDelay(delay) {
		r, err := e.ask(ctx)
		switch {
		case err != nil && sleep(ctx, delay) == nil:
			continue
		case err != nil:
			e.store.emit(ctx, Event{Kind: EventInDoubt, ID: e.claim.ID, Method: e.claim.Method, Err: errors.Join(cause, err)})
			return nil, fmt.Errorf("sqlstore: %w: %w", idempotency.ErrInDoubt, errors.Join(cause, err))
		}
		e.store.emit(ctx, Event{Kind: EventCommitLost, ID: e.claim.ID, Method: e.claim.Method, Err: cause})
		switch {
		case r != nil && r.state == idempotency.StateDone && r.owner == e.claim.Owner:
			return e.record(idempotency.StateDone, data), nil
		case r != nil && r.state == idempotency.StateDone:
			return r.record(), nil
		case r == nil || r.held(e.claim.Owner) || r.owner != e.claim.Owner && e.joined:
			e.free(ctx)
			return nil, fmt.Errorf("sqlstore: commit: rolled back: %w", cause)
		default:
			return nil, idempotency.ErrLost
		}
	}
}

// ask returns the record as the COMMIT left it, nil when it left none.
//
// A new record in SameTransaction mode is asked for by inserting it again: that
// waits for whoever has inserted it and not yet ended, where SELECT … FOR UPDATE
// sees nothing to wait for. In all other cases there is a committed row, and the
// locking SELECT waits for whoever is changing it.
func (e *execution) ask(ctx context.Context) (*row, error) {
	tx, err := e.store.dialect.begin(ctx, e.store.db)
	if err != nil {
		return nil, fmt.Errorf("sqlstore: ask for the commit: %w", err)
	}
	defer tx.rollback(ctx)
	if e.joined && e.prior == nil {
		st := e.store.dialect.claim(&e.claim, e.store.waits(ctx, e.claim.Lease))
		n, err := affected(tx.ExecContext(ctx, st.query, st.args...))
		if err != nil {
			return nil, fmt.Errorf("sqlstore: ask for the commit: %w", err)
		}
		if n == 1 {
			return nil, nil //nolint:nilnil // it was not there
		}
	}
	return e.store.read(ctx, tx, e.store.dialect.read(e.claim.ID, true))
}

// share returns a context with half of the time that is left of ctx.
func share(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithTimeout(ctx, settleTime)
	}
	return context.WithTimeout(ctx, time.Until(deadline)/2)
}
