package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	failsafebudget "github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/failsafe-go/failsafe-go/timeout"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	sony "github.com/sony/gobreaker/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	adapter "github.com/belayrpc/belay/examples/gobreaker"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The client races call an interceptor over an invoker that does nothing, so
// that the interceptor is all there is. The call is what a generated stub makes
// of it: a deadline in the context and one call option.

const (
	method  = probev1.ProbeService_Idempotent_FullMethodName
	service = "belay.probe.v1.ProbeService"
)

func clientRaces() []race {
	return []race{
		{what: "client-unary", name: "success", base: bare, contestants: []contestant{
			{bare, calls(noInterceptor, succeeds, nil)},
			{belay, calls(belayUnary(defaults), succeeds, nil)},
			{middleware, calls(middlewareUnary(), succeeds, nil)},
			{failsafe, calls(failsafeUnary(), succeeds, nil)},
			{gobreaker, calls(gobreakerUnary(closed), succeeds, nil)},
			{adapted, calls(belayUnary(withGobreaker), succeeds, nil)},
		}},
		{what: "client-unary", name: "refusal", base: bare, contestants: []contestant{
			{bare, calls(noInterceptor, succeeds, nil)},
			{belay, calls(belayRefusing, fails, isUnavailable)},
			{failsafe, calls(failsafeRefusing, fails, anyError)},
			{gobreaker, calls(gobreakerUnary(open), fails, anyError)},
		}},
		{what: "client-unary", name: "two-failures", base: bare, contestants: []contestant{
			{bare, calls(noInterceptor, succeeds, nil)},
			{belay, calls(belayUnary(withoutDelay), failsTwice, nil)},
			{middleware, calls(middlewareUnary(retry.WithBackoff(noBackoff)), failsTwice, nil)},
			{failsafe, calls(failsafeTolerant, failsTwice, nil)},
		}},
		{what: "client-unary-attempt-timeout", name: "success", base: bare, contestants: []contestant{
			{bare, calls(noInterceptor, succeeds, nil)},
			{belay, calls(belayUnary(withAttemptTimeout), succeeds, nil)},
			{middleware, calls(middlewareUnary(retry.WithPerRetryTimeout(attemptTimeout)), succeeds, nil)},
			{failsafe, calls(failsafeWithTimeout, succeeds, nil)},
		}},
	}
}

const attemptTimeout = time.Second

// interceptor makes what a contestant is about. Calls go through cc, which has
// no server and is never connected.
type interceptor func(cc *grpc.ClientConn) (grpc.UnaryClientInterceptor, error)

// calls is a subject that makes unary calls. expected, where it is not nil, says
// whether a call's error is the one that the race is about.
func calls(build interceptor, invoker func() grpc.UnaryInvoker, expected func(error) bool) func() (subject, error) {
	return func() (subject, error) {
		cc, err := grpc.NewClient("passthrough:///bench", grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return subject{}, err
		}
		through, err := build(cc)
		if err != nil {
			return subject{}, errors.Join(err, cc.Close())
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		return subject{
			worker: func() worker { return caller(ctx, through, cc, invoker(), expected) },
			close: func() error {
				cancel()
				return cc.Close()
			},
		}, nil
	}
}

func caller(ctx context.Context, through grpc.UnaryClientInterceptor, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, expected func(error) bool) worker {
	opts := []grpc.CallOption{grpc.StaticMethod()}
	req, reply := &probev1.Request{Text: "hello"}, &probev1.Response{}
	return func(n int) error {
		for range n {
			err := through(ctx, method, req, reply, cc, invoke, opts...)
			if (expected == nil) != (err == nil) || err != nil && !expected(err) {
				return fmt.Errorf("unexpected result of a call: %w", err)
			}
		}
		return nil
	}
}

func isUnavailable(err error) bool { return status.Code(err) == codes.Unavailable }
func anyError(error) bool          { return true }

// The invokers. Each goroutine has its own.

func succeeds() grpc.UnaryInvoker {
	return func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil }
}

var errUnavailable = status.Error(codes.Unavailable, "down")

// fails is for calls that are refused before it.
func fails() grpc.UnaryInvoker {
	return func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
		return errUnavailable
	}
}

func failsTwice() grpc.UnaryInvoker {
	n := 0
	return func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
		if n++; n%3 != 0 {
			return errUnavailable
		}
		return nil
	}
}

