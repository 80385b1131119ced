package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// row is a record as it was read. Its times are relative to the database's clock
// at that moment.
type row struct {
	state       idempotency.State
	owner       idempotency.Owner
	epoch       uint64
	fingerprint idempotency.Fingerprint
	outcome     []byte
	created     time.Time
	left        time.Duration // of the lease
	over        bool          // the lease is
}

// querier is a database or a transaction.
type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// read returns the record, nil when there is none, or ErrCorrupt.
func (s *Store) read(ctx context.Context, q querier, st statement) (*row, error) {
	var (
		r              row
		state, epoch   int64
		owner, fp      []byte
		created, left  int64 // microseconds
		outcomeOrNull  sql.Null[[]byte]
		ownerArraySize = len(r.owner)
	)
	err := q.QueryRowContext(ctx, st.query, st.args...).
		Scan(&state, &owner, &epoch, &fp, &outcomeOrNull, &created, &left, &r.over)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, nil //nolint:nilnil // no record is an answer
	case err != nil:
		return nil, fmt.Errorf("sqlstore: read the record: %w", err)
	case state < int64(idempotency.StateRunning) || state > int64(idempotency.StateCancelled):
		return nil, fmt.Errorf("sqlstore: %w: state is %d", idempotency.ErrCorrupt, state)
	case len(owner) != ownerArraySize:
		return nil, fmt.Errorf("sqlstore: %w: owner has %d bytes, must have %d", idempotency.ErrCorrupt, len(owner), ownerArraySize)
	case epoch < 0:
		return nil, fmt.Errorf("sqlstore: %w: epoch is %d", idempotency.ErrCorrupt, epoch)
	case idempotency.State(state) == idempotency.StateDone && !outcomeOrNull.Valid:
		return nil, fmt.Errorf("sqlstore: %w: state is DONE and outcome is NULL", idempotency.ErrCorrupt)
	}
	r.state, r.epoch = idempotency.State(state), uint64(epoch)
	copy(r.owner[:], owner)
	r.fingerprint, r.outcome = idempotency.Fingerprint(fp), outcomeOrNull.V
	r.created = time.UnixMicro(created).UTC()
	r.left = max(0, time.Duration(left)*time.Microsecond)
	return &r, nil
}

// record is what the row says to somebody who may see it.
func (r *row) record() *idempotency.Record {
	rec := &idempotency.Record{State: r.state, Fingerprint: r.fingerprint, Epoch: r.epoch, Created: r.created}
	switch r.state {
	case idempotency.StateDone:
		rec.Outcome = &idempotency.Outcome{Data: r.outcome}
	case idempotency.StateRunning:
		rec.RetryIn = r.left
	default:
	}
	return rec
}

// held reports whether the row is an execution's of that owner.
func (r *row) held(by idempotency.Owner) bool {
	return r != nil && r.owner == by && (r.state == idempotency.StateRunning || r.state == idempotency.StateUnknown)
}

// decide is what a claim makes of a record: the record, which stands in its way,
// or the epoch of the execution that may now be taken. It is the table of
// idempotency.Store, for a store that is atomic: whatever an execution wrote, and
// did not commit with its record, is undone, so an execution whose lease is over
// may be run again.
func decide(r *row, c *idempotency.Claim) (*idempotency.Record, uint64) {
	if !c.Accepts(r.fingerprint) {
		return &idempotency.Record{State: r.state, Mismatch: true, Fingerprint: r.fingerprint}, 0
	}
	switch r.state {
	case idempotency.StateFree:
		return nil, r.epoch + 1
	case idempotency.StateRunning, idempotency.StateUnknown:
		switch {
		case r.owner == c.Owner:
			return nil, r.epoch // its own claim, whose reply was lost
		case r.state == idempotency.StateRunning && r.over:
			return nil, r.epoch + 1
		case r.state == idempotency.StateUnknown && c.Rerun:
			return nil, r.epoch + 1
		}
	default: // DONE, CANCELLED
	}
	return r.record(), 0
}

func outcomeData(o *idempotency.Outcome) []byte {
	switch {
	case o == nil:
		return nil
	case o.Data == nil:
		return []byte{} // not NULL: DONE has an outcome, though an empty one
	default:
		return o.Data
	}
}
