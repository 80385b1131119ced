package sqlstore_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"
)

// proxy is a network to the database that can go dead without a word.
type proxy struct {
	listener net.Listener
	target   string

	mu    sync.Mutex // guards all below
	dead  bool
	slow  []byte        // what holds up whatever contains it …
	delay time.Duration // … for so long
	conns []net.Conn
	wg    sync.WaitGroup
}

// through returns dsn as it is reached through a new proxy.
func through(t *testing.T, dsn string) (string, *proxy) {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: u.Host}
	u.Host = l.Addr().String()
	p.wg.Go(func() { p.accept(t.Context()) })
	t.Cleanup(p.close)
	return u.String(), p
}

func (p *proxy) accept(ctx context.Context) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := new(net.Dialer).DialContext(ctx, "tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		p.wg.Go(func() { p.pump(server, client) })
		p.wg.Go(func() { p.pump(client, server) })
	}
}

// pump carries bytes until either end is gone, and swallows them once the
// network is dead: a host that has vanished sends no farewell.
func (p *proxy) pump(to io.Writer, from io.Reader) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		dead := p.dead
		p.mu.Unlock()
		if err != nil {
			if c, ok := to.(net.Conn); ok && !dead {
				_ = c.Close()
			}
			return
		}
		p.mu.Lock()
		slow, delay := p.slow, p.delay
		p.mu.Unlock()
		if slow != nil && bytes.Contains(buf[:n], slow) {
			time.Sleep(delay)
		}
		if !dead {
			_, _ = to.Write(buf[:n])
		}
	}
}

// die stops every byte in both directions and leaves the connections open.
func (p *proxy) die() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
}

// hold delays what contains text on its way, even when its sender has gone
// meanwhile.
func (p *proxy) hold(text string, delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.slow, p.delay = []byte(text), delay
}

func (p *proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
