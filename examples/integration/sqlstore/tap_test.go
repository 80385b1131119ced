package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
)

// tap sits between database/sql and a driver: it counts what is sent, and loses
// connections at chosen moments.
type tap struct {
	mu   sync.Mutex // guards all below
	sent []string
	lose func(query string) loss
	down bool // no new connections
}

// loss says what becomes of a statement and its connection.
type loss int

const (
	keep        loss = iota
	loseRequest      // the connection breaks before the database sees it
	loseReply        // the database does it, and nobody hears
)

// openTapped opens a database through a tap.
func openTapped(t *testing.T, k kind, dsn string) (*sql.DB, *tap) {
	t.Helper()
	probe, err := sql.Open(k.driver(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	inner := probe.Driver()
	_ = probe.Close()
	p := &tap{}
	db := sql.OpenDB(connector{p, inner, dsn})
	db.SetMaxOpenConns(poolSize)
	db.SetMaxIdleConns(poolSize)
	t.Cleanup(func() {
		if n := db.Stats().InUse; n != 0 {
			t.Errorf("%d connections are still in use", n)
		}
		_ = db.Close()
	})
	return db, p
}

// start forgets what was sent, and loses what lose says from now on, once.
func (p *tap) start(when func(query string) loss) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent, p.lose = nil, when
}

func (p *tap) setDown(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
}

func (p *tap) isDown() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.down
}

// statements returns what was sent since start, without what begins and ends a
// transaction.
func (p *tap) statements() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []string
	for _, q := range p.sent {
		if !strings.HasPrefix(q, "BEGIN") && q != "COMMIT" && q != "ROLLBACK" {
			out = append(out, q)
		}
	}
	return out
}

func (p *tap) pass(query string) loss {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent = append(p.sent, query)
	if p.lose == nil {
		return keep
	}
	l := p.lose(query)
	if l != keep {
		p.lose = nil
	}
	return l
}

type connector struct {
	tap   *tap
	inner driver.Driver
	dsn   string
}

func (c connector) Driver() driver.Driver { return c.inner }

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	if c.tap.isDown() {
		return nil, io.ErrUnexpectedEOF
	}
	var conn driver.Conn
	var err error
	if d, ok := c.inner.(driver.DriverContext); ok {
		var inner driver.Connector
		if inner, err = d.OpenConnector(c.dsn); err == nil {
			conn, err = inner.Connect(ctx)
		}
	} else {
		conn, err = c.inner.Open(c.dsn)
	}
	if err != nil {
		return nil, err
	}
	full, ok := conn.(fullConn)
	if !ok {
		return nil, fmt.Errorf("%T is not a fullConn", conn)
	}
	return &tappedConn{fullConn: full, tap: c.tap}, nil
}

// fullConn is what the drivers here can do.
type fullConn interface {
	driver.Conn
	driver.ExecerContext
	driver.QueryerContext
	driver.ConnPrepareContext
	driver.ConnBeginTx
}

type tappedConn struct {
	fullConn

	tap    *tap
	broken bool
}

// through does what a statement does, unless it is lost.
func (c *tappedConn) through(query string, do func() error) error {
	if c.broken {
		return io.ErrUnexpectedEOF
	}
	switch c.tap.pass(query) {
	case loseRequest:
		c.breakDown()
		return io.ErrUnexpectedEOF
	case loseReply:
		_ = do()
		c.breakDown()
		return io.ErrUnexpectedEOF
	default:
		return do()
	}
}

func (c *tappedConn) breakDown() {
	c.broken = true
	_ = c.fullConn.Close()
}

func (c *tappedConn) Close() error {
	if c.broken {
		return nil
	}
	return c.fullConn.Close()
}

func (c *tappedConn) IsValid() bool {
	if v, ok := c.fullConn.(driver.Validator); ok && !c.broken {
		return v.IsValid()
	}
	return !c.broken
}

func (c *tappedConn) ResetSession(ctx context.Context) error {
	if c.broken {
		return driver.ErrBadConn
	}
	if r, ok := c.fullConn.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

func (c *tappedConn) CheckNamedValue(v *driver.NamedValue) error {
	if checker, ok := c.fullConn.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

func (c *tappedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (res driver.Result, err error) {
	err = c.through(query, func() (err error) {
		res, err = c.fullConn.ExecContext(ctx, query, args)
		return err
	})
	return res, err
}

func (c *tappedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (rows driver.Rows, err error) {
	err = c.through(query, func() (err error) {
		rows, err = c.fullConn.QueryContext(ctx, query, args)
		return err
	})
	return rows, err
}

func (c *tappedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (tx driver.Tx, err error) {
	err = c.through("BEGIN", func() (err error) {
		tx, err = c.fullConn.BeginTx(ctx, opts)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &tappedTx{tx, c}, nil
}

type tappedTx struct {
	inner driver.Tx
	conn  *tappedConn
}

func (t *tappedTx) Commit() error { return t.conn.through("COMMIT", t.inner.Commit) }

func (t *tappedTx) Rollback() error { return t.conn.through("ROLLBACK", t.inner.Rollback) }
