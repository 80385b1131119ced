package interceptors_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// A wait that does not fit into what is left is not waited.
func TestB01_BackoffLongerThanTheTimeLeft(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithPolicy(policy.Policy{Backoff: fixed(5 * time.Second)}),
		}})
		r.srv.Default(probe.Step{Code: codes.Unavailable, Details: []proto.Message{&errdetails.ErrorInfo{Domain: "app", Reason: "FULL"}}})
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()

		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantEqual(t, "elapsed", time.Since(began), 0)
		r.wantCounts(t, probe.Read, 1, 1)
		wantCode(t, err, codes.Unavailable)
		if st := reaches(err, codes.Unavailable); len(st.Details()) != 1 {
			t.Errorf("details %v, want the server's one", st.Details())
		}
		wantStop(t, err, interceptors.DeadlineTooShort, interceptors.Maybe)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v does not tell that the deadline stopped it", err)
		}
	})
}

// The end of an attempt's own time is not the end of the call.
func TestB23_AttemptTimeoutIsNotTheEndOfTheCall(t *testing.T) {
	perTry := setup{client: []interceptors.ClientOption{
		interceptors.WithPolicy(policy.Policy{AttemptTimeout: 100 * time.Millisecond}),
	}}

	bubbles(t, "run 1", func(t *testing.T) {
		r := start(t, perTry)
		r.srv.Script(probe.Read, probe.Step{Hang: true})
		began := time.Now()
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		r.wantCounts(t, probe.Read, 2, 2)
		wantBetween(t, "elapsed", time.Since(began), 95*time.Millisecond, 500*time.Millisecond)
		if first := r.srv.Seen(probe.Read)[0]; first.CtxErr == nil {
			t.Error("the first attempt's handler was not told to stop")
		}
	})

	// Alone, the client times out with its caller to the millisecond.
	alone := perTry
	alone.plainServer = true
	bubbles(t, "run 2", func(t *testing.T) {
		r := start(t, alone)
		r.srv.Default(probe.Step{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.DeadlineExceeded)
		wantBetween(t, "elapsed", time.Since(began), 250*time.Millisecond, 350*time.Millisecond)
		if n := r.counter.Count(); n < 2 || n > 3 {
			t.Errorf("%d attempts, want 2 or 3", n)
		}
		if ctx.Err() == nil {
			t.Error("the caller's context is not done")
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("errors.Is(%v, DeadlineExceeded) is false", err)
		}
	})

	// With the guard on the other side the answer comes by its reserve earlier,
	// so that there still is somebody to hear it.
	bubbles(t, "run 2 with a guard", func(t *testing.T) {
		r := start(t, perTry)
		r.srv.Default(probe.Step{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.DeadlineExceeded)
		wantBetween(t, "elapsed", time.Since(began), 245*time.Millisecond, 250*time.Millisecond)
		if n := r.counter.Count(); n < 2 || n > 3 {
			t.Errorf("%d attempts, want 2 or 3", n)
		}
	})
}

// Every attempt, and every hop, is told no more time than the caller has left.
func TestB47_WhatEachAttemptIsTold(t *testing.T) {
	attemptTimeout := func(d time.Duration, p policy.Policy) setup {
		p.AttemptTimeout = d
		return setup{client: []interceptors.ClientOption{interceptors.WithPolicy(p)}}
	}

	bubbles(t, "(a)", func(t *testing.T) {
		r := start(t, attemptTimeout(10*time.Second, policy.Policy{}))
		r.srv.Default(probe.Step{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.DeadlineExceeded)
		wantBetween(t, "elapsed", time.Since(began), 145*time.Millisecond, 250*time.Millisecond)
		for _, e := range r.srv.Seen(probe.Read) {
			wantBetween(t, "told", e.Left, time.Millisecond, 150*time.Millisecond)
		}
		wantEqual(t, "hits", r.srv.Hits(probe.Read), 1)
	})

	bubbles(t, "(b)", func(t *testing.T) {
		r := start(t, attemptTimeout(300*time.Millisecond, policy.Policy{Backoff: fixed(time.Nanosecond)}))
		r.srv.Default(probe.Step{Delay: 200 * time.Millisecond, Code: codes.Unavailable})
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.DeadlineExceeded)
		want := []time.Duration{300 * time.Millisecond, 300 * time.Millisecond, 100 * time.Millisecond}
		attempts := r.counter.Attempts()
		if len(attempts) != len(want) {
			t.Fatalf("%d attempts, want %d", len(attempts), len(want))
		}
		for i, a := range attempts {
			wantBetween(t, "left to attempt", a.Left, want[i]-time.Microsecond, want[i])
		}
		for i, e := range r.srv.Seen(probe.Read) {
			wantBetween(t, "told to handler", e.Left, want[i]-6*time.Millisecond, want[i])
		}
	})

	bubbles(t, "(c)", func(t *testing.T) {
		r := start(t, attemptTimeout(300*time.Millisecond, policy.Policy{}))
		r.srv.Default(probe.Step{Hang: true})
		_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.DeadlineExceeded)
		r.wantCounts(t, probe.Read, 3, 3)
		for _, e := range r.srv.Seen(probe.Read) {
			if !e.HasDeadline {
				t.Error("a handler was told nothing")
			}
			wantBetween(t, "told", e.Left, time.Millisecond, 300*time.Millisecond)
		}
	})

	bubbles(t, "(e)", func(t *testing.T) {
		leaf := start(t, setup{})
		mid := start(t, setup{})
		mid.srv.Script(probe.Read, probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			return probe.Call(ctx, leaf.conn, probe.Read, req)
		}})
		_, err := mid.call(t, probe.Read, request("x"))
		wantOK(t, err)
		inward, onward := mid.srv.Seen(probe.Read)[0], leaf.srv.Seen(probe.Read)[0]
		if !onward.HasDeadline || onward.Left > inward.Left || inward.Left > 2*time.Second {
			t.Errorf("caller 2s, handler %v, onward %v: want each no more than the one before", inward.Left, onward.Left)
		}
	})
}

