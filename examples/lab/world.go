package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// world is where one cell runs: its servers and channels, over loopback or, in
// fake time, over memory.
type world struct {
	cell cell
	fake bool

	// watch, if not nil, returns what sees the calls of a hop of a chain, and what
	// sees the attempts that the stack makes of them.
	watch func(hop int) (calls, attempts grpc.UnaryClientInterceptor)

	// detached, if not 0, is the hop of a chain that forgets the context it was
	// called with.
	detached int

	// accepted, if not nil, is told of each connection that a server accepts.
	accepted func(net.Conn)

	cleanups []func() error
}

// buffer is small, because a thousand connections have four each.
const buffer = 4 << 10

func newWorld(c cell, fake bool) *world { return &world{cell: c, fake: fake} }

// random returns a source of random numbers: the same for the same purpose in
// the same repeat, so that all stacks meet the same arrivals and faults.
func (w *world) random(purpose uint64) *rand.Rand {
	return rand.New(rand.NewPCG(uint64(w.cell.Repeat)+1, purpose)) //nolint:gosec // a repeat's number; nothing here is a secret
}

// onClose runs f when the cell has ended, the last one first.
func (w *world) onClose(f func() error) { w.cleanups = append(w.cleanups, f) }

func (w *world) close() error {
	var errs []error
	for _, clean := range slices.Backward(w.cleanups) {
		errs = append(errs, clean())
	}
	return errors.Join(errs...)
}

// node is one server.
type node struct {
	connect func(context.Context) (net.Conn, error)
	address string // empty in memory
}

// serve starts a server that answers with handle.
func (w *world) serve(handle handler, opts ...grpc.ServerOption) (*node, error) {
	var listener net.Listener
	n := &node{}
	if w.fake {
		memory := bufconn.Listen(buffer)
		listener, n.connect = memory, memory.DialContext
	} else {
		var err error
		if listener, err = new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0"); err != nil {
			return nil, err
		}
		n.address = listener.Addr().String()
		n.connect = func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", n.address)
		}
	}
	if w.accepted != nil {
		listener = tellingListener{listener, w.accepted}
	}
	server := grpc.NewServer(append(opts, grpc.WaitForHandlers(true), grpc.ReadBufferSize(buffer), grpc.WriteBufferSize(buffer))...)
	probev1.RegisterProbeServiceServer(server, service{handle: handle})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	w.onClose(func() error {
		server.Stop()
		return <-served
	})
	return n, nil
}

// link is the way from one client to a node, which can be cut.
type link struct {
	node *node

	mu    sync.Mutex // guards all below
	down  bool
	conns map[net.Conn]struct{}
}

func (n *node) link() *link { return &link{node: n, conns: map[net.Conn]struct{}{}} }

// set takes the link down, with all its connections, or up.
func (l *link) set(down bool) {
	l.mu.Lock()
	l.down = down
	l.mu.Unlock()
	if down {
		l.cut()
	}
}

// cut breaks the connections that there are.
func (l *link) cut() {
	l.mu.Lock()
	open := make([]net.Conn, 0, len(l.conns))
	for c := range l.conns {
		open = append(open, c)
	}
	l.mu.Unlock()
	for _, c := range open {
		_ = c.Close() // breaking it is all that is wanted
	}
}

func (l *link) dial(ctx context.Context, _ string) (net.Conn, error) {
	refused := &net.OpError{Op: "dial", Net: "lab", Err: syscall.ECONNREFUSED}
	l.mu.Lock()
	down := l.down
	l.mu.Unlock()
	if down {
		return nil, refused
	}
	inner, err := l.node.connect(ctx)
	if err != nil {
		return nil, err
	}
	c := &linkConn{Conn: inner, link: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down { // while we dialled
		return nil, errors.Join(refused, inner.Close())
	}
	l.conns[c] = struct{}{}
	return c, nil
}

// linkConn is a connection that its link knows.
type linkConn struct {
	net.Conn

	link *link
}

// Close implements [net.Conn].
func (c *linkConn) Close() error {
	c.link.mu.Lock()
	delete(c.link.conns, c)
	c.link.mu.Unlock()
	return c.Conn.Close()
}

// channel opens a channel over a link.
func (w *world) channel(l *link, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("passthrough:///lab", append([]grpc.DialOption{
		grpc.WithContextDialer(l.dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithReadBufferSize(buffer), grpc.WithWriteBufferSize(buffer),
	}, opts...)...)
	if err != nil {
		return nil, err
	}
	w.onClose(conn.Close)
	return conn, nil
}

// handler is what a server does with a call. write tells the undeclared method
// from the one without side effects.
type handler func(ctx context.Context, req *probev1.Request, write bool) error

// service serves the two methods that the lab calls.
type service struct {
	probev1.UnimplementedProbeServiceServer

	handle handler
}

func (s service) Read(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	if err := s.handle(ctx, req, false); err != nil {
		return nil, err
	}
	return &probev1.Response{}, nil
}

func (s service) Undeclared(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	if err := s.handle(ctx, req, true); err != nil {
		return nil, err
	}
	return &probev1.Response{}, nil
}
