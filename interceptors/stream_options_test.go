package interceptors_test

import (
	"context"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
)

// The caller's options that write, or run, show the deciding attempt, once.
func TestUsersOptionsShowTheDecidingAttempt(t *testing.T) {
	step := func(n string, code codes.Code, ops ...probe.Op) probe.Step {
		return probe.Step{
			Header: metadata.Pairs("h", n, "h"+n, "1"), Trailer: metadata.Pairs("t", n, "t"+n, "1"), Code: code, Ops: ops,
		}
	}
	type shown struct{ header, trailer, finish string }
	for _, c := range []struct {
		name   string
		method string
		steps  []probe.Step
		want   shown
	}{
		{"the first succeeds", probe.ServerStream, []probe.Step{step("1", codes.OK)}, shown{"1", "1", "OK"}},
		{"the second succeeds", probe.ServerStream, []probe.Step{step("1", codes.Unavailable), step("2", codes.OK)}, shown{"2", "2", "OK"}},
		{"the second succeeds, client stream", probe.ClientStream, []probe.Step{step("1", codes.Unavailable), step("2", codes.OK)}, shown{"2", "2", "OK"}},
		{"the second succeeds, bidi", probe.Bidi, []probe.Step{step("1", codes.Unavailable), step("2", codes.OK)}, shown{"2", "2", "OK"}},
		{
			"all fail", probe.Bidi,
			[]probe.Step{step("1", codes.Unavailable), step("2", codes.Unavailable), step("3", codes.Unavailable)},
			shown{"3", "3", "Unavailable"},
		},
		{"the second is final", probe.Bidi, []probe.Step{step("1", codes.Unavailable), step("2", codes.NotFound)}, shown{"2", "2", "NotFound"}},
		{
			"the second fails half-way", probe.ServerStream,
			[]probe.Step{step("1", codes.Unavailable), step("2", codes.Unavailable, probe.Send(1))},
			shown{"2", "2", "Unavailable"},
		},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(c.method, c.steps...)
			var header, trailer metadata.MD
			var from peer.Peer
			var finishes []string
			onFinish := grpc.OnFinish(func(err error) { finishes = append(finishes, outcome(err)) })
			stream := openStream(t.Context(), t, r.conn, c.method, grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from), onFinish, onFinish)
			send(t, stream, "a")
			wantOK(t, stream.CloseSend())
			_, err := drain(stream)
			_, again := recv(stream)
			synctest.Wait()
			wantEqual(t, "h", one(header, "h"), c.want.header)
			wantEqual(t, "t", one(trailer, "t"), c.want.trailer)
			wantEqual(t, "keys of other attempts", len(header.Get("h1"))+len(header.Get("h2"))+len(header.Get("h3")), 1)
			wantEqual(t, "Trailer()", one(stream.Trailer(), "t"), c.want.trailer)
			if from.Addr == nil {
				t.Error("no peer")
			}
			// Two options, each once, and with what RecvMsg says.
			wantEqual(t, "OnFinish", fmt.Sprint(finishes), fmt.Sprint([]string{c.want.finish, c.want.finish}))
			if c.want.finish != "OK" {
				wantCode(t, err, status.Code(again))
				wantEqual(t, "RecvMsg", outcome(err), c.want.finish)
			}
		})
	}
}

// An option's targets are the caller's: nothing is written to them where nothing
// was learned, and OnFinish runs for a stream that never was, too.
func TestUsersOptionsWithoutAStream(t *testing.T) {
	for _, c := range []struct {
		name  string
		setup setup
		opts  []grpc.CallOption
		ctx   func(context.Context) context.Context
		want  codes.Code
	}{
		{name: "a bad override", opts: []grpc.CallOption{interceptors.Override(policy.Policy{MaxAttempts: -1})}, want: codes.InvalidArgument},
		{
			name: "the caller is gone", want: codes.Canceled,
			ctx: func(ctx context.Context) context.Context {
				ctx, cancel := context.WithCancel(ctx)
				cancel()
				return ctx
			},
		},
		{
			name: "too little time", want: codes.DeadlineExceeded,
			ctx: func(ctx context.Context) context.Context {
				ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
				t.Cleanup(cancel)
				return ctx
			},
		},
		{
			name: "the breaker is open", want: codes.Unavailable,
			setup: setup{client: []interceptors.ClientOption{interceptors.WithOwnBreaker(&permits{refuse: errOpen})}},
		},
		{
			name: "nobody listens", want: codes.Unavailable,
			setup: setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{MaxAttempts: 1})}},
		},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, c.setup)
			synctest.Wait() // the server serves
			if c.name == "nobody listens" {
				r.network.Down()
			}
			ctx := t.Context()
			if c.ctx != nil {
				ctx = c.ctx(ctx)
			}
			header, trailer := metadata.Pairs("mine", "1"), metadata.Pairs("mine", "1")
			from := peer.Peer{Addr: &net.IPAddr{}}
			var finishes []string
			stream, err := r.conn.NewStream(ctx, descOf(probe.Bidi), probe.Bidi, append(c.opts,
				grpc.Peer(&from), grpc.OnFinish(func(err error) { finishes = append(finishes, outcome(err)) }))...)
			wantCode(t, err, c.want)
			if stream != nil {
				t.Errorf("a stream beside the error: %v", stream)
			}
			wantEqual(t, "OnFinish", fmt.Sprint(finishes), fmt.Sprint([]string{c.want.String()}))
			if _, is := from.Addr.(*net.IPAddr); !is || one(header, "mine") != "1" || one(trailer, "mine") != "1" {
				t.Error("a target was written to")
			}
			wantEqual(t, "hits", r.srv.Hits(probe.Bidi), 0)
		})
	}
}
