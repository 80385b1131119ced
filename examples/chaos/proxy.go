package main

import (
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
)

// proxy stands between the servers and PostgreSQL and loses replies: the database
// has done what it was asked, and nobody hears of it.
type proxy struct {
	listener net.Listener
	target   string
	oneIn    int // reads from the database that pass for one that is lost

	drops atomic.Int64
	on    atomic.Bool

	mu     sync.Mutex // guards conns
	conns  map[net.Conn]struct{}
	closed bool
	active sync.WaitGroup
}

func newProxy(target string, oneIn int) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it lives until close
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: l, target: target, oneIn: oneIn, conns: make(map[net.Conn]struct{})}
	p.active.Go(p.accept)
	return p, nil
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.active.Go(func() { p.serve(client) })
	}
}

func (p *proxy) serve(client net.Conn) {
	defer p.drop(client)
	database, err := net.Dial("tcp", p.target) //nolint:noctx // on this host
	if err != nil {
		return
	}
	defer p.drop(database)
	if !p.keep(client) || !p.keep(database) {
		return
	}
	var both sync.WaitGroup
	both.Go(func() {
		_, _ = io.Copy(database, client) // ends with either
		_ = database.Close()
	})
	p.replies(client, database)
	_ = client.Close()
	both.Wait()
}

// replies passes on what the database says, until one reply is lost: then the
// connection is cut, or, one time in four, goes on without a word, as one does
// whose other end has vanished.
func (p *proxy) replies(client, database net.Conn) {
	buf := make([]byte, 32<<10)
	mute := false
	for {
		n, err := database.Read(buf)
		if n > 0 && !mute && p.on.Load() && rand.IntN(p.oneIn) == 0 { //nolint:gosec // bad luck is not a secret
			p.drops.Add(1)
			if rand.IntN(4) != 0 { //nolint:gosec // see above
				return
			}
			mute = true
		}
		if n > 0 && !mute {
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.conns[c] = struct{}{}
	}
	return !p.closed
}

func (p *proxy) drop(c net.Conn) {
	_ = c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// close cuts everything and waits until it is cut.
func (p *proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.active.Wait()
}
