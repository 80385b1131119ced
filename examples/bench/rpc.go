package main

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The rpc races make real calls over loopback TCP. Belay is on both sides; the
// peers have a client side only.

func rpcRaces() []race {
	return []race{
		{what: "rpc", name: "success", base: bare, contestants: []contestant{
			{bare, rpcs(withoutSuite, callIdempotent)},
			{belay, rpcs(belaySuite, callIdempotent)},
			{middleware, rpcs(middlewareSuite, callIdempotent)},
			{failsafe, rpcs(failsafeSuite, callIdempotent)},
		}},
		{what: "rpc", name: "keyed", base: bare, contestants: []contestant{
			{bare, rpcs(withoutSuite, callKeyed)},
			{belay, rpcs(belaySuite, callKeyed)},
		}},
	}
}

// suite is what is put into a client and a server.
type suite func() ([]grpc.DialOption, []grpc.ServerOption, error)

func withoutSuite() ([]grpc.DialOption, []grpc.ServerOption, error) { return nil, nil, nil }

func belaySuite() ([]grpc.DialOption, []grpc.ServerOption, error) {
	client, err := interceptors.NewClient()
	if err != nil {
		return nil, nil, err
	}
	server, err := newDedupeServer()
	if err != nil {
		return nil, nil, err
	}
	return client.DialOptions(), server.ServerOptions(), nil
}

// newDedupeServer has a store that a run cannot fill: it keeps every key for
// ten minutes.
func newDedupeServer() (*interceptors.Server, error) {
	store := idempotency.NewMemoryStore(idempotency.MemoryConfig{MaxBytes: 8 << 30})
	return interceptors.NewServer(interceptors.WithIdempotency(store, idempotency.Config{Scope: idempotency.SingleTenant}))
}

func middlewareSuite() ([]grpc.DialOption, []grpc.ServerOption, error) {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(middlewareOptions()...)),
		grpc.WithChainStreamInterceptor(retry.StreamClientInterceptor(middlewareOptions()...)),
	}, nil, nil
}

func failsafeSuite() ([]grpc.DialOption, []grpc.ServerOption, error) {
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(
		failsafegrpc.NewUnaryClientInterceptor(failsafeRetry(wideBudget()), failsafeBreaker(breakerRate, breakerCalls)),
	)}, nil, nil
}

// loop makes n calls, or receives n messages, with one client.
type loop func(client probev1.ProbeServiceClient, n int) error

func callIdempotent(client probev1.ProbeServiceClient, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	req := &probev1.Request{Text: "hello"}
	for range n {
		if _, err := client.Idempotent(ctx, req); err != nil {
			return err
		}
	}
	return nil
}

func callKeyed(client probev1.ProbeServiceClient, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	req := &probev1.Request{Text: "hello", Number: 1}
	for range n {
		if _, err := client.Keyed(ctx, req); err != nil {
			return err
		}
	}
	return nil
}

// rpcs is a subject with a server of its own.
func rpcs(with suite, calls loop) func() (subject, error) {
	return func() (subject, error) {
		dial, serve, err := with()
		if err != nil {
			return subject{}, err
		}
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			return subject{}, err
		}
		server := grpc.NewServer(serve...)
		probev1.RegisterProbeServiceServer(server, echo{})
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()

		dial = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, dial...)
		cc, err := grpc.NewClient(listener.Addr().String(), dial...)
		stop := func() error {
			server.Stop()
			return <-served
		}
		if err != nil {
			return subject{}, errors.Join(err, stop())
		}
		client := probev1.NewProbeServiceClient(cc)
		return subject{
			worker: func() worker { return func(n int) error { return calls(client, n) } },
			close:  func() error { return errors.Join(cc.Close(), stop()) },
		}, nil
	}
}

// echo is a service that does next to nothing.
type echo struct {
	probev1.UnimplementedProbeServiceServer
}

// Idempotent answers with the request's text.
func (echo) Idempotent(_ context.Context, req *probev1.Request) (*probev1.Response, error) {
	return &probev1.Response{Text: req.GetText()}, nil
}

// Keyed answers with the request's text.
func (echo) Keyed(_ context.Context, req *probev1.Request) (*probev1.Response, error) {
	return &probev1.Response{Text: req.GetText()}, nil
}

// ServerStream sends as many messages as the request's number says.
func (echo) ServerStream(req *probev1.Request, stream grpc.ServerStreamingServer[probev1.Response]) error {
	msg := &probev1.Response{Text: req.GetText()}
	for range req.GetNumber() {
		if err := stream.Send(msg); err != nil {
			return err
		}
	}
	return nil
}
