package main

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/failsafe-go/failsafe-go/hedgepolicy"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The stacks that are compared.
const (
	stackNone       = "none"
	stackMiddleware = "middleware"
	stackNative     = "native"
	stackFailsafe   = "failsafe"
	stackRatio      = "ratio10"
	stackBelay      = "belay"

	stackNoBreaker     = "belay-nobreaker"
	stackHedge         = "belay-hedge"
	stackLearn         = "belay-learn"
	stackFailsafeHedge = "failsafe-hedge"

	stackLearnNoBreaker = "belay-learn-nobreaker"

	// stackNativeOnBelay is a plain grpc-go client with its own retries and a
	// server that has Belay: what the server's bank does alone.
	stackNativeOnBelay = "native-to-belay"
)

// allStacks are all of them.
var allStacks = []string{
	stackNone, stackMiddleware, stackNative, stackFailsafe, stackRatio, stackBelay,
	stackNoBreaker, stackHedge, stackLearn, stackLearnNoBreaker, stackFailsafeHedge, stackNativeOnBelay,
}

// peers are what Belay is compared with everywhere.
var peers = []string{stackNone, stackMiddleware, stackNative, stackFailsafe, stackRatio}

// isBelay tells the rows that the bars are for.
func isBelay(stack string) bool {
	switch stack {
	case stackBelay, stackNoBreaker, stackHedge, stackLearn, stackLearnNoBreaker, stackNativeOnBelay:
		return true
	}
	return false
}

// backoffBase and backoffMax are the peers' first wait and longest wait, the
// same as Belay's defaults. How it is spread is each library's own.
const (
	backoffBase = 50 * time.Millisecond
	backoffMax  = time.Second
)

// stack is what one process puts into its channels and its server.
type stack struct {
	// dial returns the options of one more channel.
	dial  func() []grpc.DialOption
	serve []grpc.ServerOption

	client *interceptors.Client // nil without Belay
}

func newStack(name string) (*stack, error) {
	switch name {
	case stackNone:
		return &stack{dial: func() []grpc.DialOption { return []grpc.DialOption{grpc.WithDisableRetry()} }}, nil
	case stackMiddleware:
		return &stack{dial: middlewareOptions}, nil
	case stackNative:
		return &stack{dial: nativeOptions}, nil
	case stackFailsafe:
		return &stack{dial: failsafeOptions}, nil
	case stackFailsafeHedge:
		return &stack{dial: failsafeHedgeOptions}, nil
	case stackRatio:
		return &stack{dial: func() []grpc.DialOption { return unary(ratio10()) }}, nil
	case stackBelay:
		return belayStack()
	case stackNoBreaker:
		return belayStack(interceptors.WithoutBreaker())
	case stackHedge:
		return belayStack(interceptors.WithPolicy(policy.Policy{Hedge: policy.Hedge{Quantile: hedgeQuantile}}))
	case stackLearn:
		return belayStack(interceptors.WithPolicy(learn))
	case stackLearnNoBreaker:
		return belayStack(interceptors.WithPolicy(learn), interceptors.WithoutBreaker())
	case stackNativeOnBelay:
		s, err := belayStack()
		if err != nil {
			return nil, err
		}
		return &stack{dial: nativeOptions, serve: s.serve}, nil
	default:
		return nil, fmt.Errorf("stack %q: not known", name)
	}
}

func unary(i grpc.UnaryClientInterceptor) []grpc.DialOption {
	return []grpc.DialOption{grpc.WithDisableRetry(), grpc.WithChainUnaryInterceptor(i)}
}

// belayStack is Belay on both sides of a process: its defaults and, where an
// experiment is about a feature that is off by default, that one.
func belayStack(opts ...interceptors.ClientOption) (*stack, error) {
	// The same few lines from a thousand clients say nothing.
	quiet := interceptors.WithLogger(slog.New(slog.DiscardHandler))
	client, err := interceptors.NewClient(append([]interceptors.ClientOption{quiet}, opts...)...)
	if err != nil {
		return nil, err
	}
	server, err := interceptors.NewServer(quiet)
	if err != nil {
		return nil, err
	}
	return &stack{dial: client.DialOptions, serve: server.ServerOptions(), client: client}, nil
}

// middlewareOptions is go-grpc-middleware with the jitter of its own default.
func middlewareOptions() []grpc.DialOption {
	return unary(retry.UnaryClientInterceptor(
		retry.WithMax(3), // attempts, the first included
		retry.WithBackoff(retry.BackoffExponentialWithJitterBounded(backoffBase, 0.1, backoffMax)),
	))
}

// nativeConfig is gRPC's own retry, with the throttle that gRFC A6 gives as its
// example.
const nativeConfig = `{
	"methodConfig": [{"name": [{}], "retryPolicy": {
		"maxAttempts": 3, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 2,
		"retryableStatusCodes": ["UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"]}}],
	"retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}}`

func nativeOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeConfig)}
}

// failsafeOptions is failsafe-go's policy for gRPC (three attempts) with a
// backoff and with its default budget: a fifth of what is in flight, at least 3.
func failsafeOptions() []grpc.DialOption {
	return unary(failsafegrpc.NewUnaryClientInterceptor(
		failsafegrpc.NewRetryPolicyBuilder[*probev1.Response]().
			WithBackoff(backoffBase, backoffMax).WithJitterFactor(0.1).
			WithBudget(budget.New()).Build()))
}

// hedgeQuantile is from where an attempt counts as slow, for all who hedge.
const hedgeQuantile = 0.98

func failsafeHedgeOptions() []grpc.DialOption {
	return unary(failsafegrpc.NewUnaryClientInterceptor(
		hedgepolicy.NewBuilderWithDelayQuantile[*probev1.Response](hedgeQuantile, 1000, 100).
			WithBudget(budget.New()).Build()))
}

// learn refuses an attempt with less than one chance in twenty to end in time,
// and sends deadlines that end before the caller's.
var learn = policy.Policy{Learn: policy.Learn{MinChance: 0.05, ShortenDeadline: true}}
