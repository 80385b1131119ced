package interceptors_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

func hedging() interceptors.ClientOption {
	return interceptors.WithPolicy(policy.Policy{Hedge: policy.Hedge{After: 20 * time.Millisecond}})
}

// earn makes calls that succeed, so that the bank can pay for hedges: one for
// fifty. It returns with the counter at zero.
func (r *rig) earn(t *testing.T, method string, calls int) {
	t.Helper()
	for range calls {
		if _, err := r.call(t, method, request("earn")); err != nil {
			t.Fatal(err)
		}
	}
	r.counter.Reset()
}

func TestHedgeSuccessWinsAndLoserIsCancelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{hedging()}})
		r.earn(t, probe.Read, 50)
		r.srv.Script(probe.Read,
			probe.Step{Delay: time.Second, Header: metadata.Pairs("who", "slow"), Trailer: metadata.Pairs("t", "slow")},
			probe.Step{Header: metadata.Pairs("who", "fast")})

		var header, trailer metadata.MD
		var from peer.Peer
		finishes := 0
		begin := time.Now()
		resp, err := r.call(t, probe.Read, request("x"), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from),
			grpc.OnFinish(func(error) { finishes++ }))
		wantOK(t, err)
		if took := time.Since(begin); took != 20*time.Millisecond {
			t.Errorf("took %v, want the hedge's 20ms", took)
		}
		synctest.Wait()
		attempts := r.counter.Attempts()
		if len(attempts) != 2 {
			t.Fatalf("%d attempts, want 2", len(attempts))
		}
		if got := attempts[0].Metadata.Get(interceptors.MetadataHedge); got != nil {
			t.Errorf("the first attempt says it is a hedge: %v", got)
		}
		if got := attempts[1].Metadata.Get(interceptors.MetadataHedge); len(got) != 1 {
			t.Errorf("the hedge says %v, want one value", got)
		}
		if code := status.Code(attempts[0].Err); code != codes.Canceled {
			t.Errorf("the superseded attempt ended with %v, want Canceled", code)
		}
		if got := header.Get("who"); len(got) != 1 || got[0] != "fast" {
			t.Errorf("header %v, want the winner's", got)
		}
		if trailer.Get("t") != nil {
			t.Errorf("trailer of the superseded attempt: %v", trailer)
		}
		if from.Addr == nil || finishes != 1 || resp == nil {
			t.Errorf("peer %v, %d finishes, reply %v", from.Addr, finishes, resp)
		}
	})
}

func TestHedgeOnlyWhatMayBeHedged(t *testing.T) {
	for _, c := range []struct {
		method     string
		repeatable bool
		hedged     bool
	}{
		{probe.Read, false, true},
		{probe.Idempotent, false, false},
		{probe.Keyed, false, false},
		{probe.Undeclared, false, false},
		{probe.Idempotent, true, true},
		{probe.Keyed, true, true},
		{probe.Undeclared, true, false},
	} {
		bubbles(t, fmt.Sprintf("%s repeatable=%v", c.method, c.repeatable), func(t *testing.T) {
			r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{
				Hedge: policy.Hedge{After: 20 * time.Millisecond, Repeatable: c.repeatable},
			})}})
			r.earn(t, c.method, 50)
			r.srv.Script(c.method, probe.Step{Delay: 300 * time.Millisecond}, probe.Step{})
			_, err := r.call(t, c.method, request("x"))
			wantOK(t, err)
			synctest.Wait()
			if got, want := r.counter.Count() == 2, c.hedged; got != want {
				t.Errorf("%d attempts, hedged want %v", r.counter.Count(), want)
			}
		})
	}
}

