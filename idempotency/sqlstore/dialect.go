package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// dialect is what differs between databases: the statements, how a transaction
// begins and is known to live, and what an error means. Everything that decides
// is written once, above it.
type dialect interface { //nolint:interfacebloat // one method for each statement: a smaller one would only be split
	// claim inserts a RUNNING record, or does nothing where there is one.
	claim(c *idempotency.Claim, w waits) statement
	// takeOver makes a record that was read RUNNING for c, if it still is what it
	// was and may be taken.
	takeOver(c *idempotency.Claim, seen *row, epoch uint64, w waits) statement
	// read selects the columns of row. The locking form waits for whoever is
	// changing the record.
	read(id idempotency.ID, lock bool) statement
	// finish writes the outcome at the end of the handler's transaction, only if
	// the record is still the execution's and the transaction still the one that
	// was begun. joined: the record was claimed in this very transaction.
	finish(c *idempotency.Claim, data []byte, joined bool) statement
	// conclude moves the execution's own record, RUNNING or UNKNOWN, to state.
	conclude(c *idempotency.Claim, state idempotency.State, data []byte) statement
	// renew starts the lease of the execution's own record again.
	renew(c *idempotency.Claim) statement
	// insert writes a record that needs no claim: a verdict after a rollback.
	insert(c *idempotency.Claim, epoch uint64, state idempotency.State, data []byte, w waits) statement
	// replace writes such a record over one that was read, if it still is what
	// it was.
	replace(c *idempotency.Claim, seen *row, epoch uint64, state idempotency.State, data []byte, w waits) statement
	// resolve moves a record that nobody holds to r.State.
	resolve(id idempotency.ID, r *idempotency.Resolution) statement
	// cancelAbsent writes a tombstone where there is no record.
	cancelAbsent(id idempotency.ID, r *idempotency.Resolution, w waits) statement
	// sweep deletes at most limit records whose retention is over.
	sweep(limit int) statement

	// begin begins a transaction that only its own end, or the loss of its
	// connection, ends: ctx bounds the beginning.
	begin(ctx context.Context, db *sql.DB) (transaction, error)
	// oneWriter reports whether a transaction keeps everybody else from writing.
	oneWriter() bool
	// fault says what an error means.
	fault(err error) fault

	// migration runs fn in a transaction that excludes every other migration.
	migration(ctx context.Context, db *sql.DB, table string, fn func(Tx) error) error
	// missing reports whether err says that a table does not exist.
	missing(err error) bool
	// check verifies the server's version and settings.
	check(ctx context.Context, db *sql.DB, relaxed bool) error
}

// statement is one statement and its arguments.
type statement struct {
	query string
	args  []any
}

// waits bound what a statement, or the transaction it begins, may wait for.
type waits struct {
	lock time.Duration // for a lock
	idle time.Duration // for the next statement
}

// transaction is an open transaction as its owner sees it.
type transaction interface {
	Tx

	// probe is called after a failed statement. It returns errTxGone when the
	// failure ended the transaction, so that the next statement would be
	// committed by itself.
	probe(ctx context.Context) error

	// intact returns errTxSevered when the transaction of the execution that has
	// claimed c ended without its owner. After it, the transaction takes only
	// finish, commit and rollback.
	intact(ctx context.Context, c *idempotency.Claim) error

	// finishGuarded reports whether the dialect's finish statement sees for
	// itself what intact would.
	finishGuarded() bool

	// commit ends it. An error of fault faultOther leaves open whether it did.
	commit(ctx context.Context) error

	// rollback ends it, whatever state it is in, and gives the connection back
	// or throws it away.
	rollback(ctx context.Context)
}

// fault is what an error of the database means for the store.
type fault uint8

const (
	// faultOther: nobody said anything about the statement: the connection, the
	// driver, the context, a server going down.
	faultOther fault = iota
	// faultLocked: the wait for a lock was given up.
	faultLocked
	// faultRetry: the same transaction may succeed when it is run again.
	faultRetry
	// faultAborted: an earlier statement of the transaction failed.
	faultAborted
	// faultRefused: the database said no.
	faultRefused
)

var (
	// errTxGone: a failed statement took the transaction with it.
	errTxGone = errors.New("sqlstore: the transaction ended with the statement that failed: nothing of it is committed, return the error")

	// errTxSevered: the transaction ended without its owner.
	errTxSevered = errors.New("sqlstore: the handler's transaction ended before the store ended it: " +
		"a handler must not COMMIT or ROLLBACK in SQL")
)

// millis rounds up, so that a wait that was asked for is never 0, which
// databases take for "for ever".
func millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}
