package interceptors_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// threshold is a breaker that opens after n failures in a row.
func threshold(n int, openFor time.Duration) breaker.Config {
	return breaker.Config{ConsecutiveFailures: n, MinCalls: math.MaxInt, OpenFor: openFor, Probes: 1}
}

func (r *rig) breakerState() breaker.State {
	return r.client.Breaker(r.conn, probeService).Snapshot().State
}

// trip opens the breaker of the probe's service, whose threshold is 2.
func (r *rig) trip(t *testing.T) {
	t.Helper()
	for range 2 {
		r.srv.Script(probe.Read, unavailable())
		_, err := r.call(t, probe.Read, request("x"), interceptors.NoRetry())
		wantCode(t, err, codes.Unavailable)
	}
	if got := r.breakerState(); got != breaker.Open {
		t.Fatalf("breaker %v after 2 failures, want open", got)
	}
}

// A probe without a verdict gives its place back.
func TestB05_ProbeWithoutVerdict(t *testing.T) {
	var panicking bool
	for _, c := range []struct {
		name  string
		probe func(t *testing.T, r *rig)
	}{
		{"(a) the caller cancels", func(t *testing.T, r *rig) {
			r.srv.Script(probe.Read, probe.Step{Hang: true})
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(10*time.Millisecond, cancel)
			_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
			wantCode(t, err, codes.Canceled)
		}},
		{"(b) invalid argument", func(t *testing.T, r *rig) {
			r.srv.Script(probe.Read, probe.Step{Code: codes.InvalidArgument})
			_, err := r.call(t, probe.Read, request("x"))
			wantCode(t, err, codes.InvalidArgument)
		}},
		{"(c) an inner interceptor panics", func(t *testing.T, r *rig) {
			panicking = true
			defer func() {
				panicking = false
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			_, _ = r.call(t, probe.Read, request("x"))
		}},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{
				client: []interceptors.ClientOption{interceptors.WithBreaker(threshold(2, 100*time.Millisecond))},
				inner: []grpc.DialOption{onAttempt(func(context.Context, int) error {
					if panicking {
						panic("scripted")
					}
					return nil
				})},
			})
			r.trip(t)
			time.Sleep(120 * time.Millisecond)
			c.probe(t, r)

			before := r.srv.Hits(probe.Read)
			_, err := r.call(t, probe.Read, request("x"))
			wantOK(t, err)
			wantEqual(t, "hits of the next call", r.srv.Hits(probe.Read)-before, 1)
			wantEqual(t, "state", r.breakerState(), breaker.Closed)
		})
	}
}

// What says nothing about the server does not open its breaker.
func TestB27_OutcomesThatSayNothingAboutTheServer(t *testing.T) {
	fiveInARow := setup{client: []interceptors.ClientOption{interceptors.WithBreaker(threshold(5, 10*time.Second))}}
	cancelled := func(t *testing.T, r *rig) {
		t.Helper()
		r.srv.Script(probe.Read, probe.Step{Hang: true})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.Canceled)
	}
	failing := func(t *testing.T, r *rig, n int, code codes.Code) {
		t.Helper()
		for range n {
			r.srv.Script(probe.Read, probe.Step{Code: code})
			_, err := r.call(t, probe.Read, request("x"), interceptors.NoRetry())
			wantCode(t, err, code)
		}
	}
	for _, c := range []struct {
		name string
		do   func(t *testing.T, r *rig)
		want breaker.State
	}{
		{"(a) cancelled", func(t *testing.T, r *rig) {
			for range 50 {
				cancelled(t, r)
			}
		}, breaker.Closed},
		{"(b) expired", func(t *testing.T, r *rig) {
			for range 20 {
				ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
				_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
				wantCode(t, err, codes.DeadlineExceeded)
				cancel()
			}
			wantEqual(t, "hits", r.srv.TotalHits(), 0)
		}, breaker.Closed},
		{"(c) the caller's mistakes", func(t *testing.T, r *rig) {
			failing(t, r, 50, codes.InvalidArgument)
			failing(t, r, 50, codes.NotFound)
			failing(t, r, 50, codes.FailedPrecondition)
		}, breaker.Closed},
		{"(d) unavailable", func(t *testing.T, r *rig) { failing(t, r, 5, codes.Unavailable) }, breaker.Open},
		{"(e) the server's deadline", func(t *testing.T, r *rig) { failing(t, r, 5, codes.DeadlineExceeded) }, breaker.Open},
		{"(f) a cancel between failures", func(t *testing.T, r *rig) {
			failing(t, r, 4, codes.Unavailable)
			cancelled(t, r)
			failing(t, r, 1, codes.Unavailable)
		}, breaker.Open},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, fiveInARow)
			c.do(t, r)
			wantEqual(t, "state", r.breakerState(), c.want)
			before := r.srv.Hits(probe.Read)
			_, err := r.call(t, probe.Read, request("x"))
			if hit := r.srv.Hits(probe.Read) - before; (hit == 1) != (c.want == breaker.Closed) {
				t.Errorf("the next call made %d hits with a breaker %v (%v)", hit, c.want, err)
			}
		})
	}
}

// An open breaker is an error at once, and costs nobody a retry.
func TestB43_OpenBreaker(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithBreaker(threshold(2, 10*time.Second)),
			interceptors.WithPolicy(policy.Policy{Backoff: fixed(200 * time.Millisecond)}),
			interceptors.WithBudget(budget.New(budget.Config{Initial: 1})),
		}})
		r.trip(t)
		hits, attempts := r.srv.TotalHits(), r.counter.Count()

		for range 100 {
			began := time.Now()
			reply := &probev1.Response{Text: "untouched", Execution: 7}
			want := proto.CloneOf(reply)
			err := r.conn.Invoke(t.Context(), probe.Read, request("x"), reply)
			wantEqual(t, "elapsed", time.Since(began), 0)
			wantCode(t, err, codes.Unavailable)
			if !errors.Is(err, breaker.ErrOpen) {
				t.Fatalf("errors.Is(%v, breaker.ErrOpen) is false", err)
			}
			wantStop(t, err, interceptors.BreakerOpen, interceptors.No)
			if info := infoOf(err); info.GetReason() != "BREAKER_OPEN" {
				t.Fatalf("ErrorInfo %v, want BREAKER_OPEN", info)
			}
			if !proto.Equal(reply, want) {
				t.Fatalf("reply %v, want it untouched", reply)
			}
		}
		stream, err := r.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, probe.ServerStream)
		if stream != nil || !errors.Is(err, breaker.ErrOpen) {
			t.Errorf("stream %v, error %v; want none and ErrOpen", stream, err)
		}
		wantEqual(t, "hits behind an open breaker", r.srv.TotalHits()-hits, 0)
		wantEqual(t, "attempts behind an open breaker", r.counter.Count()-attempts, 0)

		// Another service of the same channel: its breaker is closed, the bank shared.
		r.srv.Script(probe.Reads, unavailable())
		_, err = r.call(t, probe.Reads, request("x"))
		wantOK(t, err)
		wantEqual(t, "hits of a blip", r.srv.Hits(probe.Reads), 2)
	})
}