// The bank starts empty, earns 0.02 per success and gives nothing back.
func TestHedgeBankIsItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{hedging()}})
		slow := func() int {
			r.counter.Reset()
			r.srv.Script(probe.Read, probe.Step{Delay: 100 * time.Millisecond}, probe.Step{Delay: 100 * time.Millisecond})
			if _, err := r.call(t, probe.Read, request("x")); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			r.srv.Script(probe.Read)
			return r.counter.Count()
		}
		if n := slow(); n != 1 {
			t.Errorf("an empty bank paid for %d attempts", n)
		}
		r.earn(t, probe.Read, 49)
		if n := slow(); n != 2 {
			t.Errorf("with 50 successes behind it: %d attempts, want 2", n)
		}
		if n := slow(); n != 1 {
			t.Errorf("the hedge was paid back: %d attempts, want 1", n)
		}
		if s := r.client.Budget(r.conn).Snapshot(); s.Withdrawals != 0 {
			t.Errorf("the retry bank paid for hedges: %+v", s)
		}
	})
}

func TestHedgesAreOffAfterTheServerAskedForLess(t *testing.T) {
	hint := 5 * time.Millisecond
	for name, step := range map[string]probe.Step{
		"pushback":           {Code: codes.Unavailable, Pushback: "5"},
		"negative pushback":  {Code: codes.Unavailable, Pushback: "-1"},
		"RetryInfo":          {Code: codes.Unavailable, RetryInfo: &hint},
		"RESOURCE_EXHAUSTED": {Code: codes.ResourceExhausted},
	} {
		bubbles(t, name, func(t *testing.T) {
			r := start(t, setup{client: []interceptors.ClientOption{hedging()}})
			r.earn(t, probe.Read, 200)
			r.srv.Script(probe.Read, step)
			_, _ = r.call(t, probe.Read, request("shed"))

			slow := func() int {
				r.counter.Reset()
				r.srv.Script(probe.Read, probe.Step{Delay: 100 * time.Millisecond}, probe.Step{})
				if _, err := r.call(t, probe.Read, request("x")); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				r.srv.Script(probe.Read)
				return r.counter.Count()
			}
			if n := slow(); n != 1 {
				t.Errorf("%d attempts right after, want 1", n)
			}
			time.Sleep(10 * time.Second)
			r.earn(t, probe.Read, 200) // what the bank held has shrunk with the traffic
			if n := slow(); n != 2 {
				t.Errorf("%d attempts ten seconds later, want 2", n)
			}
		})
	}
}

// A hedge that fails yields to the attempt that still runs, unless its answer
// would be the other's too.
func TestHedgeFailureYields(t *testing.T) {
	for _, c := range []struct {
		name  string
		hedge probe.Step
		want  codes.Code
		took  time.Duration
	}{
		{"transient", unavailable(), codes.OK, 100 * time.Millisecond},
		{"final", probe.Step{Code: codes.NotFound}, codes.NotFound, 20 * time.Millisecond},
		{"stop asked", probe.Step{Code: codes.Unavailable, Pushback: "-1"}, codes.Unavailable, 20 * time.Millisecond},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{client: []interceptors.ClientOption{hedging()}})
			r.earn(t, probe.Read, 50)
			r.srv.Script(probe.Read, probe.Step{Delay: 100 * time.Millisecond}, c.hedge)
			begin := time.Now()
			_, err := r.call(t, probe.Read, request("x"))
			wantCode(t, err, c.want)
			if took := time.Since(begin); took != c.took {
				t.Errorf("took %v, want %v", took, c.took)
			}
			synctest.Wait()
		})
	}
}

// A superseded attempt says nothing about the server: with only it to go by,
// a breaker that opens on one failure stays closed.
func TestHedgeLoserIsNeutral(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		outcomes := map[breaker.Outcome]int{}
		own := breakerFunc(func(string) (func(breaker.Outcome, time.Duration), error) {
			return func(o breaker.Outcome, _ time.Duration) {
				mu.Lock()
				defer mu.Unlock()
				outcomes[o]++
			}, nil
		})
		r := start(t, setup{client: []interceptors.ClientOption{
			hedging(), interceptors.WithOwnBreaker(own),
		}})
		r.earn(t, probe.Read, 50)
		r.srv.Script(probe.Read, probe.Step{Hang: true}, probe.Step{})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if outcomes[breaker.Success] != 51 || outcomes[breaker.Neutral] != 1 || outcomes[breaker.Failure] != 0 {
			t.Errorf("outcomes %v, want 51 successes and one neutral", outcomes)
		}
	})
}

