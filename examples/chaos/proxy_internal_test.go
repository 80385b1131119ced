//go:build unix

package main

import (
	"io"
	"net"
	"testing"
	"time"
)

// echo answers each line with itself.
func echo(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l.Addr().String()
}

func TestProxy_LosesReplies(t *testing.T) {
	p, err := newProxy(echo(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	ask := func() (string, error) {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", p.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := io.WriteString(c, "hello"); err != nil {
			t.Fatal(err)
		}
		reply := make([]byte, len("hello"))
		_, err = io.ReadFull(c, reply)
		return string(reply), err
	}
	if reply, err := ask(); reply != "hello" || err != nil {
		t.Fatalf("switched off: %q, %v", reply, err)
	}
	p.on.Store(true)
	for range 8 {
		if reply, err := ask(); err == nil {
			t.Fatalf("one in one is lost, and %q came", reply)
		}
	}
	if n := p.drops.Load(); n != 8 {
		t.Errorf("%d drops, want 8", n)
	}
}
