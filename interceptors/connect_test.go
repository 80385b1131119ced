package interceptors_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
)

// downRig is a rig whose network is down, with quick reconnects and a bank that
// has nothing to lend.
func downRig(t *testing.T, p policy.Policy) *rig {
	t.Helper()
	r := start(t, setup{
		asShipped: true,
		client:    []interceptors.ClientOption{interceptors.WithoutBreaker(), interceptors.WithPolicy(p)},
		inner: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1, MaxDelay: 50 * time.Millisecond},
		})},
	})
	r.network.Down()
	return r
}

// What was never sent is sent again, whatever is declared, for as long as the
// channel may need to connect, and costs the bank nothing.
func TestConnectGrace(t *testing.T) {
	bubbles(t, "the server appears", func(t *testing.T) {
		r := downRig(t, policy.Policy{})
		time.AfterFunc(500*time.Millisecond, r.network.Up)
		began := time.Now()
		_, err := probe.Call(t.Context(), r.conn, probe.Undeclared, request("x"))
		wantOK(t, err)
		wantBetween(t, "elapsed", time.Since(began), 500*time.Millisecond, 700*time.Millisecond)
		wantEqual(t, "hits", r.srv.Hits(probe.Undeclared), 1)
		wantEqual(t, "withdrawals", r.client.Budget(r.conn).Snapshot().Withdrawals, 0)
		// What no server saw is not one of the previous attempts (gRFC A6).
		wantEqual(t, "previous attempts", r.srv.Seen(probe.Undeclared)[0].PreviousAttempts(), 0)
	})

	bubbles(t, "the server never appears", func(t *testing.T) {
		r := downRig(t, policy.Policy{})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Undeclared, request("x"))
		wantBetween(t, "elapsed", time.Since(began), time.Second, 1200*time.Millisecond)
		wantCode(t, err, codes.Unavailable)
		if !strings.Contains(err.Error(), "connection refused") {
			t.Errorf("error %v is not the connection's", err)
		}
		wantStop(t, err, interceptors.Unreachable, interceptors.No)

		// The grace is the channel's, not each call's.
		began = time.Now()
		_, err = probe.Call(ctx, r.conn, probe.Undeclared, request("x"))
		wantEqual(t, "elapsed of the second call", time.Since(began), 0)
		wantCode(t, err, codes.Unavailable)

		// It starts again once the channel has worked.
		r.network.Up()
		_, err = probe.Call(ctx, r.conn, probe.Undeclared, request("x"), grpc.WaitForReady(true))
		wantOK(t, err)
		r.network.Down()
		settle() // or the call would still be sent on the dying connection
		time.AfterFunc(300*time.Millisecond, r.network.Up)
		_, err = probe.Call(ctx, r.conn, probe.Undeclared, request("x"))
		wantOK(t, err)
		wantEqual(t, "withdrawals", r.client.Budget(r.conn).Snapshot().Withdrawals, 0)
	})

	bubbles(t, "a grace that was over long ago", func(t *testing.T) {
		r := downRig(t, policy.Policy{})
		_, err := probe.Call(t.Context(), r.conn, probe.Undeclared, request("x"))
		wantStop(t, err, interceptors.Unreachable, interceptors.No)
		r.network.Up() // which no call is there to see
		time.Sleep(time.Hour)
		r.network.Down()
		settle()
		time.AfterFunc(300*time.Millisecond, r.network.Up)
		_, err = probe.Call(t.Context(), r.conn, probe.Undeclared, request("x"))
		wantOK(t, err)
	})

	bubbles(t, "calls now and then", func(t *testing.T) {
		r := downRig(t, policy.Policy{})
		for i := range 20 {
			began := time.Now()
			_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"))
			wantStop(t, err, interceptors.Unreachable, interceptors.No)
			if i > 0 { // the first has waited for all
				wantEqual(t, "elapsed", time.Since(began), 0)
			}
			time.Sleep(50 * time.Second)
		}
	})

	bubbles(t, "a call's own wait", func(t *testing.T) {
		r := downRig(t, policy.Policy{
			MaxAttempts: 10, ConnectGrace: 100 * time.Millisecond, AttemptTimeout: 50 * time.Millisecond, Backoff: fixed(5 * time.Minute),
		})
		began := time.Now()
		_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"))
		wantStop(t, err, interceptors.Unreachable, interceptors.No)
		wantBetween(t, "elapsed", time.Since(began), 0, 6*time.Minute)
	})

	bubbles(t, "the caller's deadline is earlier", func(t *testing.T) {
		r := downRig(t, policy.Policy{})
		ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Undeclared, request("x"))
		wantBetween(t, "elapsed", time.Since(began), 0, 400*time.Millisecond)
		if reaches(err, codes.Unavailable) == nil || !strings.Contains(err.Error()+reaches(err, codes.Unavailable).Message(), "connection refused") {
			t.Errorf("error %v has lost the connection's", err)
		}
	})

	bubbles(t, "a grace of one's own", func(t *testing.T) {
		r := downRig(t, policy.Policy{ConnectGrace: 200 * time.Millisecond})
		began := time.Now()
		_, err := probe.Call(t.Context(), r.conn, probe.Undeclared, request("x"))
		wantCode(t, err, codes.Unavailable)
		wantBetween(t, "elapsed", time.Since(began), 200*time.Millisecond, 350*time.Millisecond)
	})

	// A crowd does not all wait: who is beyond the bound fails as soon as its
	// attempts do.
	bubbles(t, "bounded waiters", func(t *testing.T) {
		const calls, bound = 400, 256
		r := downRig(t, policy.Policy{MaxAttempts: 2, Backoff: fixed(time.Millisecond)})
		var mu sync.Mutex
		early, late := 0, 0
		began := time.Now()
		var wg sync.WaitGroup
		for range calls {
			wg.Go(func() {
				_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"))
				if status.Code(err) != codes.Unavailable {
					t.Errorf("error %v, want UNAVAILABLE", err)
				}
				mu.Lock()
				defer mu.Unlock()
				if time.Since(began) < 900*time.Millisecond {
					early++
				} else {
					late++
				}
			})
		}
		wg.Wait()
		if late > bound || early < calls-bound {
			t.Errorf("%d calls waited and %d did not, want at most %d to wait", late, early, bound)
		}
		if late == 0 {
			t.Error("nobody waited")
		}
		wantBetween(t, "elapsed", time.Since(began), 900*time.Millisecond, 1500*time.Millisecond)
	})
}

