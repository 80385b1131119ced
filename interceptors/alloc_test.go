package interceptors_test

import (
	"context"
	"math"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// What a call that succeeds at once may allocate: the client's half by itself
// over an invoker that does nothing, as a generated stub would call it.
func TestClientAllocations(t *testing.T) {
	rows := []struct {
		name string
		opts []interceptors.ClientOption
		most float64
	}{
		{"defaults", nil, 3},
		{"no_breaker", []interceptors.ClientOption{interceptors.WithoutBreaker()}, 3},
		{"rules", []interceptors.ClientOption{interceptors.WithRule("*", policy.Policy{MaxAttempts: 2})}, 3},
		{
			"attempt_timeout",
			[]interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{AttemptTimeout: time.Second})},
			7,
		},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			call, invoked := idleCall(t, row.opts...)
			const runs = 1000
			allocs := testing.AllocsPerRun(runs, call)
			if *invoked != runs+1 { // AllocsPerRun warms up with one
				t.Errorf("%d attempts for %d calls", *invoked, runs+1)
			}
			if !raceEnabled && allocs > row.most {
				t.Errorf("%v allocations, want at most %v", allocs, row.most)
			}
		})
	}
}

// What a call leaves to be collected is what gRPC writes to, 176 bytes, and the
// function for OnFinish, 16. Its own record is used again.
func TestClientBytes(t *testing.T) {
	const most = 176 + 16 + 8 // the 8 for records that a collection took from their pool
	call, _ := idleCall(t)
	result := testing.Benchmark(func(b *testing.B) {
		b.Helper()
		for b.Loop() {
			call()
		}
	})
	if got := result.AllocedBytesPerOp(); !raceEnabled && got > most {
		t.Errorf("%d bytes for a call, want at most %d", got, most)
	}
}

// idleCall returns a unary call over an invoker that does nothing, and how often
// that was invoked.
func idleCall(t *testing.T, clientOpts ...interceptors.ClientOption) (once func(), invoked *int) {
	t.Helper()
	client, err := interceptors.NewClient(clientOpts...)
	if err != nil {
		t.Fatal(err)
	}
	call, conn := client.Unary(), unconnected(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	t.Cleanup(cancel)
	req, reply, opts := &probev1.Request{}, &probev1.Response{}, []grpc.CallOption{grpc.StaticMethod()}
	invoked = new(int)
	invoke := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { //nolint:unparam // it is gRPC's type
		*invoked++
		return nil
	}
	return func() {
		if err := call(ctx, probe.Idempotent, req, reply, conn, invoke, opts...); err != nil {
			t.Error(err)
		}
	}, invoked
}

// What both halves together add to a real call.
func TestBothSidesAllocations(t *testing.T) {
	const most = 20
	bare := probeCall(t)
	belay := probeCall(t, bothSides(t)...)

	// Connections and the runtime allocate too, now and then: never less than the
	// call does, so the least of several is the call's.
	without, with := math.Inf(1), math.Inf(1)
	for range 5 {
		without = min(without, testing.AllocsPerRun(200, bare))
		with = min(with, testing.AllocsPerRun(200, belay))
	}
	t.Logf("%v allocations with Belay, %v without", with, without)
	if !raceEnabled && with-without > most {
		t.Errorf("%v allocations over a bare call's %v, want at most %v", with-without, without, most)
	}
}

func bothSides(t *testing.T) []probe.Option {
	t.Helper()
	client, err := interceptors.NewClient()
	if err != nil {
		t.Fatal(err)
	}
	server, err := interceptors.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	return []probe.Option{
		probe.DialOptions(client.DialOptions()...),
		probe.ServerOptions(server.ServerOptions()...),
	}
}

// probeCall returns one real unary call to a server of its own.
func probeCall(t *testing.T, opts ...probe.Option) func() {
	t.Helper()
	conn, _ := probe.Start(t, opts...)
	stub := probev1.NewProbeServiceClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	t.Cleanup(cancel)
	req := &probev1.Request{Text: "hello"}
	return func() {
		if _, err := stub.Idempotent(ctx, req); err != nil {
			t.Error(err)
		}
	}
}

// A message of a stream that the application has begun to read costs nothing.
func TestCommittedStreamAllocations(t *testing.T) {
	client, err := interceptors.NewClient()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	desc := &grpc.StreamDesc{StreamName: "ServerStream", ServerStreams: true}
	stream, err := client.Stream()(ctx, desc, unconnected(t), probe.ServerStream,
		func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
			return endlessStream{ctx}, nil
		})
	if err != nil {
		t.Fatal(err)
	}
	msg := &probev1.Response{}
	if err := stream.RecvMsg(msg); err != nil { // commits
		t.Fatal(err)
	}
	allocs := testing.AllocsPerRun(1000, func() {
		if err := stream.RecvMsg(msg); err != nil {
			t.Error(err)
		}
	})
	if !raceEnabled && allocs != 0 {
		t.Errorf("%v allocations a message, want 0", allocs)
	}
}

// endlessStream is a stream of empty messages.
type endlessStream struct {
	ctx context.Context //nolint:containedctx // gRPC's interface has it so
}

func (endlessStream) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (endlessStream) Trailer() metadata.MD         { return nil }
func (endlessStream) CloseSend() error             { return nil }
func (s endlessStream) Context() context.Context   { return s.ctx }
func (endlessStream) SendMsg(any) error            { return nil }
func (endlessStream) RecvMsg(any) error            { return nil }

// unconnected returns a real channel that never connects.
func unconnected(t *testing.T) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///nowhere", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}
