package interceptors_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// An execution outlives its caller; Drain outlives the execution.
func TestDrainWaitsForExecutions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		done := false
		r.srv.Script(probe.Keyed, probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			time.Sleep(5 * time.Second)
			done = true
			return &probev1.Response{}, nil
		}})
		_, err := r.call(t, probe.Keyed, request("x")) // gives up after two seconds
		if err == nil {
			t.Fatal("the call outlived its deadline")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.server.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Drain with a second to wait: %v, want DeadlineExceeded", err)
		}
		wantOK(t, r.server.Drain(t.Context()))
		synctest.Wait()
		if !done {
			t.Error("Drain returned before the execution did")
		}
	})
}
