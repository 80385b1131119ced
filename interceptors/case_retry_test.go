package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
)

// The wait grows to its cap and stays there, however many attempts there are.
func TestB07_BackoffNeverOverflows(t *testing.T) {
	bubbles(t, "200 attempts", func(t *testing.T) {
		// The server's bank would end this with its pushback.
		r := start(t, setup{plainServer: true, client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{
			MaxAttempts: 201,
			Backoff:     policy.Backoff{Base: 100 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: policy.JitterNone},
		})}})
		r.srv.Default(unavailable())
		_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		r.wantCounts(t, probe.Read, 201, 201)
		last := time.Duration(0)
		for n, gap := range gaps(r.counter.Attempts()) {
			if gap < last || gap > time.Second || n >= 4 && gap != time.Second {
				t.Fatalf("wait %d is %v after %v, want growing to exactly 1s", n, gap, last)
			}
			last = gap
		}
	})
	for _, base := range []time.Duration{0, 1, time.Millisecond, 100 * time.Millisecond} {
		for _, multiplier := range []float64{1, 2, 10} {
			for _, jitter := range []policy.Jitter{policy.JitterNone, policy.JitterProportional, policy.JitterFull} {
				b := policy.Backoff{Base: base, Max: time.Second, Multiplier: multiplier, Jitter: jitter, Spread: 0.2}
				for n := range 201 {
					if d := b.Next(n, 0); d < 0 || d > time.Second {
						t.Fatalf("%+v: wait %d is %v", b, n, d)
					}
				}
			}
		}
	}
	var sum time.Duration
	for range 1000 {
		sum += policy.Backoff{Base: 100 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: policy.JitterFull}.Next(64, 0)
	}
	wantBetween(t, "mean of full jitter", sum/1000, 400*time.Millisecond, 600*time.Millisecond)
}

// A size limit has the code of a quota and will never let the message through.
func TestB11_ResourceExhaustedThatNeverSucceeds(t *testing.T) {
	listed := interceptors.WithPolicy(policy.Policy{Codes: []codes.Code{codes.Unavailable, codes.ResourceExhausted}})
	big := request(strings.Repeat("x", 10<<10))

	for name, s := range map[string]setup{
		"(a)": {probe: []probe.Option{probe.ServerOptions(grpc.MaxRecvMsgSize(1 << 10))}},
		"(b)": {dial: []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(1 << 10))}},
	} {
		bubbles(t, name, func(t *testing.T) {
			s := s
			s.client = []interceptors.ClientOption{listed}
			r := start(t, s)
			began := time.Now()
			_, err := r.call(t, probe.Read, big)
			wantCode(t, err, codes.ResourceExhausted)
			wantEqual(t, "elapsed", time.Since(began), 0)
			r.wantCounts(t, probe.Read, 1, 0)
			if !strings.Contains(err.Error(), "larger than max") {
				t.Errorf("error %v does not speak of the size", err)
			}
		})
	}

	bubbles(t, "(c)", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{listed}})
		r.srv.Script(probe.Read, probe.Step{Code: codes.ResourceExhausted, RetryInfo: new(50 * time.Millisecond)})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		r.wantCounts(t, probe.Read, 2, 2)
		wantBetween(t, "gap", gaps(r.counter.Attempts())[0], 50*time.Millisecond, 60*time.Millisecond)
	})

	// Our choice: without a hint it is final, even when it is listed.
	bubbles(t, "no hint", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{listed}})
		r.srv.Script(probe.Read, probe.Step{Code: codes.ResourceExhausted})
		_, err := r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.ResourceExhausted)
		wantBare(t, err)
		r.wantCounts(t, probe.Read, 1, 1)
	})

	// The receiving side's limit, after the handler has run.
	bubbles(t, "reply too large", func(t *testing.T) {
		r := start(t, setup{
			client: []interceptors.ClientOption{listed},
			dial:   []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1 << 10))},
		})
		_, err := r.call(t, probe.Read, big)
		wantCode(t, err, codes.ResourceExhausted)
		r.wantCounts(t, probe.Read, 1, 1)
	})
}

