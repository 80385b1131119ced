package interceptors_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// A handler that passes on the trailers of a downstream answer, as proxies do,
// does not make this hop say that nothing was executed, or that a refusal is
// Belay's own.
func TestForwardedTrailersAreNobodysWord(t *testing.T) {
	for name, trailer := range map[string]metadata.MD{
		"not executed": metadata.Pairs(executedKey, "no"),
		"in flight":    metadata.Pairs(reasonKey, "IN_FLIGHT"),
		"both":         metadata.Pairs(executedKey, "no", reasonKey, "IN_FLIGHT"),
	} {
		bubbles(t, name, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(probe.Undeclared, probe.Step{
				Do: func(ctx context.Context, _ *probev1.Request) (*probev1.Response, error) {
					if err := grpc.SetTrailer(ctx, trailer); err != nil {
						return nil, err
					}
					return nil, status.Error(codes.Unavailable, "downstream is away")
				},
			})
			_, err := r.call(t, probe.Undeclared, request("x"))
			wantStop(t, err, interceptors.NotDeclared, interceptors.Maybe)
			r.wantCounts(t, probe.Undeclared, 1, 1)
		})
	}
	bubbles(t, "stream", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ServerStreamUndeclared, probe.Step{
			Trailer: metadata.Pairs(executedKey, "no"), Code: codes.Unavailable,
		})
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		s, err := probev1.NewProbeServiceClient(r.conn).ServerStreamUndeclared(ctx, request("x"))
		wantOK(t, err)
		_, err = s.Recv()
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "hits", r.srv.Hits(probe.ServerStreamUndeclared), 1)
	})
}
