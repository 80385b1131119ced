package interceptors_test

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/internal/probe"
)

// An error reply of a keyed call has its mark in the trailer only: a header
// would commit a native client, which then could not retry (gRFC A6).
func TestErrorReplyIsTrailersOnly(t *testing.T) {
	for _, method := range []string{probe.Keyed, probe.KeyedOptional} {
		bubbles(t, method, func(t *testing.T) {
			r := start(t, setup{plainClient: true})
			for range 2 { // executed, then replayed
				r.srv.Script(method, probe.Step{Code: codes.NotFound})
				ctx := metadata.AppendToOutgoingContext(t.Context(), keyKey, "k")
				var header, trailer metadata.MD
				_, err := probe.Call(ctx, r.conn, method, request("x"), grpc.Header(&header), grpc.Trailer(&trailer))
				wantCode(t, err, codes.NotFound)
				wantEqual(t, "values in the header", len(header[statusKey]), 0)
				wantEqual(t, "values in the trailer", len(trailer[statusKey]), 1)
			}
		})
	}
}
