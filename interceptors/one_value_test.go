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

// A retry says once how often the call was tried, whatever a caller that
// forwards its own metadata says too.
func TestForwardedAttemptsAreReplaced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Read, unavailable())
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := probe.Call(metadata.AppendToOutgoingContext(ctx, attemptsKey, "7"), r.conn, probe.Read, request("x"))
		wantOK(t, err)
		attempts := r.counter.Attempts()
		wantEqual(t, "attempts", len(attempts), 2)
		wantEqual(t, "value", one(attempts[1].Metadata, attemptsKey), "1")
	})
}

// Of the wishes in an error's chain "never" wins, else the longest wait.
func TestStrongestRetryAfterIsSpoken(t *testing.T) {
	const never = -1
	for name, c := range map[string]struct {
		inner, outer time.Duration
		want         string
	}{
		"never inside":   {never, time.Second, "-1"},
		"never outside":  {time.Second, never, "-1"},
		"longer inside":  {5 * time.Second, time.Second, "5000"},
		"longer outside": {time.Second, 5 * time.Second, "5000"},
	} {
		bubbles(t, name, func(t *testing.T) {
			r := start(t, setup{plainClient: true})
			r.srv.Script(probe.Read, probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
				err := status.Error(codes.Unavailable, "later")
				return nil, interceptors.RetryAfter(interceptors.RetryAfter(err, c.inner), c.outer)
			}})
			var trailer metadata.MD
			_, err := r.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
			wantCode(t, err, codes.Unavailable)
			if one(trailer, pushbackKey) != c.want {
				t.Errorf("pushback %q, want %q", trailer[pushbackKey], c.want)
			}
		})
	}
}
