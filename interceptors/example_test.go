package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// serve runs a scripted service on an in-memory network for the examples, which
// would have net.Listen and a service of their own.
func serve(opts ...grpc.ServerOption) (service *probe.Server, dial func(...grpc.DialOption) probev1.ProbeServiceClient, stop func()) {
	listener := bufconn.Listen(64 << 10)
	service = probe.NewServer()
	server := grpc.NewServer(append(probe.LoseReplies(), opts...)...)
	service.Register(server)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(listener); err != nil {
			log.Print(err)
		}
	}()

	var conns []*grpc.ClientConn
	dial = func(opts ...grpc.DialOption) probev1.ProbeServiceClient {
		conn, err := grpc.NewClient("passthrough:///example", append(opts,
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
		if err != nil {
			log.Panic(err)
		}
		conns = append(conns, conn)
		return probev1.NewProbeServiceClient(conn)
	}
	stop = func() {
		for _, c := range conns {
			if err := c.Close(); err != nil {
				log.Print(err)
			}
		}
		server.Stop()
		<-done
	}
	return service, dial, stop
}

// One line on the client: a method whose .proto declares that it changes
// nothing is tried again when the server is unavailable.
func ExampleNewClient() {
	service, dial, stop := serve()
	defer stop()
	service.Script(probe.Read, probe.Step{Code: codes.Unavailable}) // once, then all is well

	client, err := interceptors.NewClient()
	if err != nil {
		log.Panic(err)
	}
	stub := dial(client.DialOptions()...)

	resp, err := stub.Read(context.Background(), &probev1.Request{Text: "hello"})
	fmt.Println(resp.GetText(), err, "after", service.Hits(probe.Read), "tries")
	// Output:
	// hello <nil> after 2 tries
}

// One line on the server: a method whose .proto requires an idempotency key has
// its effect once, although the first reply is lost and the client tries again.
func ExampleNewServer() {
	server, err := interceptors.NewServer(
		interceptors.WithIdempotency(
			idempotency.NewMemoryStore(idempotency.MemoryConfig{}),
			idempotency.Config{Scope: idempotency.SingleTenant},
		),
	)
	if err != nil {
		log.Panic(err)
	}
	service, dial, stop := serve(server.ServerOptions()...)
	defer stop()
	service.Script(probe.Keyed, probe.Step{LoseReply: true})

	client, err := interceptors.NewClient()
	if err != nil {
		log.Panic(err)
	}
	stub := dial(client.DialOptions()...)

	var trailer metadata.MD
	_, err = stub.Keyed(context.Background(), &probev1.Request{Text: "pay"}, grpc.Trailer(&trailer))
	fmt.Println(err, service.Effects(probe.Keyed), "effect,", trailer.Get(interceptors.MetadataStatus)[0])
	// Output:
	// <nil> 1 effect, replayed
}

// What a caller can find out about a call that failed.
func ExampleCallError() {
	service, dial, stop := serve()
	defer stop()
	service.Default(probe.Step{Code: codes.Unavailable, Message: "no backend"})

	client, err := interceptors.NewClient(interceptors.WithPolicy(policy.Policy{
		MaxAttempts: 3, Backoff: policy.Backoff{Base: time.Millisecond},
	}))
	if err != nil {
		log.Panic(err)
	}
	stub := dial(client.DialOptions()...)
	_, err = stub.Read(context.Background(), &probev1.Request{})

	fmt.Println(status.Code(err), status.Convert(err).Message())
	if ce, ok := errors.AsType[*interceptors.CallError](err); ok {
		fmt.Println("stopped:", ce.Stop(), "attempts:", len(ce.Attempts()), "effect:", ce.Executed())
	}
	// Output:
	// Unavailable no backend
	// stopped: exhausted attempts: 3 effect: maybe
}

// A handler that knows when it will be well again says so, and clients in any
// language wait for that long.
func ExampleRetryAfter() {
	server, err := interceptors.NewServer()
	if err != nil {
		log.Panic(err)
	}
	service, dial, stop := serve(server.ServerOptions()...)
	defer stop()
	service.Script(probe.Read, probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
		return nil, interceptors.RetryAfter(status.Error(codes.Unavailable, "warming up"), 150*time.Millisecond)
	}})

	client, err := interceptors.NewClient()
	if err != nil {
		log.Panic(err)
	}
	stub := dial(client.DialOptions()...)
	_, err = stub.Read(context.Background(), &probev1.Request{})

	tries := service.Seen(probe.Read)
	fmt.Println(err, tries[1].When.Sub(tries[0].When) >= 150*time.Millisecond)
	// Output:
	// <nil> true
}

// Why is this call not tried again? Explain knows without making it.
func ExampleClient_Explain() {
	client, err := interceptors.NewClient(interceptors.WithRule("belay.probe.v1.ProbeService/*", policy.Policy{MaxAttempts: 2}))
	if err != nil {
		log.Panic(err)
	}
	for _, method := range []string{"belay.probe.v1.ProbeService/Read", "belay.probe.v1.ProbeService/Undeclared"} {
		e := client.Explain(nil, method)
		fmt.Printf("%s: %s, from %s\n", e.Method, e.Class, e.ClassSource)
		for _, f := range e.Fields {
			if f.Name == "MaxAttempts" {
				fmt.Printf("  %s %s, from %s\n", f.Name, f.Value, f.Source)
			}
		}
		for _, v := range e.Verdicts {
			if v.Code == codes.Unavailable {
				fmt.Printf("  %v: sent %s, never sent %s\n", v.Code, v.Sent, v.NotSent)
			}
		}
	}
	// Output:
	// /belay.probe.v1.ProbeService/Read: no_side_effects, from idempotency_level
	//   MaxAttempts 2, from WithRule("belay.probe.v1.ProbeService/*")
	//   Unavailable: sent retry, never sent retry
	// /belay.probe.v1.ProbeService/Undeclared: undeclared, from nothing is declared
	//   MaxAttempts 2, from WithRule("belay.probe.v1.ProbeService/*")
	//   Unavailable: sent not_declared, never sent retry
}

// A program that must not pay twice, not even after its own crash, stores the
// key before it calls and uses it again afterwards.
func ExampleWithKey() {
	server, err := interceptors.NewServer(
		interceptors.WithIdempotency(
			idempotency.NewMemoryStore(idempotency.MemoryConfig{}),
			idempotency.Config{Scope: idempotency.SingleTenant},
		),
	)
	if err != nil {
		log.Panic(err)
	}
	service, dial, stop := serve(server.ServerOptions()...)
	defer stop()
	client, err := interceptors.NewClient()
	if err != nil {
		log.Panic(err)
	}
	stub := dial(client.DialOptions()...)

	stored, err := idempotency.NewKey().MarshalText() // into the order's row, say
	if err != nil {
		log.Panic(err)
	}
	for range 2 { // before the crash, and after it
		var key idempotency.Key
		if err := key.UnmarshalText(stored); err != nil {
			log.Panic(err)
		}
		if _, err := stub.Keyed(context.Background(), &probev1.Request{Text: "pay"}, interceptors.WithKey(key)); err != nil {
			log.Panic(err)
		}
	}
	fmt.Println(service.Effects(probe.Keyed), "payment")
	// Output:
	// 1 payment
}
