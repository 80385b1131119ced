package main

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/peer"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

var proxyExperiment = experiment{
	name:  "proxy",
	title: "PROXY: an nginx in between",
	text: `Over loopback, in real time, through a real nginx, which fails one request in ten by itself: with 502, 503, 429 and Retry-After, or by cutting the stream (which arrives as RST_STREAM and becomes INTERNAL, so nobody retries it). The server behind it answers UNAVAILABLE to one call in twenty that reach it.
answer=upstream: nginx is well, and the server's connection to it breaks after the work is done, one time in ten; nginx then says 502.
call=read: a method without side effects; call=write: one that says nothing about being repeated. sent_again: writes that arrived at the server more than once, though nobody knew whether that is safe; done_twice: those whose effect happened twice.
origin_right: of the failed attempts, those of which the error knows who answered: the server, or something before it.`,
	cells: func(p plan) []cell {
		answers, calls := []string{"502", "503", "429", "cut", "upstream"}, []string{"read", "write"}
		if p.quick {
			answers = []string{"502", "upstream"}
		}
		all := make([]string, 0, len(answers)*len(calls))
		for _, a := range answers {
			for _, c := range calls {
				all = append(all, "clock=real answer="+a+" call="+c)
			}
		}
		p.repeats = min(p.repeats, 3) // twenty variants, and nothing about them is close
		return p.cross("proxy", slices.Concat(peers, []string{stackBelay}), all...)
	},
	run: runProxy,
}

func runProxy(w *world) (outcome, error) {
	d := 4 * time.Second
	if w.cell.Quick {
		d = 2 * time.Second
	}
	answer, write := w.cell.text("answer"), w.cell.text("call") == "write"
	upstream := answer == "upstream"
	if upstream {
		answer = "none"
	}
	s, err := newStack(w.cell.Stack)
	if err != nil {
		return outcome{}, err
	}
	t, own, cut := newTally(), newFault(w.random(1)), newFault(w.random(3))
	own.set(0.05)
	if upstream {
		cut.set(0.1)
	}
	p := &proxied{conns: map[string]net.Conn{}, effects: map[int64]int{}, refused: map[int64]bool{}}
	w.accepted = p.remember
	backend, err := w.serve(func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if own.strikes() {
			p.refuse(req.GetNumber())
			return errDown
		}
		p.done(req.GetNumber())
		if cut.strikes() {
			p.cut(ctx)
		}
		return nil
	}, s.serve...)
	if err != nil {
		return outcome{}, err
	}
	n, err := w.startNginx(answer, backend.address)
	if err != nil {
		return outcome{}, err
	}
	conn, err := w.channel(n.link(), s.dial()...)
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: 150, timeout: 5 * time.Second, write: write, random: w.random(2), channels: channels(conn)}
	t.zero = time.Now() // nginx may have had to be fetched
	u.arrive(context.Background(), t.zero, d)
	u.wait()
	all := t.between(0, forever)
	var o outcome
	o.add("success", all.success())
	o.add("load", all.load())
	if write {
		o.add("sent_again", float64(all.extra))
		o.add("done_twice", float64(p.twice()))
	}
	if right, judged := p.origins(t); judged > 0 && isBelay(w.cell.Stack) {
		o.add("origin_right", ratio(right, judged))
	}
	o.add("calls", float64(all.calls))
	return o, nil
}

// proxied is what the server behind the proxy knows.
type proxied struct {
	mu      sync.Mutex // guards all below
	conns   map[string]net.Conn
	effects map[int64]int
	refused map[int64]bool // the server itself answered UNAVAILABLE
}

func (p *proxied) remember(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c.RemoteAddr().String()] = c
}

func (p *proxied) refuse(id int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused[id] = true
}

func (p *proxied) done(id int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.effects[id]++
}

// cut breaks the proxy's connection on which a call came.
func (p *proxied) cut(ctx context.Context) {
	from, ok := peer.FromContext(ctx)
	if !ok {
		return
	}
	p.mu.Lock()
	c := p.conns[from.Addr.String()]
	p.mu.Unlock()
	if c != nil {
		_ = c.Close() // breaking it is all that is wanted
	}
}

// twice counts the calls whose effect happened more than once.
func (p *proxied) twice() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, times := range p.effects {
		if times > 1 {
			n++
		}
	}
	return n
}

// origins compares what the errors say about who answered with what happened. A
// call of one attempt is clear: the server refused it or the proxy did.
func (p *proxied) origins(t *tally) (right, judged int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, u := range t.users {
		var e *interceptors.CallError
		if !errors.As(u.error, &e) || len(e.Attempts()) != 1 {
			continue
		}
		judged++
		byServer := e.Attempts()[0].Origin == interceptors.OriginPeer
		if byServer == p.refused[u.id] {
			right++
		}
	}
	return right, judged
}

// tellingListener tells of each connection that it accepts.
type tellingListener struct {
	net.Listener

	tell func(net.Conn)
}

// Accept implements [net.Listener].
func (l tellingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.tell(c)
	}
	return c, err
}
