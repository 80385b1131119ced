package sqltap

import (
	"context"
	"database/sql/driver"
)

// Kind is what is asked of the driver.
type Kind uint8

// The kinds. Prepared statements are not among them: their use goes by unseen.
const (
	Connect Kind = iota // a new connection; Op.Conn is nil
	Exec
	Query
	Begin
	Commit
	Rollback
)

// Op is one operation.
type Op struct {
	Kind  Kind
	Query string      // of Exec and Query
	Conn  driver.Conn // the driver's own connection
}

// Hook is called before each operation, on the goroutine that runs it, and
// returns what to call after it, or nil. Commit and Rollback, which have no
// context of their own, get the one that their transaction was begun with. It is
// called concurrently.
type Hook func(ctx context.Context, op Op) (after func(err error))

// Wrap returns a connector of the same database whose operations pass hook.
func Wrap(c driver.Connector, hook Hook) driver.Connector {
	return &connector{Connector: c, hook: hook}
}

type connector struct {
	driver.Connector

	hook Hook
}

func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	inner, err := tapped(c.hook, ctx, Op{Kind: Connect}, func() (driver.Conn, error) { return c.Connector.Connect(ctx) })
	if err != nil {
		return nil, err
	}
	return &conn{Conn: inner, hook: c.hook}, nil
}

// tapped runs one operation between the hook's two halves.
func tapped[T any](hook Hook, ctx context.Context, op Op, run func() (T, error)) (T, error) { //nolint:revive // the hook is the subject
	after := hook(ctx, op)
	result, err := run()
	if after != nil {
		after(err)
	}
	return result, err
}

// conn forwards everything that the drivers in use here can do; what one of them
// cannot, it refuses with driver.ErrSkip, and database/sql finds another way.
type conn struct {
	driver.Conn

	hook Hook
}

func (c *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	inner, ok := c.Conn.(driver.ExecerContext)
	if !ok {
		return nil, driver.ErrSkip
	}
	return tapped(c.hook, ctx, Op{Exec, query, c.Conn}, func() (driver.Result, error) { return inner.ExecContext(ctx, query, args) })
}

func (c *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	inner, ok := c.Conn.(driver.QueryerContext)
	if !ok {
		return nil, driver.ErrSkip
	}
	return tapped(c.hook, ctx, Op{Query, query, c.Conn}, func() (driver.Rows, error) { return inner.QueryContext(ctx, query, args) })
}

func (c *conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if inner, ok := c.Conn.(driver.ConnPrepareContext); ok {
		return inner.PrepareContext(ctx, query)
	}
	return c.Prepare(query)
}

func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	inner, ok := c.Conn.(driver.ConnBeginTx)
	if !ok {
		return nil, driver.ErrSkip
	}
	t, err := tapped(c.hook, ctx, Op{Begin, "", c.Conn}, func() (driver.Tx, error) { return inner.BeginTx(ctx, opts) })
	if err != nil {
		return nil, err
	}
	return &tx{inner: t, conn: c, ctx: ctx}, nil
}

func (c *conn) Ping(ctx context.Context) error {
	if inner, ok := c.Conn.(driver.Pinger); ok {
		return inner.Ping(ctx)
	}
	return nil
}

func (c *conn) ResetSession(ctx context.Context) error {
	if inner, ok := c.Conn.(driver.SessionResetter); ok {
		return inner.ResetSession(ctx)
	}
	return nil
}

func (c *conn) IsValid() bool {
	if inner, ok := c.Conn.(driver.Validator); ok {
		return inner.IsValid()
	}
	return true
}

func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	if inner, ok := c.Conn.(driver.NamedValueChecker); ok {
		return inner.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

type tx struct {
	inner driver.Tx
	conn  *conn
	ctx   context.Context //nolint:containedctx // driver.Tx's methods take none
}

func (t *tx) Commit() error   { return t.end(Commit, t.inner.Commit) }
func (t *tx) Rollback() error { return t.end(Rollback, t.inner.Rollback) }

func (t *tx) end(kind Kind, run func() error) error {
	_, err := tapped(t.conn.hook, t.ctx, Op{kind, "", t.conn.Conn}, func() (struct{}, error) { return struct{}{}, run() })
	return err
}
