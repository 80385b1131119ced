package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// nativeRetry is the service config with which plain gRPC retries everything
// of the probe that is UNAVAILABLE, three times.
const nativeRetry = `{"methodConfig": [{
	"name": [{"service": "belay.probe.v1.ProbeService"}],
	"retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.01s", "maxBackoff": "0.05s", "backoffMultiplier": 2,
		"retryableStatusCodes": ["UNAVAILABLE", "INTERNAL", "UNKNOWN", "ABORTED"]}}]}`

// hops is a chain edge → mid → leaf. The test's own client calls the edge.
type hops struct{ edge, mid, leaf *rig }

// chain starts three servers with Belay on every end. The handlers of edge and
// mid make one call to the next and return what forward makes of its error.
func chain(t *testing.T, forward func(ctx context.Context, err error) error) hops {
	t.Helper()
	h := hops{start(t, setup{}), start(t, setup{}), start(t, setup{})}
	step := func(next *rig) probe.Step {
		return probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			resp, err := probe.Call(ctx, next.conn, probe.Read, req)
			if err != nil {
				err = forward(ctx, err)
			}
			if err != nil {
				return nil, err
			}
			if resp == nil {
				resp = &probev1.Response{Text: "fallback"}
			}
			return resp, nil
		}}
	}
	h.edge.srv.Default(step(h.mid))
	h.mid.srv.Default(step(h.leaf))
	return h
}

// The mark climbs to the edge however a Go handler passes an error on, so that
// one layer alone retries; and it stays away where there is nothing to mark.
func TestForwardingOverThreeHops(t *testing.T) {
	for _, c := range []struct {
		name    string
		forward func(ctx context.Context, err error) error
		code    codes.Code
		marked  bool
	}{
		{"return err", func(_ context.Context, err error) error { return err }, codes.Unavailable, true},
		{"%w", func(_ context.Context, err error) error { return fmt.Errorf("mid: %w", err) }, codes.Unavailable, true},
		{"%v", func(_ context.Context, err error) error { return errors.New("mid: " + err.Error()) }, codes.Unknown, true},
		{"status.Convert", func(_ context.Context, err error) error { return status.Convert(err).Err() }, codes.Unavailable, true},
		{"a new status, same code", func(_ context.Context, err error) error {
			return status.Errorf(status.Code(err), "mid: %v", err)
		}, codes.Unavailable, true},
		{"a new status, another transient code", func(_ context.Context, err error) error {
			return status.Errorf(codes.Internal, "mid: %v", err)
		}, codes.Internal, true},
		{"a verdict of its own", func(_ context.Context, err error) error {
			return status.Errorf(codes.FailedPrecondition, "mid: %v", err)
		}, codes.FailedPrecondition, false},
		{"errors.Join", func(_ context.Context, err error) error {
			return errors.Join(errors.New("mid"), err)
		}, codes.Unavailable, true},
		{"a fallback", func(context.Context, error) error { return nil }, codes.OK, false},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			h := chain(t, c.forward)
			h.leaf.srv.Default(unavailable())

			var trailer metadata.MD
			_, err := h.edge.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
			wantCode(t, err, c.code)
			wantEqual(t, "calls of the leaf", h.leaf.srv.Hits(probe.Read), 3)
			wantEqual(t, "calls of mid", h.mid.srv.Hits(probe.Read), 1)
			wantEqual(t, "calls of the edge", h.edge.srv.Hits(probe.Read), 1)
			wantPushback := ""
			if c.marked {
				wantPushback = "-1"
				attempts := wantStop(t, err, interceptors.Pushback, interceptors.Maybe).Attempts()
				wantEqual(t, "origin", attempts[0].Origin, interceptors.OriginPeer)
			} else if err != nil {
				wantBare(t, err)
			}
			wantEqual(t, "pushback at the edge", one(trailer, pushbackKey), wantPushback)
			wantEqual(t, "executed at the edge", one(trailer, executedKey), "")
			if c.marked {
				info := infoOf(err)
				wantEqual(t, "reason", info.GetReason(), "RETRIES_SPENT")
			}
		})
	}
}

// A second call of the handler's own that works clears what the first left.
func TestForwardingAfterARetryByHand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		leaf := start(t, setup{})
		mid := start(t, setup{})
		leaf.srv.Script(probe.Read, unavailable(), unavailable(), unavailable()) // one whole call
		mid.srv.Script(probe.Read, probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			if _, err := probe.Call(ctx, leaf.conn, probe.Read, req); status.Code(err) != codes.Unavailable {
				t.Errorf("the first call: %v", err)
			}
			if _, err := probe.Call(ctx, leaf.conn, probe.Read, req); err != nil {
				t.Errorf("the second call: %v", err)
			}
			return nil, status.Error(codes.Unavailable, "mid's own trouble")
		}})
		var trailer metadata.MD
		_, err := mid.call(t, probe.Read, request("x"), interceptors.NoRetry(), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "pushback", one(trailer, pushbackKey), "")
		wantEqual(t, "calls of the leaf", leaf.srv.Hits(probe.Read), 4)

		// Mid's own trouble is its caller's to retry.
		_, err = mid.call(t, probe.Read, request("x"))
		wantOK(t, err)
	})
}

