package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// Tx is a transaction without an end: what a handler writes through, and its
// caller commits. It is what sqlc generates as DBTX and what gorm takes as a
// ConnPool. Whoever needs a savepoint sets it in SQL.
//
// The methods are those of *sql.Tx. Their context bounds the statement, not the
// transaction. They may be called concurrently and then wait for each other. A
// Tx, and what was prepared on it or queried through it, ends with the handler:
// later calls fail.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// Errors of transactions, matched with errors.Is.
var (
	// ErrNoCall is returned by Tx when ctx belongs to no call: nobody would
	// commit.
	ErrNoCall = errors.New("sqlstore: the context belongs to no call whose transaction somebody commits: " +
		"install the server's dedupe interceptor with this store, or use Store.Run")

	// ErrCallOver is returned by Tx, and by its methods, when the call has ended.
	ErrCallOver = errors.New("sqlstore: the call is over: its transaction has been ended")

	// ErrTxUnused is returned by Finish under Config.FailOnTxUnused.
	ErrTxUnused = errors.New("sqlstore: the handler returned OK without asking for its transaction (Store.Tx)")
)

// handle is the Tx that handlers see. It keeps statements from a transaction
// that is no longer the handler's to write to.
type handle struct {
	session *session
}

func (h handle) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	tx, leave, err := h.session.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	res, err := tx.ExecContext(ctx, query, args...)
	h.session.examine(ctx, tx, err)
	return res, err
}

func (h handle) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	tx, leave, err := h.session.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	rows, err := tx.QueryContext(ctx, query, args...) //nolint:sqlclosecheck // the handler closes them
	h.session.examine(ctx, tx, err)
	return rows, err
}

func (h handle) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	tx, leave, err := h.session.enter()
	if err != nil {
		// A sql.Row cannot be made, only obtained: this context is over before a
		// connection is looked for, and err is what Scan returns.
		return h.session.store.db.QueryRowContext(overContext{ctx, err}, query) //nolint:contextcheck // it is made of ctx
	}
	defer leave()
	row := tx.QueryRowContext(ctx, query, args...)
	h.session.examine(ctx, tx, row.Err())
	return row
}

func (h handle) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	tx, leave, err := h.session.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	stmt, err := tx.PrepareContext(ctx, query) //nolint:sqlclosecheck // the handler closes it, or the transaction
	h.session.examine(ctx, tx, err)
	return stmt, err
}

// overContext is a context that has ended with an error of our choice.
type overContext struct {
	context.Context //nolint:containedctx // it is one

	err error
}

func (overContext) Deadline() (time.Time, bool) { return time.Time{}, false }

func (overContext) Done() <-chan struct{} { return over }

func (c overContext) Err() error { return c.err }

var over = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()