// The bank comes back, is nobody else's, and is spent by retries alone.
func TestB13_BudgetComesBack(t *testing.T) {
	perChannel := []interceptors.ClientOption{
		interceptors.WithPolicy(casePolicy()), interceptors.WithoutBreaker(),
	}
	dial := func(t *testing.T, r *rig, c *interceptors.Client) *rig {
		t.Helper()
		other := *r
		other.counter = new(probe.Counter)
		other.client = c
		other.conn = r.network.Dial(t, append(c.DialOptions(), other.counter.DialOptions()...)...)
		return &other
	}
	blip := func(t *testing.T, r *rig) {
		t.Helper()
		r.counter.Reset()
		r.srv.Script(probe.Read, unavailable())
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		wantEqual(t, "attempts of a blip", r.counter.Count(), 2)
	}

	for _, sameClient := range []bool{true, false} {
		bubbles(t, fmt.Sprintf("same client %v", sameClient), func(t *testing.T) {
			// The server's bank is not what is tested: its pushback would stop A first.
			a := start(t, setup{asShipped: true, client: perChannel, plainServer: true})
			other := a.client
			if !sameClient {
				other = newClient(t, perChannel...)
			}
			b := dial(t, a, other)

			a.srv.Default(unavailable())
			for calls := 0; ; calls++ { // (1)
				a.counter.Reset()
				_, err := a.call(t, probe.Read, request("x"))
				wantCode(t, err, codes.Unavailable)
				if a.counter.Count() == 1 {
					wantStop(t, err, interceptors.BudgetSpent, interceptors.Maybe)
					break
				}
				if calls == 1000 {
					t.Fatal("the bank is bottomless")
				}
			}
			a.srv.Default(probe.Step{})
			blip(t, b) // (2)

			for range 200 { // (3)
				_, err := a.call(t, probe.Read, request("x"))
				wantOK(t, err)
			}
			blip(t, a)

			fresh := dial(t, a, a.client) // (4)
			a.srv.Default(probe.Step{Code: codes.NotFound})
			for range 1000 {
				_, err := fresh.call(t, probe.Read, request("x"))
				wantCode(t, err, codes.NotFound)
			}
			a.srv.Default(probe.Step{})
			blip(t, fresh)
		})
	}
}

// A method is repeated after a reply was lost only if it says that it may be.
func TestB19_UndeclaredIsNotRepeated(t *testing.T) {
	for _, c := range []struct {
		name     string
		method   string
		opts     func() []grpc.CallOption
		attempts int
		effects  int
		code     codes.Code
	}{
		{"(a) nothing declared", probe.Undeclared, nil, 1, 1, codes.Unavailable},
		{"(a) nothing declared, with a key", probe.Undeclared, func() []grpc.CallOption { return []grpc.CallOption{key("k1")} }, 1, 1, codes.Unavailable},
		{"(a) keys switched off", probe.Exempt, nil, 1, 1, codes.Unavailable},
		{"(b) idempotent", probe.Idempotent, nil, 2, 2, codes.OK},
		{"(b) no side effects", probe.Read, nil, 2, 2, codes.OK},
		{"(c) key required", probe.Keyed, nil, 2, 1, codes.OK},
		{"(c) key in a field", probe.KeyedField, nil, 2, 1, codes.OK},
		{"(c) key optional", probe.KeyedOptional, nil, 2, 1, codes.OK},
		{"(c) the caller's key", probe.KeyedOptional, func() []grpc.CallOption { return []grpc.CallOption{key("k1")} }, 2, 1, codes.OK},
		{"(c) keyed by the service", probe.Inherits, nil, 2, 1, codes.OK},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(c.method, probe.Step{LoseReply: true})
			var opts []grpc.CallOption
			if c.opts != nil {
				opts = c.opts()
			}
			_, err := r.call(t, c.method, request("x"), opts...)
			wantCode(t, err, c.code)
			wantEqual(t, "attempts", r.counter.Count(), c.attempts)
			wantEqual(t, "effects", r.srv.Effects(c.method), c.effects)
			if err != nil {
				wantStop(t, err, interceptors.NotDeclared, interceptors.Maybe)
			}
		})
	}
}

// Metadata, peer and status that the caller sees are of one attempt.
func TestB21_MetadataOfADeadAttempt(t *testing.T) {
	first := probe.Step{Code: codes.Unavailable, Header: metadata.Pairs("h", "one"), Trailer: metadata.Pairs("t", "one")}

	bubbles(t, "(a)", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Read, first)
		var header, trailer metadata.MD
		var from peer.Peer
		_, err := r.call(t, probe.Read, request("x"), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from))
		wantOK(t, err)
		r.wantCounts(t, probe.Read, 2, 2)
		if header["h"] != nil || trailer["t"] != nil || from.Addr == nil {
			t.Errorf("header %v, trailer %v, peer %v; want the second attempt's", header, trailer, from)
		}
	})

	// The deadline leaves no room for the wait: the answer is attempt 1's, whole.
	bubbles(t, "(b) the backoff does not fit", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Backoff: fixed(time.Second)})}})
		r.srv.Script(probe.Read, first)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		var header, trailer metadata.MD
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"), grpc.Header(&header), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "h", one(header, "h"), "one")
		wantEqual(t, "t", one(trailer, "t"), "one")
	})

	bubbles(t, "(b) cancelled in backoff", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Backoff: fixed(time.Second)})}})
		r.srv.Script(probe.Read, first)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		var header, trailer metadata.MD
		var from peer.Peer
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from))
		wantCode(t, err, codes.Canceled)
		if header != nil || trailer != nil || from.Addr != nil {
			t.Errorf("header %v, trailer %v, peer %v beside a local error; want none", header, trailer, from)
		}
	})

	bubbles(t, "(b) before attempt 2 has a stream", func(t *testing.T) {
		r := start(t, setup{inner: []grpc.DialOption{onAttempt(func(ctx context.Context, n int) error {
			if n == 1 {
				return nil
			}
			<-ctx.Done()
			return status.FromContextError(ctx.Err()).Err()
		})}})
		r.srv.Script(probe.Read, first)
		var header, trailer metadata.MD
		var from peer.Peer
		_, err := r.call(t, probe.Read, request("x"), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from))
		wantCode(t, err, codes.DeadlineExceeded)
		if header["h"] != nil || trailer["t"] != nil || from.Addr != nil {
			t.Errorf("header %v, trailer %v, peer %v beside a local error; want none", header, trailer, from)
		}
		if reaches(err, codes.Unavailable) == nil {
			t.Errorf("error %v has lost what the server had said", err)
		}
	})
}