// A call to one method that worked says nothing about another's failure.
func TestForwardingIsPerDownstreamMethod(t *testing.T) {
	bubble(t, func(t *testing.T) {
		leaf := start(t, setup{})
		mid := start(t, setup{})
		leaf.srv.Script(probe.Read, unavailable(), unavailable(), unavailable())
		mid.srv.Script(probe.Read, probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			_, _ = probe.Call(ctx, leaf.conn, probe.Read, req)
			_, err := probe.Call(ctx, leaf.conn, probe.Idempotent, req)
			wantCode(t, err, codes.OK)
			return nil, status.Error(codes.Unavailable, "no answer")
		}})
		var trailer metadata.MD
		_, err := mid.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "pushback", one(trailer, pushbackKey), "-1")
		wantEqual(t, "who", infoOf(err).GetMetadata()["who"], probe.Read)
		mid.wantCounts(t, probe.Read, 1, 1)
	})
}

// Which ends of a downstream call are marked, and which are the next layer's
// to retry.
func TestForwardingMarksWhatWasSpent(t *testing.T) {
	for _, c := range []struct {
		name   string
		leaf   probe.Step
		method string
		opts   []grpc.CallOption
		marked bool
	}{
		{"exhausted", unavailable(), probe.Read, nil, true},
		{"the leaf says never", probe.Step{Code: codes.Unavailable, Pushback: "-1"}, probe.Read, nil, true},
		{"undeclared", unavailable(), probe.Undeclared, nil, false},
		{"switched off", unavailable(), probe.Read, []grpc.CallOption{interceptors.NoRetry()}, false},
		{"one attempt", unavailable(), probe.Read, []grpc.CallOption{interceptors.Override(policy.Policy{MaxAttempts: 1})}, false},
		{"final", probe.Step{Code: codes.Internal}, probe.Read, nil, false},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			leaf := start(t, setup{})
			mid := start(t, setup{})
			leaf.srv.Default(c.leaf)
			mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
				return probe.Call(ctx, leaf.conn, c.method, req, c.opts...)
			}})
			var trailer metadata.MD
			_, err := mid.call(t, probe.Read, request("x"), interceptors.NoRetry(), grpc.Trailer(&trailer))
			if err == nil {
				t.Fatal("no error")
			}
			wantPushback := ""
			if c.marked {
				wantPushback = "-1"
			}
			wantEqual(t, "pushback", one(trailer, pushbackKey), wantPushback)
		})
	}
}

// An open breaker in the middle is UNAVAILABLE there and "never" above.
func TestForwardingOfAnOpenBreaker(t *testing.T) {
	bubble(t, func(t *testing.T) {
		leaf := start(t, setup{})
		mid := start(t, setup{client: []interceptors.ClientOption{}})
		guarded := start(t, setup{
			probe:  []probe.Option{probe.Using(leaf.srv)},
			client: []interceptors.ClientOption{interceptors.WithBreaker(threshold(2, 1e9*10))},
		})
		guarded.trip(t)
		hits := leaf.srv.TotalHits()
		mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			return probe.Call(ctx, guarded.conn, probe.Read, req)
		}})
		var trailer metadata.MD
		_, err := mid.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "pushback", one(trailer, pushbackKey), "-1")
		wantEqual(t, "calls of the leaf", leaf.srv.TotalHits()-hits, 0)
		mid.wantCounts(t, probe.Read, 1, 1)
	})
}

