package main

import (
	"fmt"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

// The stacks that are compared.
const (
	stackNone       = "none"
	stackMiddleware = "middleware"
	stackBelay      = "belay"
	stackNoBreaker  = "belay-nobreaker"
)

var stackNames = []string{stackNone, stackMiddleware, stackBelay, stackNoBreaker}

// stack is what a service puts into its channels and its server to survive the
// failures of others.
type stack struct {
	dial  []grpc.DialOption
	serve []grpc.ServerOption

	// check is run after the services are registered and before they serve.
	check func(*grpc.Server) error
}

func newStack(name string) (stack, error) {
	switch name {
	case stackNone:
		return stack{check: unchecked}, nil
	case stackMiddleware:
		return middlewareStack(), nil
	case stackBelay:
		return belayStack()
	case stackNoBreaker:
		return belayStack(interceptors.WithoutBreaker())
	default:
		return stack{}, fmt.Errorf("stack %q: must be one of %q", name, stackNames)
	}
}

// belayStack is Belay in a service: one line for the channels that it calls
// through, one for the server that it is.
func belayStack(opts ...interceptors.ClientOption) (stack, error) {
	client, err := interceptors.NewClient(opts...)
	if err != nil {
		return stack{}, err
	}
	server, err := interceptors.NewServer(interceptors.WithIdempotency(
		idempotency.NewMemoryStore(idempotency.MemoryConfig{}),
		idempotency.Config{Scope: idempotency.SingleTenant}, // all callers belong together here
	))
	if err != nil {
		return stack{}, err
	}
	return stack{
		dial:  client.DialOptions(),
		serve: server.ServerOptions(), // interceptors of the service's own, such as authn, go in here
		check: func(s *grpc.Server) error { return server.Check(s) },
	}, nil
}

// middlewareStack is the usual advice: up to three attempts with a short
// jittered backoff, on the codes that the library takes for transient.
func middlewareStack() stack {
	return stack{
		dial: []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(
				retry.WithMax(3), // attempts, the first included
				retry.WithBackoff(retry.BackoffExponentialWithJitter(10*time.Millisecond, 0.5)),
				retry.WithCodes(retry.DefaultRetriableCodes...),
			)),
			// Streams get as many attempts as with Belay, over as long a time as a
			// ledger needs to be back: what is compared is what comes of a retry.
			grpc.WithChainStreamInterceptor(retry.StreamClientInterceptor(
				retry.WithMax(4),
				retry.WithBackoff(retry.BackoffExponentialWithJitter(100*time.Millisecond, 0.1)),
				retry.WithCodes(retry.DefaultRetriableCodes...),
			)),
		},
		check: unchecked,
	}
}

func unchecked(*grpc.Server) error { return nil }

// dialOptions are those of every channel, whatever the stack.
//
// gRPC's default waits a second before it connects again, and up to two
// minutes: longer than a user here waits at all, so that no stack could show
// how it takes a restart. Services on one network can afford to try sooner.
func dialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
	}
}
