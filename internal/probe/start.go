package probe

import (
	"errors"
	"testing"

	"google.golang.org/grpc"
)

// Option changes what [Start] starts.
type Option interface {
	apply(set *setup)
}

type setup struct {
	server     *Server
	network    *Network
	serverOpts []grpc.ServerOption
	dialOpts   []grpc.DialOption
	registered []func(*grpc.Server)
}

type option func(*setup)

func (o option) apply(set *setup) { o(set) }

// ServerOptions adds options of the grpc server. Interceptors among them must
// be chained ones: grpc puts a plain UnaryInterceptor before the probe's own,
// which then are no longer outermost.
func ServerOptions(opts ...grpc.ServerOption) Option {
	return option(func(set *setup) { set.serverOpts = append(set.serverOpts, opts...) })
}

// DialOptions adds options of the channel that [Start] returns.
func DialOptions(opts ...grpc.DialOption) Option {
	return option(func(set *setup) { set.dialOpts = append(set.dialOpts, opts...) })
}

// On starts the server on a network of the caller's: to cut it off, or to open
// more channels to it. One server per network.
func On(network *Network) Option {
	return option(func(set *setup) { set.network = network })
}

// Using serves a scripted service that exists already. Two [Start] with one
// service are two processes that share what they count.
func Using(server *Server) Option {
	return option(func(set *setup) { set.server = server })
}

// Registered calls fn after the probe's services are registered and before the
// server serves: the time for further services and for checks of all of them.
func Registered(fn func(*grpc.Server)) Option {
	return option(func(set *setup) { set.registered = append(set.registered, fn) })
}

// Start runs the probe behind a real grpc server on an in-memory network and
// returns a channel to it and its script. All of it ends with the test, in this
// order: the channels, the server, the handlers that still run. In a
// testing/synctest bubble, call it inside.
//
// A panic that reaches the outermost interceptor becomes INTERNAL. One that no
// step has scripted also fails the test.
func Start(tb testing.TB, opts ...Option) (*grpc.ClientConn, *Server) {
	tb.Helper()
	set := new(setup)
	for _, o := range opts {
		o.apply(set)
	}
	if set.server == nil {
		set.server = NewServer()
	}
	if set.network == nil {
		set.network = NewNetwork()
	}

	seen := new(panics)
	serverOpts := append(seen.serverOptions(), LoseReplies()...)
	serverOpts = append(serverOpts, set.serverOpts...)
	// So that Stop returns only when the handlers have: a bubble, and a leak
	// check, must not find one still on its way out.
	serverOpts = append(serverOpts, grpc.WaitForHandlers(true))
	server := grpc.NewServer(serverOpts...)
	set.server.Register(server)
	for _, fn := range set.registered {
		fn(server)
	}

	served := make(chan error, 1)
	go func() { served <- server.Serve(set.network.listener) }()
	tb.Cleanup(func() {
		server.Stop()
		// A test that ends before Serve has begun is no fault of the server's.
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			tb.Errorf("probe: serve: %v", err)
		}
		if n := set.server.scripted.Total(); len(seen.all()) > n {
			tb.Errorf("probe: panics reached the server's edge, %d of them scripted: %v", n, seen.all())
		}
	})
	// Registered after the server's cleanup, so that it runs before: the channel
	// closes first, or it would try to reconnect to a server that has gone.
	return set.network.Dial(tb, set.dialOpts...), set.server
}
