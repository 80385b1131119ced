package interceptors_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// A thousand goroutines with every kind of end on one channel: what they held
// is all given back.
func TestThousandGoroutines(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const goroutines, each = 1000, 2
		own := &countingBreaker{Breaker: breaker.New(breaker.Config{MinCalls: 1 << 30})}
		bank := budget.New(budget.Config{Initial: 50})
		var executions probe.Exec
		r := start(t, setup{
			asShipped: true,
			client: []interceptors.ClientOption{
				interceptors.WithBudget(bank), interceptors.WithOwnBreaker(own),
				interceptors.WithPolicy(policy.Policy{AttemptTimeout: 50 * time.Millisecond, Backoff: policy.Backoff{Base: time.Millisecond, Max: 5 * time.Millisecond}}),
			},
			server: []interceptors.ServerOption{memory(idempotency.Config{MaxExecution: time.Second})},
			inner: []grpc.DialOption{onAttempt(func(context.Context, int) error {
				if rand.N(50) == 0 {
					panic("scripted")
				}
				return nil
			})},
		})
		r.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			if id := req.GetText(); id != "" {
				executions.Add(id)
			}
			switch rand.N(8) {
			case 0:
				return nil, status.Error(codes.Unavailable, "busy")
			case 1:
				return nil, interceptors.RetryAfter(status.Error(codes.ResourceExhausted, "quota"), time.Duration(rand.N(10)-1)*time.Millisecond)
			case 2:
				return nil, status.Error(codes.NotFound, "gone")
			case 3:
				select {
				case <-ctx.Done():
					return nil, status.FromContextError(ctx.Err()).Err()
				case <-time.After(time.Duration(rand.N(100)) * time.Millisecond): //nolint:forbidigo // fake time
				}
			}
			return &probev1.Response{}, nil
		}})

		func() { // so that the connection's own goroutines are there before we count
			defer func() { _ = recover() }()
			_, _ = r.call(t, probe.Read, &probev1.Request{}, grpc.WaitForReady(true))
		}()
		r.conn.Connect()
		settle()
		before := runtime.NumGoroutine()
		var wg sync.WaitGroup
		var panics atomic.Int32
		for range goroutines {
			wg.Go(func() {
				for range each {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+rand.N(200))*time.Millisecond)
					if rand.N(4) == 0 {
						time.AfterFunc(time.Duration(rand.N(30))*time.Millisecond, cancel)
					}
					method := []string{probe.Read, probe.Undeclared, probe.Keyed, probe.KeyedField}[rand.N(4)]
					func() {
						defer func() {
							if recover() != nil {
								panics.Add(1)
							}
						}()
						_, err := probe.Call(ctx, r.conn, method, &probev1.Request{})
						var ce *interceptors.CallError
						if errors.As(err, &ce) && (ce.Stop() == interceptors.NotStopped || status.Code(err) == codes.OK) {
							t.Errorf("error %v without a reason or a code", err)
						}
					}()
					cancel()
				}
			})
		}
		wg.Wait()
		time.Sleep(2 * time.Second) // executions that their callers left
		settle()

		s := bank.Snapshot()
		if s.InFlight != 0 || s.Withdrawals != s.Refunds+s.Spent || float64(s.Spent) > 50+0.1*float64(s.Deposits) {
			t.Errorf("bank %+v: permits are out, or more was spent than there was", s)
		}
		if s.Withdrawals == 0 || s.Refunds == 0 || s.Spent == 0 || panics.Load() == 0 {
			t.Errorf("bank %+v, %d panics: this run shows nothing", s, panics.Load())
		}
		if allowed, done := own.allowed.Load(), own.done.Load(); allowed != done || allowed == 0 {
			t.Errorf("%d permits of the breaker, %d given back", allowed, done)
		}
		if after := runtime.NumGoroutine(); after > before+5 {
			t.Errorf("%d goroutines, %d before", after, before)
		}
	})
}

// countingBreaker counts what Belay's breaker admits and is told.
type countingBreaker struct {
	*breaker.Breaker

	allowed, done atomic.Int64
}

func (b *countingBreaker) Allow(string) (func(breaker.Outcome, time.Duration), error) {
	permit, err := b.Breaker.Allow()
	if err != nil {
		return nil, err
	}
	b.allowed.Add(1)
	var once atomic.Bool
	return func(o breaker.Outcome, d time.Duration) {
		if once.Swap(true) {
			b.done.Add(1 << 32) // a permit that was given back twice must show
		}
		b.done.Add(1)
		permit.Done(o, d)
	}, nil
}

// Half-open probes of a crowd are all given back too: the breaker closes.
func TestCrowdOnAnOpenBreaker(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{asShipped: true, client: []interceptors.ClientOption{
			interceptors.WithBreaker(breaker.Config{MinCalls: 10, OpenFor: 100 * time.Millisecond}),
		}})
		r.srv.Default(unavailable())
		crowd := func() {
			var wg sync.WaitGroup
			for range 1000 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(5+rand.N(50))*time.Millisecond)
					defer cancel()
					_, _ = probe.Call(ctx, r.conn, probe.Read, request("x"))
				})
			}
			wg.Wait()
		}
		crowd()
		wantEqual(t, "state", r.breakerState(), breaker.Open)
		r.srv.Default(probe.Step{})
		for range 5 {
			time.Sleep(200 * time.Millisecond)
			crowd()
		}
		snapshot := r.client.Breaker(r.conn, probeService).Snapshot()
		wantEqual(t, "state on a healthy server", snapshot.State, breaker.Closed)
		wantEqual(t, "bank's permits in flight", r.client.Budget(r.conn).Snapshot().InFlight, 0)
	})
}
