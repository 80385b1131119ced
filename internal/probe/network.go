package probe

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
)

// bufferSize is what one direction of a connection holds before its writer
// waits: the HTTP/2 window's size, so that flow control is gRPC's, not ours.
const bufferSize = 64 << 10

// Network is an in-memory network with one server on it, which can be cut off.
// Make one with [NewNetwork], inside the synctest bubble if there is one, and
// give it to [Start] with [On]. Safe for concurrent use.
type Network struct {
	listener *bufconn.Listener

	mu    sync.Mutex
	down  bool
	conns map[*trackedConn]struct{} // open client ends
}

// NewNetwork returns a network that is up.
func NewNetwork() *Network {
	return &Network{listener: bufconn.Listen(bufferSize), conns: map[*trackedConn]struct{}{}}
}

// Down cuts every connection and refuses new ones until [Network.Up], as a
// host does whose process has died.
func (n *Network) Down() {
	n.mu.Lock()
	n.down = true
	n.mu.Unlock()
	n.Cut()
}

// Up lets connections be made again. The server was there all the time; the
// client comes back after its own reconnect backoff.
func (n *Network) Up() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down = false
}

// Cut breaks every connection there is. New ones can be made at once.
func (n *Network) Cut() {
	n.mu.Lock()
	open := make([]*trackedConn, 0, len(n.conns))
	for c := range n.conns {
		open = append(open, c)
	}
	n.mu.Unlock()
	for _, c := range open {
		_ = c.Close() // an in-memory connection closes without error
	}
}

// Dial opens one more channel to the server, closed with the test.
func (n *Network) Dial(tb testing.TB, opts ...grpc.DialOption) *grpc.ClientConn {
	tb.Helper()
	opts = append([]grpc.DialOption{
		grpc.WithContextDialer(n.connect),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
	}, opts...)
	conn, err := grpc.NewClient("passthrough:///probe", opts...)
	if err != nil {
		tb.Fatalf("probe: dial: %v", err)
	}
	tb.Cleanup(func() {
		_ = conn.Close() // fails only when the test has closed it already
	})
	return conn
}

func (n *Network) connect(ctx context.Context, _ string) (net.Conn, error) {
	n.mu.Lock()
	down := n.down
	n.mu.Unlock()
	if down {
		return nil, &net.OpError{Op: "dial", Net: "probe", Err: syscall.ECONNREFUSED}
	}
	inner, err := n.listener.DialContext(ctx)
	if err != nil {
		return nil, err
	}
	c := &trackedConn{Conn: inner, network: n}
	n.mu.Lock()
	defer n.mu.Unlock()
	// Down may have come while we were dialling: it has not seen this one.
	if n.down {
		return nil, errors.Join(&net.OpError{Op: "dial", Net: "probe", Err: syscall.ECONNREFUSED}, inner.Close())
	}
	n.conns[c] = struct{}{}
	return c, nil
}

// trackedConn is the client's end of a connection, known to its network.
type trackedConn struct {
	net.Conn

	network *Network
}

// Close implements [net.Conn].
func (c *trackedConn) Close() error {
	c.network.mu.Lock()
	delete(c.network.conns, c)
	c.network.mu.Unlock()
	return c.Conn.Close()
}