// Facts about another hop travel in details, and are not taken for this hop's:
// neither by the class gate, nor by the one that asks again about what is
// under way.
func TestForwardedFactsAreNotOurs(t *testing.T) {
	bubbles(t, "not executed below", func(t *testing.T) {
		leaf := start(t, setup{})
		mid := start(t, setup{})
		// The leaf refuses without executing: an UNAVAILABLE store.
		store := &brokenStore{Store: idempotency.NewMemoryStore(idempotency.MemoryConfig{})}
		broken := start(t, setup{
			probe:  []probe.Option{probe.Using(leaf.srv)},
			server: []interceptors.ServerOption{stored(store, idempotency.Config{})},
		})
		mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			return probe.Call(ctx, broken.conn, probe.Keyed, req, interceptors.NoRetry())
		}})
		var trailer metadata.MD
		_, err := mid.call(t, probe.Undeclared, request("x"), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		// Mid's own handler did run: the call is not repeated.
		wantStop(t, err, interceptors.NotDeclared, interceptors.Maybe)
		mid.wantCounts(t, probe.Undeclared, 1, 1)
		wantEqual(t, "executed", one(trailer, executedKey), "")
		wantEqual(t, "reason trailer", one(trailer, reasonKey), "")
		info := infoOf(err)
		wantEqual(t, "reason", info.GetReason(), "STORE_UNAVAILABLE")
		wantEqual(t, "via", info.GetMetadata()["via"], "downstream")
	})

	bubbles(t, "in flight below", func(t *testing.T) {
		leaf := start(t, setup{server: []interceptors.ServerOption{memory(idempotency.Config{WaitMax: 1})}})
		mid := start(t, setup{})
		release := make(chan struct{})
		leaf.srv.Script(probe.Keyed, probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			<-release
			return &probev1.Response{}, nil
		}})
		same := key("k1")
		first := make(chan error, 1)
		go func() {
			_, err := probe.Call(t.Context(), leaf.conn, probe.Keyed, request("x"), same)
			first <- err
		}()
		mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			return probe.Call(ctx, leaf.conn, probe.Keyed, req, same, interceptors.NoRetry())
		}})
		settle()
		var trailer metadata.MD
		_, err := mid.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
		wantReason(t, err, codes.Aborted, idempotency.ReasonInFlight)
		wantEqual(t, "reason trailer", one(trailer, reasonKey), "")
		wantEqual(t, "via", infoOf(err).GetMetadata()["via"], "downstream")
		// ABORTED without this hop's own word is not polled. (Its RetryInfo is a
		// wish like any other, so the retries are counted ones.)
		if n := mid.counter.Count(); n > 3 {
			t.Errorf("%d attempts, want no more than MaxAttempts", n)
		}
		close(release)
		wantOK(t, <-first)
	})
}

// Plain gRPC clients obey the mark.
func TestForwardingToNativeRetry(t *testing.T) {
	for _, marked := range []bool{true, false} {
		bubbles(t, fmt.Sprintf("marked %v", marked), func(t *testing.T) {
			leaf := start(t, setup{})
			leaf.srv.Default(unavailable())
			mid := start(t, setup{plainClient: true, dial: []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeRetry)}})
			mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
				opts := []grpc.CallOption{interceptors.NoRetry()}
				if marked {
					opts = nil
				}
				_, err := probe.Call(ctx, leaf.conn, probe.Read, req, opts...)
				return nil, status.Errorf(codes.Unavailable, "mid: %v", err)
			}})
			_, err := mid.call(t, probe.Read, request("x"))
			wantCode(t, err, codes.Unavailable)
			if marked {
				wantEqual(t, "calls of mid", mid.srv.Hits(probe.Read), 1)
				wantEqual(t, "calls of the leaf", leaf.srv.Hits(probe.Read), 3)
				return
			}
			// The control: without a mark, gRPC retries until mid's own bank ends it.
			wantEqual(t, "calls of mid", mid.srv.Hits(probe.Read), 4)
		})
	}
}

// A handler that leaves its context behind still returns the error, whose chain
// tells what the ledger could not see.
func TestForwardingOutsideTheContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		leaf := start(t, setup{})
		mid := start(t, setup{})
		leaf.srv.Default(unavailable())
		mid.srv.Default(probe.Step{Do: func(_ context.Context, req *probev1.Request) (*probev1.Response, error) {
			resp, err := probe.Call(t.Context(), leaf.conn, probe.Read, req) //nolint:contextcheck // that it is another context is the point
			if err != nil {
				return nil, fmt.Errorf("mid: %w", err)
			}
			return resp, nil
		}})
		var trailer metadata.MD
		_, err := mid.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "pushback", one(trailer, pushbackKey), "-1")
		wantEqual(t, "calls of the leaf", leaf.srv.Hits(probe.Read), 3)
	})
}

// N hops that all retry make no more calls of the leaf than one would.
func TestChainDoesNotMultiply(t *testing.T) {
	for n := 1; n <= 4; n++ {
		bubbles(t, fmt.Sprintf("%d hops", n), func(t *testing.T) {
			rigs := make([]*rig, n)
			for i := range rigs {
				rigs[i] = start(t, setup{})
			}
			for i := range n - 1 {
				next := rigs[i+1]
				rigs[i].srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
					return probe.Call(ctx, next.conn, probe.Read, req)
				}})
			}
			leaf := rigs[n-1].srv
			leaf.Default(unavailable())
			_, err := rigs[0].call(t, probe.Read, request("x"))
			wantCode(t, err, codes.Unavailable)
			wantEqual(t, "calls of the leaf", leaf.Hits(probe.Read), 3)
		})
	}
}
