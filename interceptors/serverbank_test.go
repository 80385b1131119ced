package interceptors_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// failedRetry makes one call that says it is a retry and fails, and returns
// what the server says about another.
func failedRetry(t *testing.T, r *rig, method string, step probe.Step) string {
	t.Helper()
	r.srv.Script(method, step)
	var trailer metadata.MD
	ctx := metadata.AppendToOutgoingContext(t.Context(), attemptsKey, "1")
	_, err := probe.Call(ctx, r.conn, method, request("x"), grpc.Trailer(&trailer))
	wantCode(t, err, step.Code)
	return one(trailer, pushbackKey)
}

func TestServerBankArithmetic(t *testing.T) {
	plain := setup{plainClient: true}

	bubbles(t, "starts with 3", func(t *testing.T) {
		r := start(t, plain)
		for i, want := range []string{"", "", "-1", "-1"} { // balance 2, 1, 0, -1
			wantEqual(t, "pushback after failed retry "+string(rune('1'+i)), failedRetry(t, r, probe.Read, unavailable()), want)
		}
		// An empty bank speaks on first tries too, and not on verdicts.
		r.srv.Script(probe.Read, unavailable())
		var trailer metadata.MD
		_, _ = r.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
		wantEqual(t, "pushback on a first try", one(trailer, pushbackKey), "-1")
		wantEqual(t, "pushback on NOT_FOUND", failedRetry(t, r, probe.Read, probe.Step{Code: codes.NotFound}), "")

		// Another service has a bank of its own.
		wantEqual(t, "pushback of another service", failedRetry(t, r, probe.Reads, unavailable()), "")
	})

	bubbles(t, "earns 0.06", func(t *testing.T) {
		r := start(t, plain)
		for range 3 {
			failedRetry(t, r, probe.Read, unavailable())
		}
		says := func() string {
			r.srv.Script(probe.Read, unavailable())
			var trailer metadata.MD
			_, _ = r.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
			return one(trailer, pushbackKey)
		}
		for n := 1; n <= 17; n++ { // 16 × 0.06 < 1 ≤ 17 × 0.06
			_, err := r.call(t, probe.Read, request("x"))
			wantOK(t, err)
			want := "-1"
			if n == 17 {
				want = ""
			}
			wantEqual(t, "pushback", says(), want)
		}
	})

	bubbles(t, "retries that work earn nothing", func(t *testing.T) {
		r := start(t, plain)
		for range 3 {
			failedRetry(t, r, probe.Read, unavailable())
		}
		for range 100 {
			ctx := metadata.AppendToOutgoingContext(t.Context(), attemptsKey, "1")
			_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
			wantOK(t, err)
		}
		wantEqual(t, "pushback", failedRetry(t, r, probe.Read, unavailable()), "-1")
	})

	bubbles(t, "holds what two seconds earned", func(t *testing.T) {
		r := start(t, plain)
		for range 200 { // 12 retries, for as long as they are recent
			_, err := r.call(t, probe.Read, request("x"))
			wantOK(t, err)
		}
		retriesUntilNever := func() int {
			for n := 1; n < 100; n++ {
				if failedRetry(t, r, probe.Read, unavailable()) == "-1" {
					return n
				}
			}
			return 100
		}
		wantEqual(t, "failed retries at once", retriesUntilNever(), 12)
		for range 200 {
			_, err := r.call(t, probe.Read, request("x"))
			wantOK(t, err)
		}
		time.Sleep(2500 * time.Millisecond)
		wantEqual(t, "failed retries later", retriesUntilNever(), 3)
	})

	bubbles(t, "CANCELLED is nobody's failure", func(t *testing.T) {
		r := start(t, plain)
		for range 5 {
			wantEqual(t, "pushback", failedRetry(t, r, probe.Read, probe.Step{Code: codes.Canceled}), "")
		}
		wantEqual(t, "pushback", failedRetry(t, r, probe.Read, unavailable()), "")
	})
}

// A caller that makes service names up gets a bank, and fills no memory with
// more than the table holds.
func TestServerBankOfUnknownServices(t *testing.T) {
	bubble(t, func(t *testing.T) {
		failing := grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
			return status.Error(codes.Unavailable, "nobody here")
		})
		r := start(t, setup{plainClient: true, between: []grpc.ServerOption{failing}})
		for i := range 1100 {
			var trailer metadata.MD
			err := r.conn.Invoke(t.Context(), fmt.Sprintf("/unknown.S%d/M", i), request("x"), &probev1.Response{}, grpc.Trailer(&trailer))
			wantCode(t, err, codes.Unavailable)
			wantEqual(t, fmt.Sprintf("pushback of service %d", i), one(trailer, pushbackKey), "")
		}
	})
}

// Many plain gRPC clients that each retry four times, against a server that
// fails a share of its calls: what reaches the handler stays near one per call,
// which no bank of a single client could see to.
func TestServerBankBoundsManyNativeClients(t *testing.T) {
	const clients, seconds = 25, 20
	simulate := func(t *testing.T, belay bool, p float64) (amplification, success float64) {
		t.Helper()
		r := start(t, setup{plainClient: true, plainServer: !belay})
		var mu sync.Mutex
		random := rand.New(rand.NewPCG(1, 2))
		r.srv.Default(probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			if random.Float64() < p {
				return nil, status.Error(codes.Unavailable, "failing")
			}
			return &probev1.Response{}, nil
		}})
		var ok atomic.Int64
		var wg sync.WaitGroup
		for i := range clients {
			conn := r.network.Dial(t, grpc.WithDefaultServiceConfig(nativeRetry))
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Second / clients)
				for range seconds {
					began := time.Now()
					if _, err := probe.Call(t.Context(), conn, probe.Read, request("x")); err == nil {
						ok.Add(1)
					}
					time.Sleep(time.Second - time.Since(began))
				}
			})
		}
		wg.Wait()
		return float64(r.srv.TotalHits()) / (clients * seconds), float64(ok.Load()) / (clients * seconds)
	}
	for _, c := range []struct {
		name            string
		p               float64
		atMost, success float64 // amplification, share of calls that work
	}{
		{"p=10%", 0.1, 1.17, 0.98},
		{"p=50%", 0.5, 1.2, 0.45},
		{"p=100%", 1, 1.02, 0},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			amplification, success := simulate(t, true, c.p)
			t.Logf("%s: %.3f calls of the handler per call, %.2f %% succeed", c.name, amplification, 100*success)
			if amplification > c.atMost || success < c.success {
				t.Errorf("amplification %.3f, success %.3f; want at most %.2f and at least %.2f", amplification, success, c.atMost, c.success)
			}
		})
	}
	// The control: the same clients without the bank.
	bubbles(t, "without Belay, p=100%", func(t *testing.T) {
		amplification, _ := simulate(t, false, 1)
		if amplification < 3.9 {
			t.Errorf("amplification %.3f without a bank: this simulation does not show what it is to bound", amplification)
		}
	})
}
