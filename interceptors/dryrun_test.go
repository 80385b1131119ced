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
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
)

func TestDryRunEnforcesNothingAndReports(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{asShipped: true, client: []interceptors.ClientOption{interceptors.WithDryRun()}})
		r.srv.Default(unavailable())
		for range 30 {
			_, err := r.call(t, probe.Idempotent, request("x"))
			wantCode(t, err, codes.Unavailable)
		}
		_, _ = r.call(t, probe.Undeclared, request("x"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, _ = probe.Call(ctx, r.conn, probe.Idempotent, request("x"))

		if n := r.counter.Count(); n != 32 {
			t.Errorf("%d attempts of 32 calls: every call makes one", n)
		}
		got := r.client.DryRunReport()
		if got.Calls != 32 || got.Failed != 32 {
			t.Errorf("calls %d, failed %d, want 32 of both", got.Calls, got.Failed)
		}
		if got.Retried != 3 {
			t.Errorf("%d retries, want the 3 that a full bank pays for", got.Retried)
		}
		for stop, least := range map[interceptors.StopReason]int64{
			interceptors.BudgetSpent: 1, interceptors.BreakerOpen: 1, interceptors.NotDeclared: 1, interceptors.DeadlineTooShort: 1,
		} {
			if got.Withheld[stop] < least {
				t.Errorf("%v: %d, want at least %d (all: %v)", stop, got.Withheld[stop], least, got.Withheld)
			}
		}
		time.Sleep(61 * time.Minute)
		if old := r.client.DryRunReport(); old.Calls != 0 || old.Retried != 0 || len(old.Withheld) != 0 {
			t.Errorf("an hour later: %+v, want nothing", old)
		}
	})
}

func TestDryRunServerRefusesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var would []interceptors.Event
		observer := interceptors.ObserverFunc(func(_ context.Context, e interceptors.Event) {
			if e.Kind == interceptors.EventDryRun {
				would = append(would, e)
			}
		})
		r := start(t, setup{
			client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{MinAttempt: time.Nanosecond})},
			server: []interceptors.ServerOption{
				interceptors.WithDryRun(), interceptors.WithObserver(observer),
				interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: time.Second}),
			},
		})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Idempotent, request("x"))
		wantOK(t, err)
		if len(would) != 1 || would[0].Stop != interceptors.DeadlineTooShort {
			t.Errorf("events %+v, want the refusal that was not made", would)
		}
	})
}

// What a handler ran out of is said as without a dry run.
func TestDryRunServerTellsOfItsCallersDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := newServer(t, interceptors.WithDryRun(),
			interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: time.Second}))
		stream := &trailerStream{}
		ctx, cancel := context.WithTimeout(grpc.NewContextWithServerTransportStream(t.Context(), stream), 100*time.Millisecond)
		defer cancel()
		_, err := server.UnaryGuard()(ctx, nil, &grpc.UnaryServerInfo{FullMethod: probe.Read},
			func(ctx context.Context, _ any) (any, error) {
				<-ctx.Done()
				return nil, status.FromContextError(ctx.Err()).Err()
			})
		wantCode(t, err, codes.DeadlineExceeded)
		wantEqual(t, "reason", one(stream.trailer, reasonKey), "DEADLINE")
	})
}

// trailerStream keeps the trailer that a server sets.
type trailerStream struct{ trailer metadata.MD }

func (*trailerStream) Method() string               { return probe.Read }
func (*trailerStream) SetHeader(metadata.MD) error  { return nil }
func (*trailerStream) SendHeader(metadata.MD) error { return nil }
func (s *trailerStream) SetTrailer(md metadata.MD) error {
	s.trailer = metadata.Join(s.trailer, md)
	return nil
}
