package probe_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

var unaryMethods = []string{
	probe.Undeclared, probe.Read, probe.Idempotent,
	probe.Keyed, probe.KeyedOptional, probe.KeyedField,
	probe.Inherits, probe.Reads, probe.Exempt,
}

func TestUnaryAnswersByDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		req := &probev1.Request{Text: "hello", Payload: []byte{1, 2}, Labels: map[string]string{"a": "b"}}
		for _, method := range unaryMethods {
			for run := uint64(1); run <= 2; run++ {
				got, err := probe.Call(t.Context(), conn, method, req)
				if err != nil {
					t.Fatalf("%s: %v", method, err)
				}
				want := &probev1.Response{
					Text: "hello", Payload: []byte{1, 2}, Labels: map[string]string{"a": "b"},
					Execution: run, Index: 1, Received: 1,
				}
				if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
					t.Errorf("%s: response (-want +got):\n%s", method, diff)
				}
			}
			if hits, effects := srv.Hits(method), srv.Effects(method); hits != 2 || effects != 2 {
				t.Errorf("%s: %d hits, %d effects; want 2, 2", method, hits, effects)
			}
			seen := srv.Seen(method)
			if len(seen) != 2 || !proto.Equal(seen[0].Request, req) || !seen[1].Ended {
				t.Errorf("%s: seen %+v; want two ended runs of %v", method, seen, req)
			}
		}
		if got, want := srv.TotalHits(), 2*len(unaryMethods); got != want {
			t.Errorf("total hits %d, want %d", got, want)
		}
	})
}

func TestStatusAndMetadataOfAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		srv.Script(probe.Read, probe.Step{
			Code:      codes.Unavailable,
			Message:   "later",
			Details:   []proto.Message{&errdetails.ErrorInfo{Domain: "test", Reason: "R"}},
			RetryInfo: new(500 * time.Millisecond),
			Pushback:  "70",
			Header:    metadata.Pairs("h", "one"),
			Trailer:   metadata.Pairs("t", "one"),
		}, probe.Step{Code: codes.Aborted})

		var header, trailer metadata.MD
		_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{}, grpc.Header(&header), grpc.Trailer(&trailer))
		st := status.Convert(err)
		if st.Code() != codes.Unavailable || st.Message() != "later" {
			t.Errorf("status %v, want UNAVAILABLE later", st)
		}
		want := []any{
			&errdetails.ErrorInfo{Domain: "test", Reason: "R"},
			&errdetails.RetryInfo{RetryDelay: durationpb.New(500 * time.Millisecond)},
		}
		if diff := cmp.Diff(want, st.Details(), protocmp.Transform()); diff != "" {
			t.Errorf("details (-want +got):\n%s", diff)
		}
		for _, c := range []struct {
			where, key, want string
			md               metadata.MD
		}{
			{"header", "h", "one", header},
			{"trailer", "t", "one", trailer},
			{"trailer", "grpc-retry-pushback-ms", "70", trailer},
		} {
			if got := c.md.Get(c.key); !cmp.Equal(got, []string{c.want}) {
				t.Errorf("%s %s = %q, want one %q", c.where, c.key, got, c.want)
			}
		}

		trailer = nil
		_, err = probe.Call(t.Context(), conn, probe.Read, &probev1.Request{}, grpc.Trailer(&trailer))
		if got := status.Convert(err).Message(); got != "scripted Aborted" {
			t.Errorf("message of a step without one: %q", got)
		}
		if len(trailer.Get("t"))+len(trailer.Get("grpc-retry-pushback-ms")) != 0 {
			t.Errorf("the first step's trailer came with the second: %v", trailer)
		}
		if srv.Effects(probe.Read) != 0 {
			t.Error("a run that failed counted as an effect")
		}
	})
}