// What a server asks for is waited for, if a call can wait so long at all.
func TestB29_RetryInfo(t *testing.T) {
	for _, c := range []struct {
		name     string
		delay    *durationpb.Duration
		attempts int
		low      time.Duration
		high     time.Duration
	}{
		{"(a) 292 years", &durationpb.Duration{Seconds: 9223372037}, 1, 0, 0},
		{"(c) half a second", durationpb.New(500 * time.Millisecond), 2, 500 * time.Millisecond, time.Second - 1},
		{"(d) negative", durationpb.New(-5 * time.Second), 2, 0, 10 * time.Millisecond},
		{"(e) zero", durationpb.New(0), 2, 0, 10 * time.Millisecond},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(probe.Read, probe.Step{
				Code: codes.Unavailable, Details: []proto.Message{&errdetails.RetryInfo{RetryDelay: c.delay}},
			})
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
			wantBetween(t, "elapsed", time.Since(began), c.low, c.high)
			wantEqual(t, "attempts", r.counter.Count(), c.attempts)
			if c.attempts == 1 {
				wantCode(t, err, codes.Unavailable)
				wantStop(t, err, interceptors.Pushback, interceptors.Maybe)
				return
			}
			wantOK(t, err)
		})
	}

	bubbles(t, "(b) 292 years, no deadline", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Read, probe.Step{
			Code: codes.Unavailable, Details: []proto.Message{&errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: 9223372037}}},
		})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(300*time.Millisecond, cancel)
		began := time.Now()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		// Our choice: more than five minutes is no wait for a call to make.
		wantEqual(t, "elapsed", time.Since(began), 0)
		wantStop(t, err, interceptors.Pushback, interceptors.Maybe)
		<-ctx.Done()
		wantEqual(t, "hits", r.srv.Hits(probe.Read), 1)
		if reaches(err, codes.Unavailable) == nil {
			t.Errorf("error %v has lost what the server said", err)
		}
	})
}

// The server's last word stays readable, whatever ended the call.
func TestB35_LastServerErrorIsNotFlattened(t *testing.T) {
	rich := probe.Step{
		Code: codes.Unavailable, Message: "the shelf is empty", RetryInfo: new(time.Millisecond),
		Details: []proto.Message{&errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{Subject: "s"}}}},
	}
	check := func(t *testing.T, err error) {
		t.Helper()
		st := reaches(err, codes.Unavailable)
		if st == nil || len(st.Details()) != 2 || !strings.HasSuffix(st.Message(), "the shelf is empty") {
			t.Errorf("error %v has lost the server's status with its 2 details", err)
		}
	}
	slow := setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Backoff: fixed(time.Second)})}}

	bubbles(t, "(a) exhausted", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Default(rich)
		_, err := r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		st := status.Convert(err)
		if len(st.Details()) != 2 || st.Message() != "the shelf is empty" {
			t.Errorf("status %v %v, want it as the server sent it", st, st.Details())
		}
		wantStop(t, err, interceptors.Exhausted, interceptors.Maybe)
	})
	bubbles(t, "(b) deadline", func(t *testing.T) {
		r := start(t, slow)
		r.srv.Default(rich)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v does not tell that the deadline ended it", err)
		}
		wantCode(t, err, codes.Unavailable)
		check(t, err)
	})
	bubbles(t, "(c) cancelled", func(t *testing.T) {
		r := start(t, slow)
		r.srv.Default(rich)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.Canceled)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("errors.Is(%v, Canceled) is false", err)
		}
		check(t, err)
	})
}

