package interceptors_test

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// okError is an error whose status says that there is none.
type okError struct{}

func (okError) Error() string              { return "it did not work" }
func (okError) GRPCStatus() *status.Status { return status.New(codes.OK, "") }

// A handler's error is never told as a success, whatever its status says.
func TestErrorThatCallsItselfOK(t *testing.T) {
	for _, method := range []string{probe.Undeclared, probe.Keyed} {
		bubbles(t, method, func(t *testing.T) {
			store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
			r := start(t, setup{server: []interceptors.ServerOption{stored(store, idempotency.Config{})}})
			r.srv.Script(method, probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
				return &probev1.Response{Text: "done"}, okError{}
			}})
			_, err := r.call(t, method, request("x"))
			wantCode(t, err, codes.Unknown)
		})
	}
}