func TestScriptsAreTakenOwnThenSharedThenDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		srv.Script(probe.Read, probe.Step{Code: codes.Aborted}, probe.Step{Code: codes.NotFound})
		srv.ScriptAll(probe.Step{Code: codes.DataLoss}, probe.Step{Code: codes.OutOfRange})
		srv.Default(probe.Step{Code: codes.Unimplemented})
		if got := srv.Left(probe.Read); got != 2 {
			t.Fatalf("left %d, want 2", got)
		}

		for i, c := range []struct {
			method string
			want   codes.Code
		}{
			{probe.Read, codes.Aborted},
			{probe.Keyed, codes.DataLoss},
			{probe.Read, codes.NotFound},
			{probe.Read, codes.OutOfRange},
			{probe.Keyed, codes.Unimplemented},
			{probe.Read, codes.Unimplemented},
		} {
			_, err := probe.Call(t.Context(), conn, c.method, &probev1.Request{})
			if got := status.Code(err); got != c.want {
				t.Errorf("call %d of %s: %v, want %v", i, c.method, got, c.want)
			}
		}
		if got := srv.Left(probe.Read); got != 0 {
			t.Errorf("left %d, want 0", got)
		}
	})
}

// One deadline of 10 s, a handler that never answers: everything is exact in
// fake time, or nothing that is built on this package can be.
func TestHangUntilTheDeadlineIsExactInFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		srv.Script(probe.Read, probe.Step{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()

		start := time.Now()
		_, err := probe.Call(ctx, conn, probe.Read, &probev1.Request{})
		if got := status.Code(err); got != codes.DeadlineExceeded {
			t.Errorf("code %v, want DeadlineExceeded", got)
		}
		if took := time.Since(start); took != 10*time.Second {
			t.Errorf("took %v, want exactly 10s", took)
		}

		synctest.Wait() // the handler learns of the end by itself
		entry := srv.Seen()[0]
		if !entry.HasDeadline || entry.Left != 10*time.Second {
			t.Errorf("the handler had %v left (deadline: %t), want exactly 10s", entry.Left, entry.HasDeadline)
		}
		if !entry.Ended || entry.CtxErr == nil || entry.Took != 10*time.Second {
			t.Errorf("entry %+v; want ended after exactly 10s by its context", entry)
		}
	})
}

func TestDelayEndsWithTheContextUnlessDeaf(t *testing.T) {
	for _, c := range []struct {
		name string
		step probe.Step
		took time.Duration
		code codes.Code // of the handler
	}{
		{"in time", probe.Step{Delay: 300 * time.Millisecond}, 300 * time.Millisecond, codes.OK},
		{"cut", probe.Step{Delay: 5 * time.Second}, time.Second, codes.Canceled},
		{"deaf", probe.Step{Delay: 5 * time.Second, Deaf: true}, 5 * time.Second, codes.OK},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conn, srv := probe.Start(t)
				srv.Script(probe.Read, c.step)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(time.Second, cancel)

				_, _ = probe.Call(ctx, conn, probe.Read, &probev1.Request{}) // what the handler saw is the point
				time.Sleep(10 * time.Second)
				entry := srv.Seen()[0]
				if entry.Took != c.took || status.Code(entry.Err) != c.code {
					t.Errorf("the handler took %v and returned %v; want %v, %v", entry.Took, entry.Err, c.took, c.code)
				}
			})
		})
	}
}

func TestLostReplyLeavesItsEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		srv.Script(probe.Keyed, probe.Step{LoseReply: true})

		_, err := probe.Call(t.Context(), conn, probe.Keyed, &probev1.Request{})
		if st := status.Convert(err); st.Code() != codes.Unavailable || st.Message() != probe.LostReply {
			t.Errorf("status %v, want UNAVAILABLE %q", st, probe.LostReply)
		}
		if entry := srv.Seen()[0]; entry.Err != nil || srv.Effects(probe.Keyed) != 1 {
			t.Errorf("the handler returned %v with %d effects; want success with 1", entry.Err, srv.Effects(probe.Keyed))
		}
		if _, err := probe.Call(t.Context(), conn, probe.Keyed, &probev1.Request{}); err != nil {
			t.Errorf("the next reply: %v", err)
		}
	})
}