// Retries asleep in backoff are already paid for.
func TestB37_SleepingRetriesAreCounted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const calls, permitted = 50, 5
		bank := budget.New(budget.Config{Initial: permitted})
		r := start(t, setup{plainServer: true, client: []interceptors.ClientOption{
			interceptors.WithPolicy(policy.Policy{Backoff: fixed(300 * time.Millisecond)}), interceptors.WithBudget(bank),
		}})
		r.srv.Default(unavailable())

		var wg sync.WaitGroup
		var mu sync.Mutex
		byAttempts := map[int]int{}
		for range calls {
			wg.Go(func() {
				began := time.Now()
				_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"))
				took := time.Since(began)
				var ce *interceptors.CallError
				if status.Code(err) != codes.Unavailable || !errors.As(err, &ce) || ce.Stop() != interceptors.BudgetSpent {
					t.Errorf("error %v, want UNAVAILABLE for want of budget", err)
					return
				}
				n := len(ce.Attempts())
				if n == 1 && took >= 150*time.Millisecond {
					t.Errorf("a refused call slept %v", took)
				}
				mu.Lock()
				defer mu.Unlock()
				byAttempts[n]++
			})
		}
		wg.Wait()
		wantEqual(t, "hits", r.srv.Hits(probe.Read), calls+permitted)
		wantEqual(t, "calls with 2 attempts", byAttempts[2], permitted)
		wantEqual(t, "calls with 1 attempt", byAttempts[1], calls-permitted)
		wantEqual(t, "permits in flight", bank.Snapshot().InFlight, 0)
	})
}

// One number, one meaning, and nobody else's slice.
func TestB45_ZeroOneNegative(t *testing.T) {
	for _, c := range []struct {
		name string
		max  int
		opts []grpc.CallOption
		hits int
	}{
		{"1", 1, nil, 1},
		{"2", 2, nil, 2},
		{"3", 3, nil, 3},
		{"0 is the default", 0, nil, policy.DefaultMaxAttempts},
		{"off", 3, []grpc.CallOption{interceptors.NoRetry()}, 1},
		{"override more", 2, []grpc.CallOption{interceptors.Override(policy.Policy{MaxAttempts: 4})}, 4},
		{"override less", 3, []grpc.CallOption{interceptors.Override(policy.Policy{MaxAttempts: 1})}, 1},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{asShipped: true, plainServer: true, client: []interceptors.ClientOption{
				interceptors.WithPolicy(policy.Policy{MaxAttempts: c.max, Backoff: fixed(time.Millisecond)}),
				interceptors.WithBudget(plenty()), interceptors.WithoutBreaker(),
			}})
			r.srv.Default(unavailable())
			_, err := r.call(t, probe.Read, request("x"), c.opts...)
			wantCode(t, err, codes.Unavailable)
			wantEqual(t, "hits", r.srv.Hits(probe.Read), c.hits)

			// The override was for that call only.
			if c.opts != nil {
				_, err := r.call(t, probe.Read, request("x"))
				wantCode(t, err, codes.Unavailable)
				wantEqual(t, "hits of the next call", r.srv.Hits(probe.Read)-c.hits, c.max)
			}
		})
	}

	t.Run("-1", func(t *testing.T) {
		_, err := interceptors.NewClient(interceptors.WithPolicy(policy.Policy{MaxAttempts: -1}))
		if err == nil || !strings.Contains(err.Error(), "MaxAttempts: -1") {
			t.Errorf("error %v, want one that names MaxAttempts and -1", err)
		}
	})

	bubbles(t, "slices are copied", func(t *testing.T) {
		s := []codes.Code{codes.Aborted}
		option := interceptors.WithPolicy(policy.Policy{Codes: s})
		a := start(t, setup{client: []interceptors.ClientOption{option}})
		s[0] = codes.NotFound
		b := start(t, setup{})                                                // made after A, with defaults
		again := start(t, setup{client: []interceptors.ClientOption{option}}) // the same option value

		hits := func(r *rig, code codes.Code) int {
			before := r.srv.Hits(probe.Read)
			r.srv.Script(probe.Read, probe.Step{Code: code})
			_, _ = r.call(t, probe.Read, request("x"))
			n := r.srv.Hits(probe.Read) - before
			r.srv.Script(probe.Read)
			return n
		}
		wantEqual(t, "A on ABORTED", hits(a, codes.Aborted), 2)
		wantEqual(t, "A on NOT_FOUND", hits(a, codes.NotFound), 1)
		wantEqual(t, "A's option again on ABORTED", hits(again, codes.Aborted), 2)
		wantEqual(t, "B on UNAVAILABLE", hits(b, codes.Unavailable), 2)
		wantEqual(t, "B on ABORTED", hits(b, codes.Aborted), 1)
	})
}