// With gRPC's own waits a channel whose server is back would stay broken for as
// long again, and a restart would outlast ConnectGrace.
func TestReconnects(t *testing.T) {
	// untilBack calls ten times a second, each call without a retry, while the
	// server is gone for so long, and returns when the first works again.
	untilBack := func(t *testing.T, gone time.Duration, dial ...grpc.DialOption) time.Duration {
		t.Helper()
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithoutBreaker()}, inner: dial})
		_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"))
		wantOK(t, err)
		r.network.Down()
		settle()
		back := time.Now().Add(gone)
		time.AfterFunc(gone, r.network.Up)
		for {
			if _, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"), interceptors.NoRetry()); err == nil {
				return time.Since(back)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	bubbles(t, "within two seconds of an outage", func(t *testing.T) {
		for _, gone := range []time.Duration{time.Second, 5 * time.Second, time.Minute, time.Hour} {
			wantBetween(t, "back after", untilBack(t, gone), 0, 2100*time.Millisecond)
		}
	})
	bubbles(t, "the user's own wait counts", func(t *testing.T) {
		own := grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 10 * time.Second, Multiplier: 1, MaxDelay: 10 * time.Second}, MinConnectTimeout: time.Second,
		})
		wantBetween(t, "back after", untilBack(t, 5*time.Second, own), 4900*time.Millisecond, 5200*time.Millisecond)
	})
	bubbles(t, "a restart within the grace", func(t *testing.T) {
		r := start(t, setup{})
		_, err := probe.Call(t.Context(), r.conn, probe.Undeclared, request("x"))
		wantOK(t, err)
		r.network.Down()
		settle()
		time.AfterFunc(400*time.Millisecond, r.network.Up)
		_, err = probe.Call(t.Context(), r.conn, probe.Undeclared, request("x"))
		wantOK(t, err)
	})
}

// A connection that breaks under a call leaves open what happened.
func TestConnectionCut(t *testing.T) {
	for method, want := range map[string]codes.Code{probe.Undeclared: codes.Unavailable, probe.Read: codes.OK, probe.Keyed: codes.OK} {
		bubbles(t, method, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(method, probe.Step{Delay: time.Second})
			time.AfterFunc(100*time.Millisecond, r.network.Cut)
			_, err := probe.Call(t.Context(), r.conn, method, request("x"))
			wantCode(t, err, want)
			if err != nil {
				attempts := wantStop(t, err, interceptors.NotDeclared, interceptors.Maybe).Attempts()
				wantEqual(t, "origin", attempts[0].Origin, interceptors.OriginTransport)
				wantEqual(t, "sent", attempts[0].Sent, true)
			}
			if method == probe.Keyed {
				wantEqual(t, "effects", r.srv.Effects(method), 1)
			}
		})
	}
}