// The reply is lost outside of what the test puts between: it has seen a success.
func TestLostReplyIsLostOutermost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := make(chan error, 1)
		conn, srv := probe.Start(t, probe.ServerOptions(grpc.ChainUnaryInterceptor(
			func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
				resp, err := next(ctx, req)
				inner <- err
				return resp, err
			})))
		srv.Script(probe.Read, probe.Step{LoseReply: true})
		_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
		if status.Code(err) != codes.Unavailable {
			t.Errorf("caller got %v, want UNAVAILABLE", err)
		}
		if err := <-inner; err != nil {
			t.Errorf("the interceptor inside saw %v, want success", err)
		}
	})
}

func TestDoIsTheHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		boom := status.Error(codes.FailedPrecondition, "boom")
		srv.Script(probe.Read,
			probe.Step{Delay: time.Second, Do: func(_ context.Context, req *probev1.Request) (*probev1.Response, error) {
				return &probev1.Response{Text: "not " + req.GetText()}, nil
			}},
			probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) { return nil, boom }},
			// A failure is not a success that can be lost.
			probe.Step{LoseReply: true, Do: func(context.Context, *probev1.Request) (*probev1.Response, error) { return nil, boom }},
		)
		start := time.Now()
		resp, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{Text: "this"})
		if err != nil || resp.GetText() != "not this" || time.Since(start) != time.Second {
			t.Errorf("got %v, %v after %v", resp, err, time.Since(start))
		}
		for range 2 {
			_, err = probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
			if status.Convert(err).Message() != "boom" {
				t.Errorf("got %v, want %v", err, boom)
			}
		}
	})
}

func TestScriptedPanicBecomesInternal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		srv.Script(probe.Read, probe.Step{Panic: true})
		_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
		if st := status.Convert(err); st.Code() != codes.Internal || !strings.Contains(st.Message(), "scripted panic in "+probe.Read) {
			t.Errorf("status %v, want INTERNAL that names the panic", st)
		}
		if entry := srv.Seen()[0]; !entry.Ended || !errors.Is(entry.Err, probe.ErrPanicked) {
			t.Errorf("entry %+v; want ended by a panic", entry)
		}
	})
}

// Three servers in a row, each calling the next with its own context after a
// second of work: every hop is told exactly what is left.
func TestDeadlineShrinksAlongAChain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next, leaf := probe.Start(t)
		leaf.Script(probe.Read, probe.Step{Hang: true})
		hops := []*probe.Server{leaf}
		for range 2 {
			conn, srv := probe.Start(t)
			onward := next
			srv.Script(probe.Read, probe.Step{Delay: time.Second, Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
				return probe.Call(ctx, onward, probe.Read, req)
			}})
			next, hops = conn, append(hops, srv)
		}

		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		start := time.Now()
		_, err := probe.Call(ctx, next, probe.Read, &probev1.Request{})
		if status.Code(err) != codes.DeadlineExceeded || time.Since(start) != 5*time.Second {
			t.Errorf("got %v after %v, want DEADLINE_EXCEEDED after exactly 5s", err, time.Since(start))
		}
		for i, want := range []time.Duration{3 * time.Second, 4 * time.Second, 5 * time.Second} {
			if got := hops[i].Seen()[0].Left; got != want {
				t.Errorf("hop %d from the leaf had %v left, want exactly %v", i, got, want)
			}
		}
	})
}

func TestPreviousAttempts(t *testing.T) {
	for _, c := range []struct {
		values []string
		want   int
	}{
		{nil, 0},
		{[]string{"2"}, 2},
		{[]string{"1", "1"}, -1},
		{[]string{"two"}, -1},
	} {
		md := metadata.MD{"grpc-previous-rpc-attempts": c.values}
		if got := (&probe.Entry{Metadata: md}).PreviousAttempts(); got != c.want {
			t.Errorf("%q: %d, want %d", c.values, got, c.want)
		}
	}
}