// Waiting for a connection has its own clock: neither all attempts at once nor
// one that eats the whole call.
func TestB51_WaitForReadyAndRetry(t *testing.T) {
	rigWith := func(t *testing.T, attempt time.Duration) *rig {
		r := start(t, setup{
			client: []interceptors.ClientOption{
				interceptors.WithPolicy(policy.Policy{AttemptTimeout: attempt}),
				interceptors.WithBreaker(breaker.Config{ConsecutiveFailures: 3}),
			},
			inner: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
				Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			})},
		})
		r.network.Down()
		return r
	}

	bubbles(t, "(a)", func(t *testing.T) {
		r := rigWith(t, policy.Unlimited)
		time.AfterFunc(600*time.Millisecond, r.network.Up)
		began := time.Now()
		_, err := r.call(t, probe.Read, request("x"), grpc.WaitForReady(true))
		wantOK(t, err)
		wantEqual(t, "exec", r.srv.Hits(probe.Read), 1)
		wantBetween(t, "elapsed", time.Since(began), 600*time.Millisecond, 2*time.Second)
	})

	bubbles(t, "(b)", func(t *testing.T) {
		r := rigWith(t, 100*time.Millisecond)
		began := time.Now()
		_, err := r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		if !strings.Contains(err.Error(), "connection refused") {
			t.Errorf("error %v does not say why there is no connection", err)
		}
		wantBetween(t, "elapsed", time.Since(began), 0, time.Second)
		r.wantCounts(t, probe.Read, 3, 0)
		wantEqual(t, "executed", callErrorOf(t, err).Executed(), interceptors.No)
		// Three attempts that say nothing about a server: it was never asked.
		wantEqual(t, "breaker", r.client.Breaker(r.conn, probeService).State(), breaker.Closed)
	})

	bubbles(t, "(c)", func(t *testing.T) {
		r := rigWith(t, 100*time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"), grpc.WaitForReady(true))
		wantCode(t, err, codes.DeadlineExceeded)
		wantBetween(t, "elapsed", time.Since(began), 300*time.Millisecond, 400*time.Millisecond)
		if n := r.counter.Count(); n > 3 {
			t.Errorf("%d attempts, want at most 3", n)
		}
		wantEqual(t, "breaker", r.client.Breaker(r.conn, probeService).State(), breaker.Closed)
	})
}