func noInterceptor(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		return invoke(ctx, method, req, reply, cc, opts...)
	}, nil
}

// Belay's contestants.

// options are a Client's, made anew for each: banks and breakers have state.
type options func() ([]interceptors.ClientOption, error)

func defaults() ([]interceptors.ClientOption, error) { return nil, nil }

func belayUnary(opts options) interceptor {
	return func(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
		o, err := opts()
		if err != nil {
			return nil, err
		}
		client, err := interceptors.NewClient(o...)
		if err != nil {
			return nil, err
		}
		return client.Unary(), nil
	}
}

func withGobreaker() ([]interceptors.ClientOption, error) {
	breakers, err := adapter.New(gobreakerSettings())
	if err != nil {
		return nil, err
	}
	return []interceptors.ClientOption{interceptors.WithOwnBreaker(breakers)}, nil
}

func withAttemptTimeout() ([]interceptors.ClientOption, error) {
	return []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{AttemptTimeout: attemptTimeout})}, nil
}

// belayRefusing has a breaker that a person has opened.
func belayRefusing(cc *grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
	client, err := interceptors.NewClient()
	if err != nil {
		return nil, err
	}
	client.Breaker(cc, service).ForceOpen()
	return client.Unary(), nil
}

// withoutDelay retries at once, from a bank that such a race cannot empty (each
// of its calls has a retry that fails) and with a tolerant breaker.
func withoutDelay() ([]interceptors.ClientOption, error) {
	return []interceptors.ClientOption{
		interceptors.WithBudget(budget.New(budget.Config{Initial: 1e9})),
		interceptors.WithBreaker(breaker.Config{FailureRate: tolerantRate, MinCalls: tolerantCalls}),
		interceptors.WithPolicy(policy.Policy{Backoff: policy.Backoff{Base: 1, Max: 1}}),
	}, nil
}

// The peers' contestants.

func middlewareUnary(more ...retry.CallOption) interceptor {
	return func(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
		return retry.UnaryClientInterceptor(middlewareOptions(more...)...), nil
	}
}

func noBackoff(context.Context, uint) time.Duration { return 0 }

func failsafeUnary() interceptor {
	return func(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
		return failsafegrpc.NewUnaryClientInterceptor(failsafeRetry(wideBudget()), failsafeBreaker(breakerRate, breakerCalls)), nil
	}
}

func failsafeTolerant(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
	return failsafegrpc.NewUnaryClientInterceptor(failsafeRetry(wideBudget()), failsafeBreaker(tolerantRate, tolerantCalls)), nil
}

// wideBudget is failsafe-go's budget, with room: its share is of what runs at
// the same moment, which 64 calls that fail in step exceed at once.
func wideBudget() failsafebudget.Budget { return failsafebudget.NewBuilder().WithMaxRate(1).Build() }

func failsafeRefusing(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
	cb := failsafeBreaker(breakerRate, breakerCalls)
	cb.Open()
	return failsafegrpc.NewUnaryClientInterceptor(failsafeRetry(wideBudget()), cb), nil
}

// failsafeWithTimeout bounds the attempt on this side only: failsafe-go's
// timeout does not become a deadline on the wire.
func failsafeWithTimeout(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
	return failsafegrpc.NewUnaryClientInterceptor(failsafeRetry(wideBudget()), failsafeBreaker(breakerRate, breakerCalls),
		timeout.New[*probev1.Response](attemptTimeout)), nil
}

// gobreakerUnary is how programs put gobreaker around calls: it has no
// interceptor of its own.
func gobreakerUnary(prepare func(*sony.CircuitBreaker[struct{}])) interceptor {
	return func(*grpc.ClientConn) (grpc.UnaryClientInterceptor, error) {
		cb := sony.NewCircuitBreaker[struct{}](gobreakerSettings())
		prepare(cb)
		return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			_, err := cb.Execute(func() (struct{}, error) {
				return struct{}{}, invoke(ctx, method, req, reply, cc, opts...)
			})
			return err
		}, nil
	}
}

func closed(*sony.CircuitBreaker[struct{}]) {}

// open fails calls until the breaker opens, as it has no other way to.
func open(cb *sony.CircuitBreaker[struct{}]) {
	for cb.State() != sony.StateOpen {
		_, _ = cb.Execute(func() (struct{}, error) { return struct{}{}, errUnavailable }) // the error is ours
	}
}
