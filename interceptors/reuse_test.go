package interceptors_test

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The record of a call is used again, what its attempts write to is not: an inner
// interceptor that kept the options of an earlier call, and uses them once more,
// says nothing about this one.
func TestOptionsOfAnEndedCallAreItsOwn(t *testing.T) {
	client, err := interceptors.NewClient(interceptors.WithPolicy(casePolicy()))
	if err != nil {
		t.Fatal(err)
	}
	conn := unconnected(t)
	call := func(invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		return client.Unary()(t.Context(), probe.Undeclared, &probev1.Request{}, &probev1.Response{}, conn, invoke, opts...)
	}

	var kept []grpc.CallOption
	if err := call(func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
		kept = opts
		return nil
	}); err != nil {
		t.Fatal(err)
	}

	// Answered by the interceptor itself. Had gRPC finished it without a peer, it
	// would be one that was never sent, and made again.
	attempts := 0
	var trailer metadata.MD
	err = call(func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
		attempts++
		for _, o := range kept {
			switch o := o.(type) {
			case grpc.OnFinishCallOption:
				o.OnFinish(nil)
			case grpc.TrailerCallOption:
				*o.TrailerAddr = metadata.Pairs(pushbackKey, "1")
			}
		}
		return status.Error(codes.Unavailable, "not now")
	}, grpc.Trailer(&trailer))
	if status.Code(err) != codes.Unavailable || attempts != 1 || len(trailer) != 0 {
		t.Errorf("%v after %d attempts, trailer %v: of a call that was not sent again nothing may show", err, attempts, trailer)
	}
}

// Nothing of an earlier call is left in the record that the next one is given:
// neither what its options said nor what became of it.
func TestNothingIsLeftOfAnEarlierCall(t *testing.T) {
	client, err := interceptors.NewClient(interceptors.WithPolicy(casePolicy()), interceptors.WithBudget(plenty()))
	if err != nil {
		t.Fatal(err)
	}
	conn := unconnected(t)
	var header metadata.MD
	finished := 0
	said := [][]grpc.CallOption{
		{interceptors.NoRetry()},
		{interceptors.Override(policy.Policy{MaxAttempts: 1})},
		{interceptors.Override(policy.Policy{Timeout: 1 << 40, AttemptTimeout: 1 << 40})},
		{grpc.Header(&header), grpc.OnFinish(func(error) { finished++ })},
		{grpc.StaticMethod(), grpc.WaitForReady(true), grpc.CallContentSubtype("x")},
	}
	for i, opts := range said {
		for _, fails := range []int{0, 1} {
			made := 0
			if err := client.Unary()(t.Context(), probe.Idempotent, &probev1.Request{}, &probev1.Response{}, conn,
				func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil },
				opts...); err != nil {
				t.Fatal(err)
			}
			finished = 0
			err := client.Unary()(t.Context(), probe.Idempotent, &probev1.Request{}, &probev1.Response{}, conn,
				func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
					made++
					if _, has := ctx.Deadline(); has {
						t.Errorf("%d: a deadline that nobody has set", i)
					}
					if len(opts) != 4 {
						t.Errorf("%d: %d options for the attempt, want Belay's 4", i, len(opts))
					}
					if made <= fails {
						return status.Error(codes.Unavailable, "not now")
					}
					return nil
				})
			if err != nil || made != fails+1 || finished != 0 {
				t.Errorf("%d: %v after %d attempts and %d OnFinish, want %d and 0", i, err, made, finished, fails+1)
			}
		}
	}
}