type breakerFunc func(string) (func(breaker.Outcome, time.Duration), error)

func (f breakerFunc) Allow(s string) (func(breaker.Outcome, time.Duration), error) { return f(s) }

func TestHedgeAtAQuantile(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{
			Hedge: policy.Hedge{Quantile: 0.9},
		})}})
		// Nothing is known yet: no hedge, however slow.
		r.srv.Script(probe.Read, probe.Step{Delay: time.Second})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		if n := r.counter.Count(); n != 1 {
			t.Fatalf("%d attempts with nothing known, want 1", n)
		}
		r.srv.Default(probe.Step{Delay: 10 * time.Millisecond})
		r.earn(t, probe.Read, 150)
		time.Sleep(200 * time.Millisecond) // a view of the distribution may be 100 ms old
		r.srv.Script(probe.Read, probe.Step{Delay: time.Second}, probe.Step{})
		begin := time.Now()
		_, err = r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		// Buckets are an eighth of an octave wide.
		if took := time.Since(begin); took < 10*time.Millisecond || took > 12*time.Millisecond {
			t.Errorf("hedged after %v, want about 10ms", took)
		}
		synctest.Wait()
	})
}

// Real stubs, many at once, under the race detector: every caller gets the
// reply to its own request, whichever attempt won.
func TestHedgesDoNotMixReplies(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{
			Hedge: policy.Hedge{After: time.Millisecond, Max: 3}, MaxAttempts: 3,
		})}})
		r.earn(t, probe.Read, 500)
		r.srv.Default(probe.Step{Do: func(_ context.Context, req *probev1.Request) (*probev1.Response, error) {
			time.Sleep(time.Duration(rand.Int64N(int64(4 * time.Millisecond))))
			if rand.IntN(5) == 0 {
				return nil, status.Error(codes.Unavailable, "random")
			}
			return &probev1.Response{Text: req.GetText()}, nil
		}})
		stub := probev1.NewProbeServiceClient(r.conn)
		var hedged atomic.Int64
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				for k := range 20 {
					text := fmt.Sprintf("%d/%d", i, k)
					var header, trailer metadata.MD
					resp, err := stub.Read(t.Context(), &probev1.Request{Text: text}, grpc.Header(&header), grpc.Trailer(&trailer))
					if err == nil && resp.GetText() != text {
						t.Errorf("reply %q to %q", resp.GetText(), text)
					}
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		for _, a := range r.counter.Attempts() {
			if a.Metadata.Get(interceptors.MetadataHedge) != nil {
				hedged.Add(1)
			}
			if !a.Ended {
				t.Errorf("an attempt never ended: %+v", a)
			}
		}
		if hedged.Load() == 0 {
			t.Error("no hedge was sent: the test shows nothing")
		}
	})
}

// A panic of an inner interceptor in a hedge reaches the caller, not the process.
func TestHedgePanicReachesTheCaller(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var armed atomic.Bool
		inner := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			md, _ := metadata.FromOutgoingContext(ctx)
			if armed.Load() && md.Get(interceptors.MetadataHedge) != nil {
				panic("inner")
			}
			return invoke(ctx, method, req, reply, cc, opts...)
		})
		r := start(t, setup{client: []interceptors.ClientOption{hedging()}, inner: []grpc.DialOption{inner}})
		r.earn(t, probe.Read, 50)
		armed.Store(true)
		r.srv.Script(probe.Read, probe.Step{Hang: true})
		got := func() (p any) {
			defer func() { p = recover() }()
			_, _ = r.call(t, probe.Read, request("x"))
			return nil
		}()
		if got != "inner" {
			t.Errorf("recovered %v, want the panic's value", got)
		}
		synctest.Wait()
	})
}
