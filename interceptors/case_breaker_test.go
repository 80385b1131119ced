package interceptors_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
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

// Callers with little time: who notices first may be several hops down, each with
// a reserve of its own, and long before the deadline passes up here. Whatever the
// handlers between make of the error, it is the deadline's; but a server that
// hangs is found out by callers that have time.
func TestB27_CallersWithLittleTime(t *testing.T) {
	breaking := interceptors.WithBreaker(threshold(5, 10*time.Second))
	chain := func(t *testing.T, handle func(error) error) (top, leaf *rig) {
		t.Helper()
		leaf = start(t, setup{client: []interceptors.ClientOption{breaking}})
		leaf.srv.Default(probe.Step{Hang: true})
		below := leaf
		for range 3 {
			mid, next := start(t, setup{client: []interceptors.ClientOption{breaking}}), below
			mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
				resp, err := probe.Call(ctx, next.conn, probe.Read, req)
				return resp, handle(err)
			}})
			below = mid
		}
		return below, leaf
	}
	call := func(t *testing.T, r *rig, timeout time.Duration, n int) {
		t.Helper()
		for range n {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
			cancel()
			wantCode(t, err, codes.DeadlineExceeded)
		}
	}
	for name, handle := range map[string]func(error) error{
		"returned": func(err error) error { return err },
		"formatted": func(err error) error {
			return status.Errorf(codes.DeadlineExceeded, "below: %v", err)
		},
	} {
		bubbles(t, name, func(t *testing.T) {
			top, leaf := chain(t, handle)
			call(t, top, 95*time.Millisecond, 50)
			wantEqual(t, "state at the top", top.breakerState(), breaker.Closed)
			wantEqual(t, "state before the leaf", leaf.breakerState(), breaker.Closed)
			call(t, top, 500*time.Millisecond, 5)
			wantEqual(t, "state before the leaf, which hangs", leaf.breakerState(), breaker.Open)
		})
	}

	bubbles(t, "refused before any work", func(t *testing.T) {
		r := start(t, setup{
			client: []interceptors.ClientOption{breaking},
			server: []interceptors.ServerOption{interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: 50 * time.Millisecond})},
		})
		call(t, r, 40*time.Millisecond, 50)
		wantEqual(t, "hits", r.srv.TotalHits(), 0)
		wantEqual(t, "state", r.breakerState(), breaker.Closed)
	})

	// So is the timeout that a server's policy gives its attempts.
	bubbles(t, "an attempt's timeout below", func(t *testing.T) {
		leaf := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithPolicy(policy.Policy{MaxAttempts: 1, AttemptTimeout: 50 * time.Millisecond}),
		}})
		leaf.srv.Default(probe.Step{Hang: true})
		r := start(t, setup{client: []interceptors.ClientOption{breaking}})
		r.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			return probe.Call(ctx, leaf.conn, probe.Read, req)
		}})
		call(t, r, 2*time.Second, 5)
		wantEqual(t, "state", r.breakerState(), breaker.Open)
	})

	// The controls: a deadline that the server has made itself, long before its
	// caller's, is its own, also where a call below is what it ends.
	bubbles(t, "the server's own, of a call below", func(t *testing.T) {
		leaf := start(t, setup{})
		leaf.srv.Default(probe.Step{Hang: true})
		r := start(t, setup{client: []interceptors.ClientOption{breaking}})
		r.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			return probe.Call(ctx, leaf.conn, probe.Read, req)
		}})
		call(t, r, 2*time.Second, 5)
		wantEqual(t, "state", r.breakerState(), breaker.Open)
	})

	// Of a failure after which there was no time for a retry, the failure is what
	// the call ended of.
	bubbles(t, "no time for a backoff", func(t *testing.T) {
		leaf := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Backoff: fixed(5 * time.Second)})}})
		leaf.srv.Default(unavailable())
		r := start(t, setup{client: []interceptors.ClientOption{breaking}})
		r.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			_, err := probe.Call(ctx, leaf.conn, probe.Read, req)
			wantStop(t, err, interceptors.DeadlineTooShort, interceptors.Maybe)
			return nil, status.Error(codes.DeadlineExceeded, "too late")
		}})
		call(t, r, 2*time.Second, 5)
		wantEqual(t, "state", r.breakerState(), breaker.Open)
	})

	// Nor is one that the server gives to those who have none: there a shorter one
	// is no caller's to complain of.
	bubbles(t, "the server's default", func(t *testing.T) {
		r := start(t, setup{
			client: []interceptors.ClientOption{breaking},
			server: []interceptors.ServerOption{interceptors.WithServerDeadline(interceptors.DeadlineConfig{Default: 40 * time.Millisecond})},
		})
		r.srv.Default(probe.Step{Hang: true})
		for range 5 {
			var trailer metadata.MD
			_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"), grpc.Trailer(&trailer))
			wantCode(t, err, codes.DeadlineExceeded)
			wantEqual(t, "reason", one(trailer, reasonKey), "")
		}
		wantEqual(t, "state", r.breakerState(), breaker.Open)
	})

	bubbles(t, "the server's own", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{breaking}})
		r.srv.Default(probe.Step{Do: func(ctx context.Context, _ *probev1.Request) (*probev1.Response, error) {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			<-ctx.Done()
			return nil, status.FromContextError(ctx.Err()).Err()
		}})
		call(t, r, 2*time.Second, 5)
		wantEqual(t, "state", r.breakerState(), breaker.Open)
	})
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
