package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/belayrpc/belay/examples/payments/paymentsv1"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// desk is where a person on call finds out what became of a call, and ends what
// nobody else will.
type desk struct {
	db       *sql.DB
	store    *sqlstore.Store
	postgres bool
}

func isPostgres(dsn string) bool { return strings.Contains(dsn, "://") }

// atDesk opens the service's database for one question.
func atDesk(ctx context.Context, dsn string, ask func(*desk) error) error {
	db, store, err := openDatabase(ctx, dsn)
	if err != nil {
		return err
	}
	return errors.Join(ask(&desk{db: db, store: store, postgres: isPostgres(dsn)}), db.Close())
}

// record is what the desk says of a call. There is no key in it and no payload:
// the database has neither.
type record struct {
	ID        idempotency.ID
	State     idempotency.State
	Over      bool // RUNNING, and its lease is over
	Epoch     int64
	Method    string
	Claimed   time.Time
	Completed time.Time // zero while it is open
}

// String is one line for a terminal.
func (r record) String() string {
	state := r.State.String()
	if r.Over {
		state += " (lease over)"
	}
	line := fmt.Sprintf("%s %s %s claimed %s executions %d", r.ID, state, r.Method, r.Claimed.Format(time.RFC3339), r.Epoch)
	if !r.Completed.IsZero() {
		line += " ended " + r.Completed.Format(time.RFC3339)
	}
	return line
}

var errNoRecord = errors.New("there is no record of this key: the call never came, is running at this moment (PostgreSQL), or its record's retention is over")

// find looks a key up. The database does not have it: the record's identity is a
// hash of whose key it is, the method and the key.
func (d *desk) find(ctx context.Context, key string) (record, error) {
	scope, err := idempotency.SingleTenant(ctx)
	if err != nil {
		return record{}, err
	}
	id := idempotency.IDOf(scope, paymentsv1.PaymentsService_Charge_FullMethodName, key)
	records, err := d.query(ctx, `WHERE id = $1`, id[:])
	if err == nil && len(records) == 0 {
		err = errNoRecord
	}
	if err != nil {
		return record{}, err
	}
	return records[0], nil
}

// open lists what nobody knows the end of, the oldest first: records that are
// UNKNOWN, and executions whose lease is over and that nobody has taken over.
func (d *desk) open(ctx context.Context) ([]record, error) {
	now := `CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)`
	if d.postgres {
		// It looks at every record. Where these are millions, look at those with
		// expires_at = 'infinity', by the index: all that have no verdict, but for
		// one whose handler had said COMMIT in SQL before its process was killed.
		now = `clock_timestamp()`
	}
	return d.query(ctx, `WHERE state = 4 OR (state = 1 AND lease_until < `+now+`) ORDER BY created_at LIMIT 100`)
}

func (d *desk) query(ctx context.Context, where string, args ...any) ([]record, error) {
	millis := func(column string) string { return column }
	if d.postgres {
		millis = func(column string) string { return `(extract(epoch FROM ` + column + `) * 1000)::bigint` }
	}
	//nolint:gosec // every part of it stands in this file
	rows, err := d.db.QueryContext(ctx, `SELECT id, state, epoch, method, `+millis("created_at")+`, COALESCE(`+millis("completed_at")+`, 0), `+
		millis("lease_until")+` FROM `+sqlstore.DefaultTable+` `+where, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var records []record
	for rows.Next() {
		var (
			r                           record
			id                          []byte
			claimed, completed, expires int64
		)
		if err := rows.Scan(&id, &r.State, &r.Epoch, &r.Method, &claimed, &completed, &expires); err != nil {
			return nil, err
		}
		copy(r.ID[:], id)
		r.Claimed = time.UnixMilli(claimed).UTC()
		if completed > 0 {
			r.Completed = time.UnixMilli(completed).UTC()
		}
		r.Over = r.State == idempotency.StateRunning && time.Now().UnixMilli() > expires
		records = append(records, r)
	}
	return records, rows.Err()
}

// resolve ends a record of which the person has found out how it ended:
//
//	free          it did not happen; the next call with the key runs
//	cancelled     it did not happen and never shall
//	charged=ID    it happened: later calls are answered with this charge
func (d *desk) resolve(ctx context.Context, idText, verdict string) error {
	id, err := idempotency.ParseID(idText)
	if err != nil {
		return err
	}
	var r idempotency.Resolution
	chargeID, charged := strings.CutPrefix(verdict, "charged=")
	switch {
	case verdict == "free":
		r.State = idempotency.StateFree
	case verdict == "cancelled":
		r.State = idempotency.StateCancelled
	case charged:
		r.State = idempotency.StateDone
		if r.Outcome, err = d.receipt(ctx, chargeID); err != nil {
			return err
		}
	default:
		return fmt.Errorf("verdict %q: must be free, cancelled or charged=ID", verdict)
	}
	return d.store.Resolve(ctx, id, r)
}

// receipt is the answer for a charge that is in the books.
func (d *desk) receipt(ctx context.Context, chargeID string) (*idempotency.Outcome, error) {
	receipt := &paymentsv1.ChargeResponse{ChargeId: chargeID}
	err := d.db.QueryRowContext(ctx, `SELECT balance_cents FROM accounts JOIN charges ON account = name WHERE charge_id = $1`, chargeID).
		Scan(&receipt.BalanceCents)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, fmt.Errorf("charge %q is not in the books", chargeID)
	case err != nil:
		return nil, err
	}
	return idempotency.NewOutcome(receipt, nil)
}
