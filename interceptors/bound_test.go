package interceptors_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// A proxy passes on whatever method names it is given. What is kept, and said,
// of methods is bounded, and what does not fit is not relied on.
func TestMethodsOfAChannelAreBounded(t *testing.T) {
	const bound, names = 4096, 20_000
	log := new(logLines)
	c := newClient(t, interceptors.WithLogger(slog.New(log)), interceptors.WithPolicy(policy.Policy{
		Idempotency: policy.Keyed, Learn: policy.Learn{AttemptQuantile: 0.9},
	}))
	conn := unconnected(t)
	finish := func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
		for _, o := range opts {
			if o, ok := o.(grpc.OnFinishCallOption); ok {
				o.OnFinish(nil)
			}
		}
		return nil
	}
	before := heap()
	for i := range names {
		method := fmt.Sprintf("/some.Service%d/Method", i)
		wantOK(t, c.Unary()(t.Context(), method, request("x"), &probev1.Response{}, conn, finish))
	}
	if grown := int64(heap()) - int64(before); grown > 48<<20 {
		t.Errorf("the heap grew by %d MiB for %d methods", grown>>20, names)
	}
	if n := log.count("ERROR belay: the server does not honour"); n > bound {
		t.Errorf("%d lines were logged, want at most %d", n, bound)
	}
	if !c.Explain(conn, "/one.More/Method").Demoted {
		t.Error("a promise is relied on of which nothing can be remembered")
	}
}
