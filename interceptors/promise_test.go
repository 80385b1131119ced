package interceptors_test

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// Only a server can break its promise: an interceptor below Belay's that
// answers by itself, from a cache or in a test, has asked none.
func TestAnswerOfAnInnerInterceptorDoesNotDemote(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cached := true
		r := start(t, setup{inner: []grpc.DialOption{grpc.WithChainUnaryInterceptor(
			func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				if cached {
					return nil
				}
				return invoke(ctx, method, req, reply, cc, opts...)
			})}})
		_, err := r.call(t, probe.Keyed, request("x"))
		wantOK(t, err)
		if r.client.Explain(r.conn, probe.Keyed).Demoted {
			t.Error("demoted by an answer that no server gave")
		}
		cached = false
		r.srv.Script(probe.Keyed, unavailable())
		_, err = r.call(t, probe.Keyed, request("y"))
		wantOK(t, err)
	})
}

// A handler that passes on what a downstream server said of its own dedupe does
// not make this server a breaker of promises; one that ignores keys stays one.
func TestForwardedIdempotencyStatus(t *testing.T) {
	forward := probe.Step{Do: func(ctx context.Context, _ *probev1.Request) (*probev1.Response, error) {
		md := metadata.Pairs(statusKey, "executed")
		if err := grpc.SetHeader(ctx, md); err != nil {
			return nil, err
		}
		return &probev1.Response{}, grpc.SetTrailer(ctx, md)
	}}
	bubbles(t, "a server that keeps it", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.KeyedOptional, forward)
		_, err := r.call(t, probe.KeyedOptional, request("x"))
		wantOK(t, err)
		if r.client.Explain(r.conn, probe.KeyedOptional).Demoted {
			t.Error("demoted")
		}
	})
	bubbles(t, "a server without a store", func(t *testing.T) {
		r := start(t, setup{asShipped: true})
		r.srv.Script(probe.KeyedOptional, forward)
		_, err := r.call(t, probe.KeyedOptional, request("x"))
		wantOK(t, err)
		if !r.client.Explain(r.conn, probe.KeyedOptional).Demoted {
			t.Error("not demoted")
		}
	})
}
