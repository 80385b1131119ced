package main

import (
	"database/sql/driver"
	"encoding/binary"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5/stdlib"
)

// wire is a connection to PostgreSQL that knows when a statement has left.
type wire struct {
	net.Conn

	sent atomic.Pointer[func()] // called once, after the next statement has left
}

// wireOf finds the wire below a driver's connection; nil where there is none.
func wireOf(c driver.Conn) *wire {
	pg, ok := c.(*stdlib.Conn)
	if !ok {
		return nil
	}
	w, _ := pg.Conn().PgConn().Conn().(*wire)
	return w
}

func (w *wire) Write(b []byte) (int, error) {
	n, err := w.Conn.Write(b)
	if err == nil && w.sent.Load() != nil && executes(b) {
		if f := w.sent.Swap(nil); f != nil {
			(*f)()
		}
	}
	return n, err
}

// executes reports whether b, whole messages of PostgreSQL's protocol 3 (a type
// byte, a length that counts itself, a body), has one that runs a statement:
// Execute or Query. Preparing one goes before and does not count.
func executes(b []byte) bool {
	const header = 5
	for len(b) >= header {
		if b[0] == 'E' || b[0] == 'Q' {
			return true
		}
		length := int64(binary.BigEndian.Uint32(b[1:header]))
		if length < header-1 || length >= int64(len(b)) {
			return false
		}
		b = b[1+length:]
	}
	return false
}
