package interceptors_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The caller's options see the deciding attempt, once.
func TestCallersOptions(t *testing.T) {
	step := func(code codes.Code, v string) probe.Step {
		return probe.Step{Code: code, Header: metadata.Pairs("h", v), Trailer: metadata.Pairs("t", v)}
	}
	for _, c := range []struct {
		name  string
		steps []probe.Step
		code  codes.Code
		want  string // of header and trailer
	}{
		{"at once", []probe.Step{step(codes.OK, "1")}, codes.OK, "1"},
		{"the third", []probe.Step{step(codes.Unavailable, "1"), step(codes.Unavailable, "2"), step(codes.OK, "3")}, codes.OK, "3"},
		{"the last failure", []probe.Step{step(codes.Unavailable, "1"), step(codes.Unavailable, "2"), step(codes.Unavailable, "3")}, codes.Unavailable, "3"},
		{"a final one", []probe.Step{step(codes.Unavailable, "1"), step(codes.NotFound, "2")}, codes.NotFound, "2"},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(probe.Read, c.steps...)
			var h1, h2, trailer metadata.MD
			var from peer.Peer
			var finished []error
			_, err := r.call(t, probe.Read, request("x"), grpc.Header(&h1), grpc.Header(&h2), grpc.Trailer(&trailer),
				grpc.Peer(&from), grpc.OnFinish(func(err error) { finished = append(finished, err) }))
			wantCode(t, err, c.code)
			wantEqual(t, "header", one(h1, "h"), c.want)
			wantEqual(t, "second header", one(h2, "h"), c.want)
			wantEqual(t, "trailer", one(trailer, "t"), c.want)
			if from.Addr == nil {
				t.Error("no peer")
			}
			if len(finished) != 1 || (finished[0] == nil) != (err == nil) || status.Code(finished[0]) != status.Code(err) {
				t.Errorf("OnFinish was told %v, want once %v", finished, err)
			}
		})
	}
	bubbles(t, "refused here", func(t *testing.T) {
		r := start(t, setup{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		var finished []error
		header := metadata.Pairs("mine", "stays")
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"), grpc.Header(&header),
			grpc.OnFinish(func(err error) { finished = append(finished, err) }))
		wantCode(t, err, codes.Canceled)
		wantEqual(t, "header", one(header, "mine"), "stays")
		wantEqual(t, "times OnFinish ran", len(finished), 1)
		r.wantCounts(t, probe.Read, 0, 0)
	})
}

// The caller's message is the caller's.
func TestRequestIsNotTouched(t *testing.T) {
	for _, method := range []string{probe.Read, probe.Keyed, probe.KeyedField} {
		bubbles(t, method, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(method, unavailable(), unavailable())
			req := &probev1.Request{Text: "x", Labels: map[string]string{"a": "b"}}
			before := proto.CloneOf(req)
			_, err := r.call(t, method, req)
			wantOK(t, err)
			sameRequest(t, before, req)
			seen := r.srv.Seen(method)
			if len(seen) != 3 {
				t.Fatalf("%d attempts, want 3", len(seen))
			}
			for _, e := range seen {
				if method != probe.KeyedField {
					sameRequest(t, before, e.Request)
					continue
				}
				if id := e.Request.GetRequestId(); id == "" || id != one(e.Metadata, keyKey) || id != seen[0].Request.GetRequestId() {
					t.Errorf("the field has %q, the metadata %q; want one key in all attempts", id, one(e.Metadata, keyKey))
				}
			}
		})
	}
	bubbles(t, "a field that is set", func(t *testing.T) {
		r := start(t, setup{})
		_, err := r.call(t, probe.KeyedField, &probev1.Request{RequestId: "mine"})
		wantOK(t, err)
		wantEqual(t, "key", one(r.srv.Seen(probe.KeyedField)[0].Metadata, keyKey), "mine")

		_, err = r.call(t, probe.KeyedField, &probev1.Request{RequestId: "mine"}, key("another"))
		wantStop(t, err, interceptors.LocalRefusal, interceptors.No)
		wantCode(t, err, codes.InvalidArgument)
		_, err = r.call(t, probe.KeyedField, &probev1.Request{}, key("another"))
		wantOK(t, err)
		wantEqual(t, "field", r.srv.Seen(probe.KeyedField)[1].Request.GetRequestId(), "another")
		wantEqual(t, "hits", r.srv.Hits(probe.KeyedField), 2)
	})
	// One message in many calls at once: each is a call of its own.
	bubbles(t, "shared by calls", func(t *testing.T) {
		r := start(t, setup{})
		req := request("x")
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if _, err := probe.Call(t.Context(), r.conn, probe.KeyedField, req); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		wantEqual(t, "runs", r.srv.Hits(probe.KeyedField), 20)
	})
}

// What a dead attempt wrote into the reply is gone before the next begins.
func TestReplyIsReset(t *testing.T) {
	type plain struct {
		A, B int
		M    map[string]int
	}
	// The wire is played by an interceptor, as gRPC's own codec starts afresh and
	// another's may not.
	dial := func(t *testing.T, fill func(n int, reply any)) *grpc.ClientConn {
		t.Helper()
		n := 0
		r := start(t, setup{inner: []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(func(_ context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ grpc.UnaryInvoker, _ ...grpc.CallOption) error {
				n++
				fill(n, reply)
				if n == 1 {
					return status.Error(codes.Unavailable, "half a reply")
				}
				return nil
			}),
		}})
		return r.conn
	}
	bubbles(t, "proto", func(t *testing.T) {
		conn := dial(t, func(n int, reply any) {
			if n == 1 {
				reply.(*probev1.Response).Text = "dead" //nolint:forcetypeassert // as passed below
			}
		})
		reply := &probev1.Response{}
		wantOK(t, conn.Invoke(t.Context(), probe.Read, request("x"), reply))
		if !proto.Equal(reply, &probev1.Response{}) {
			t.Errorf("reply %v, want it empty", reply)
		}
	})
	bubbles(t, "another codec's", func(t *testing.T) {
		conn := dial(t, func(n int, reply any) {
			p := reply.(*plain) //nolint:forcetypeassert // as passed below
			if n == 1 {
				p.A, p.M = 1, map[string]int{"dead": 1}
				return
			}
			p.B = 2
		})
		reply := &plain{}
		wantOK(t, conn.Invoke(t.Context(), probe.Read, request("x"), reply))
		if reply.A != 0 || reply.B != 2 || reply.M != nil {
			t.Errorf("reply %+v, want only what the second attempt wrote", reply)
		}
	})
	bubbles(t, "none", func(t *testing.T) {
		conn := dial(t, func(int, any) {})
		wantOK(t, conn.Invoke(t.Context(), probe.Read, request("x"), nil))
	})
}

// Our options mean something to Belay and nothing to gRPC.
func TestOptionsOnAChannelWithoutBelay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{plainClient: true})
		r.srv.Script(probe.Read, unavailable())
		options := []grpc.CallOption{interceptors.NoRetry(), interceptors.Override(policy.Policy{MaxAttempts: 5}), key("k1")}
		_, err := r.call(t, probe.Read, request("x"), options...)
		wantCode(t, err, codes.Unavailable)
		_, err = r.call(t, probe.Read, request("x"), options...)
		wantOK(t, err)
		if got := r.srv.Seen(probe.Read)[1].Metadata.Get(keyKey); got != nil {
			t.Errorf("key %q was sent by nobody", got)
		}
		stream, err := r.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, probe.ServerStream, options...)
		wantOK(t, err)
		wantOK(t, stream.SendMsg(request("x")))
		wantOK(t, stream.CloseSend())
		_ = stream.RecvMsg(&probev1.Response{})
	})
}

func TestOverride(t *testing.T) {
	bubbles(t, "field by field, the later over the earlier", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Default(unavailable())
		_, err := r.call(t, probe.Read, request("x"),
			interceptors.Override(policy.Policy{MaxAttempts: 5, Backoff: fixed(7 * time.Millisecond)}),
			interceptors.Override(policy.Policy{MaxAttempts: 2}))
		wantCode(t, err, codes.Unavailable)
		r.wantCounts(t, probe.Read, 2, 2)
		wantEqual(t, "gap", gaps(r.counter.Attempts())[0], 7*time.Millisecond)
	})
	bubbles(t, "an explicit class", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Undeclared, unavailable())
		_, err := r.call(t, probe.Undeclared, request("x"), interceptors.Override(policy.Policy{Idempotency: policy.Idempotent}))
		wantOK(t, err)
		r.srv.Script(probe.Read, unavailable())
		_, err = r.call(t, probe.Read, request("x"), interceptors.Override(policy.Policy{Idempotency: policy.Undeclared}))
		wantStop(t, err, interceptors.NotDeclared, interceptors.Maybe)
	})
	bubbles(t, "a timeout of its own", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Read, probe.Step{Hang: true})
		began := time.Now()
		_, err := probe.Call(t.Context(), r.conn, probe.Read, request("x"), interceptors.Override(policy.Policy{Timeout: 300 * time.Millisecond}))
		wantCode(t, err, codes.DeadlineExceeded)
		wantBetween(t, "elapsed", time.Since(began), 295*time.Millisecond, 300*time.Millisecond)
	})
	bubbles(t, "bad", func(t *testing.T) {
		r := start(t, setup{})
		_, err := r.call(t, probe.Read, request("x"), interceptors.Override(policy.Policy{MaxAttempts: -3}))
		wantCode(t, err, codes.InvalidArgument)
		wantStop(t, err, interceptors.LocalRefusal, interceptors.No)
		if !strings.Contains(err.Error(), "Override: MaxAttempts: -3 must not be negative") {
			t.Errorf("error %v does not name option, field, value and rule", err)
		}
		r.wantCounts(t, probe.Read, 0, 0)
	})
}

// Policies come and go whole; what a channel has learnt stays.
func TestUpdate(t *testing.T) {
	bubbles(t, "calls in flight keep theirs", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Backoff: fixed(100 * time.Millisecond)})}})
		r.srv.Script(probe.Read, unavailable(), unavailable())
		bank := r.client.Budget(r.conn)
		time.AfterFunc(50*time.Millisecond, func() {
			if err := r.client.Update(interceptors.WithPolicy(policy.Policy{MaxAttempts: 1})); err != nil {
				t.Error(err)
			}
		})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		r.wantCounts(t, probe.Read, 3, 3)

		r.srv.Script(probe.Read, unavailable())
		_, err = r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		r.wantCounts(t, probe.Read, 4, 4)
		if r.client.Budget(r.conn) != bank {
			t.Error("the bank was replaced")
		}
	})
	bubbles(t, "refused whole", func(t *testing.T) {
		r := start(t, setup{})
		err := r.client.Update(
			interceptors.WithPolicy(policy.Policy{MaxAttempts: 1}),
			interceptors.WithRule("belay.probe.v1.ProbeService/Reed", policy.Policy{}),
			interceptors.WithRule("*", policy.Policy{MaxAttempts: -1}),
		)
		if err == nil {
			t.Fatal("no error")
		}
		for _, want := range []string{"Update", "Reed", "MaxAttempts: -1 must not be negative"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %v does not contain %q", err, want)
			}
		}
		if err := r.client.Update(nil); err == nil {
			t.Error("a nil option is accepted")
		}
		r.srv.Script(probe.Read, unavailable())
		_, err = r.call(t, probe.Read, request("x"))
		wantOK(t, err) // three attempts are still allowed
	})
	bubbles(t, "what is not given again is gone", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithRule("*", policy.Policy{MaxAttempts: 1})}})
		wantOK(t, r.client.Update())
		wantEqual(t, "attempts", r.client.Explain(r.conn, probe.Read).Policy.MaxAttempts, policy.DefaultMaxAttempts)
	})
	bubbles(t, "breakers keep their state", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithBreaker(threshold(2, time.Minute))}})
		r.trip(t)
		wantOK(t, r.client.Update(interceptors.WithPolicy(policy.Policy{MaxAttempts: 2})))
		_, err := r.call(t, probe.Read, request("x"))
		wantStop(t, err, interceptors.BreakerOpen, interceptors.No)
	})
}

// The kill switch: one attempt, nothing refused, still seen.
func TestDisableEnable(t *testing.T) {
	bubble(t, func(t *testing.T) {
		seen := new(events)
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithBreaker(threshold(2, time.Minute)), interceptors.WithObserver(seen),
		}})
		r.trip(t)
		r.client.Disable()
		r.counter.Reset()
		before := seen.count(interceptors.EventCall)

		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err) // though the breaker is open
		r.srv.Script(probe.Read, unavailable())
		_, err = r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		wantBare(t, err)
		wantEqual(t, "attempts", r.counter.Count(), 2)
		wantEqual(t, "calls observed", seen.count(interceptors.EventCall)-before, 2)

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err = probe.Call(ctx, r.conn, probe.Reads, request("x")) // less than MinAttempt
		wantEqual(t, "sent", r.counter.Count(), 3)
		wantEqual(t, "refused by", callErrorlessStop(err), "")

		r.client.Enable()
		_, err = r.call(t, probe.Read, request("x"))
		wantStop(t, err, interceptors.BreakerOpen, interceptors.No)
		_, err = r.call(t, probe.Reads, request("x"))
		wantOK(t, err)
	})
}

// callErrorlessStop is the stop reason of Belay's own, "" when it left the error alone.
func callErrorlessStop(err error) string {
	var ce *interceptors.CallError
	if errors.As(err, &ce) && len(ce.Attempts()) == 0 {
		return ce.Stop().String()
	}
	return ""
}

// Interceptors work without a ClientConn too, as tests of handlers have them.
func TestNilClientConn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := newClient(t, interceptors.WithPolicy(casePolicy()))
		attempts := 0
		err := c.Unary()(t.Context(), probe.Read, request("x"), &probev1.Response{}, nil,
			func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				if attempts++; attempts < 3 {
					return status.Error(codes.Unavailable, "not yet")
				}
				return nil
			})
		wantOK(t, err)
		wantEqual(t, "attempts", attempts, 3)
		if c.Budget(nil) == nil || c.Breaker(nil, probeService) == nil {
			t.Error("no bank or breaker for calls without a ClientConn")
		}
		wantEqual(t, "balance", c.Budget(nil).Snapshot().Balance, 2) // one of two retries failed
		wantEqual(t, "class", c.Explain(nil, probe.Read).Class, policy.NoSideEffects)
		_, err = c.Stream()(t.Context(), &grpc.StreamDesc{ServerStreams: true}, nil, probe.ServerStream,
			func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
				return nil, status.Error(codes.NotFound, "no stream")
			})
		wantCode(t, err, codes.NotFound)
	})
}

// Rules by pattern, matchers by call: rules go over matchers, both over the
// policy of all.
func TestRulesAndMatchers(t *testing.T) {
	type bulk struct{}
	isBulk := selector.MatchFunc(func(ctx context.Context, meta middleware.CallMeta) bool {
		return ctx.Value(bulk{}) != nil && meta.Service == probeService && meta.IsClient
	})
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithPolicy(policy.Policy{MaxAttempts: 2}),
			interceptors.WithMatcher(isBulk, policy.Policy{MaxAttempts: 4}),
			interceptors.WithMatcher(isBulk, policy.Policy{MaxAttempts: 5, Codes: []codes.Code{codes.Internal}}),
			interceptors.WithRule("belay.probe.v1.ProbeService/Idempotent", policy.Policy{MaxAttempts: 1}),
			interceptors.WithRule("belay.probe.v1.ProbeService/*", policy.Policy{Backoff: fixed(time.Millisecond)}),
			interceptors.WithRule("/belay.probe.v1.ProbeService/Idempotent", policy.Policy{MaxAttempts: 3}),
		}, plainServer: true})
		hits := func(ctx context.Context, method string, code codes.Code) int {
			before := r.srv.Hits(method)
			r.srv.Default(probe.Step{Code: code})
			_, _ = probe.Call(ctx, r.conn, method, request("x"))
			return r.srv.Hits(method) - before
		}
		bulkCtx := context.WithValue(t.Context(), bulk{}, true)
		for _, c := range []struct {
			ctx    context.Context //nolint:containedctx // a row of a table
			method string
			code   codes.Code
			want   int
		}{
			{t.Context(), probe.Read, codes.Unavailable, 2},
			{t.Context(), probe.Read, codes.Internal, 1},
			{bulkCtx, probe.Read, codes.Internal, 4}, // the first matcher's attempts, the second's codes
			{bulkCtx, probe.Read, codes.Unavailable, 1},
			{bulkCtx, probe.Reads, codes.Unavailable, 2}, // another service
			{t.Context(), probe.Idempotent, codes.Unavailable, 3},
			{bulkCtx, probe.Idempotent, codes.Internal, 3}, // the rule's attempts, the matcher's codes
		} {
			if got := hits(c.ctx, c.method, c.code); got != c.want {
				t.Errorf("%s on %v, bulk %v: %d hits, want %d", c.method, c.code, c.ctx == bulkCtx, got, c.want)
			}
		}
	})
}

// ownBreaker is a breaker of a user's own.
type ownBreaker struct {
	mu     sync.Mutex // guards all below
	err    error
	asked  []string
	told   []breaker.Outcome
	latest time.Duration
}

func (b *ownBreaker) Allow(service string) (func(breaker.Outcome, time.Duration), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = append(b.asked, service)
	// A done beside an error is nobody's to call.
	return func(o breaker.Outcome, took time.Duration) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.told, b.latest = append(b.told, o), took
	}, b.err
}

// Methods are looked up by a few letters of their names first. Those that have
// these in common stay apart, whichever comes first, and a name may be anything.
func TestMethodsOfSimilarNames(t *testing.T) {
	client, err := interceptors.NewClient()
	if err != nil {
		t.Fatal(err)
	}
	conn := unconnected(t)
	for range 2 {
		for _, name := range []string{"/p.S/Get1x", "/p.S/Got1x", "/p.S/Gut1x", "", "/", "x"} {
			err := client.Unary()(t.Context(), name, nil, nil, conn,
				func(_ context.Context, got string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
					if got != name {
						t.Errorf("%q was called as %q", name, got)
					}
					return nil
				})
			if err != nil {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
}

func TestOwnBreaker(t *testing.T) {
	bubble(t, func(t *testing.T) {
		own := new(ownBreaker)
		panicking := false
		r := start(t, setup{
			client: []interceptors.ClientOption{interceptors.WithOwnBreaker(own)},
			inner: []grpc.DialOption{onAttempt(func(context.Context, int) error {
				if panicking {
					panic("scripted")
				}
				return nil
			})},
		})
		if r.client.Breaker(r.conn, probeService) != nil {
			t.Error("Belay's own breaker is there as well")
		}
		told := func(what string, want ...breaker.Outcome) {
			t.Helper()
			own.mu.Lock()
			defer own.mu.Unlock()
			if !slices.Equal(own.told, want) || len(own.asked) != len(want) {
				t.Errorf("%s: told %v after %d questions, want %v", what, own.told, len(own.asked), want)
			}
			own.told, own.asked = nil, nil
		}

		r.srv.Script(probe.Read, probe.Step{Code: codes.Unavailable, Delay: 30 * time.Millisecond})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		told("a blip", breaker.Failure, breaker.Success)

		r.srv.Script(probe.Read, probe.Step{Code: codes.NotFound, Delay: 30 * time.Millisecond})
		_, _ = r.call(t, probe.Read, request("x"))
		wantEqual(t, "latency", own.latest, 30*time.Millisecond)
		told("a verdict", breaker.Success)

		r.srv.Script(probe.Read, probe.Step{Hang: true})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		_, _ = probe.Call(ctx, r.conn, probe.Read, request("x"))
		told("a cancel", breaker.Neutral)

		// A backend that hangs is seen by its callers' deadlines.
		r.srv.Script(probe.Read, probe.Step{Hang: true, Delay: 0})
		ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
		_, _ = probe.Call(ctx, r.conn, probe.Read, request("x"))
		cancel()
		told("a hung backend", breaker.Failure)

		func() {
			panicking = true
			defer func() { panicking = false; _ = recover() }()
			_, _ = r.call(t, probe.Read, request("x"))
		}()
		told("a panic", breaker.Neutral)

		own.err = errors.New("my breaker says no")
		_, err = r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		wantStop(t, err, interceptors.BreakerOpen, interceptors.No)
		if !errors.Is(err, own.err) {
			t.Errorf("errors.Is(%v, the breaker's error) is false", err)
		}
		for _, service := range own.asked {
			wantEqual(t, "service", service, probeService)
		}

		// Made in spite of it, the attempt is not the breaker's.
		own.asked = nil
		r.client.Disable()
		_, err = r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		if len(own.asked) != 1 || len(own.told) != 0 {
			t.Errorf("asked %d times and told %v: want once, and nothing", len(own.asked), own.told)
		}
	})
}

// A breaker that opens between two attempts ends the call with the server's
// own last word.
func TestBreakerOpensDuringACall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithBreaker(threshold(2, time.Minute))}})
		r.srv.Default(unavailable())
		_, err := r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "message", status.Convert(err).Message(), "scripted Unavailable")
		wantStop(t, err, interceptors.BreakerOpen, interceptors.Maybe)
		r.wantCounts(t, probe.Read, 2, 2)
	})
}

// Two retry loops, one below the other, are told of, and what the lower one
// hides is not guessed.
func TestNativeRetriesBelow(t *testing.T) {
	bubbles(t, "warned once", func(t *testing.T) {
		r := start(t, setup{plainClient: true})
		counter := new(probe.Counter)
		conn := r.network.Dial(t, append([]grpc.DialOption{
			grpc.WithDefaultServiceConfig(nativeRetry), grpc.WithChainUnaryInterceptor(r.client.Unary()),
		}, counter.DialOptions()...)...)
		r.srv.Default(unavailable())
		for range 3 {
			_, err := probe.Call(t.Context(), conn, probe.Read, request("x"))
			wantCode(t, err, codes.Unavailable)
		}
		wantEqual(t, "log lines", r.log.count("retries multiply"), 1)
	})
	bubbles(t, "not sent is not trusted", func(t *testing.T) {
		r := start(t, setup{plainClient: true})
		conn := r.network.Dial(t, grpc.WithDefaultServiceConfig(nativeRetry), grpc.WithChainUnaryInterceptor(r.client.Unary()))
		r.network.Down()
		_, err := probe.Call(t.Context(), conn, probe.Undeclared, request("x"))
		wantCode(t, err, codes.Unavailable)
		wantStop(t, err, interceptors.NotDeclared, interceptors.Maybe)
	})
	bubbles(t, "DialOptions switch them off", func(t *testing.T) {
		r := start(t, setup{dial: []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeRetry)}})
		r.srv.Default(unavailable())
		_, err := r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Unavailable)
		r.wantCounts(t, probe.Read, 3, 3)
		wantEqual(t, "log lines", r.log.count("multiply"), 0)
	})
}

// The state of a channel goes with it.
func TestChannelStateIsReleased(t *testing.T) {
	c := newClient(t)
	released := useAndDropAChannel(t, c)
	for range 100 {
		runtime.GC() // the first finds the channel dead, its cleanup runs, a later one finds the state
		if released() {
			break
		}
	}
	if !released() {
		t.Error("the state of a channel that is gone is kept")
	}
	runtime.KeepAlive(c) // or all of it would go with the client
}

// useAndDropAChannel returns a function that reports whether the channel's
// state is collected. It is a function of its own, so that nothing of the
// channel stays on the test's stack.
func useAndDropAChannel(t *testing.T, c *interceptors.Client) func() bool {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///nobody", append(c.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(func(context.Context, string, any, any, *grpc.ClientConn, grpc.UnaryInvoker, ...grpc.CallOption) error {
			return nil
		}))...)
	wantOK(t, err)
	_, err = probe.Call(t.Context(), conn, probe.Read, request("x"))
	wantOK(t, err)
	bank := weak.Make(c.Budget(conn))
	runtime.GC()
	if b := bank.Value(); b == nil || b.Snapshot().Deposits != 1 {
		t.Error("the channel has no state while it lives")
	}
	wantOK(t, conn.Close())
	return func() bool { return bank.Value() == nil }
}

// An inner interceptor's own call under the attempt's context is another call.
func TestCallOfAnInnerInterceptor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tokens := start(t, setup{})
		r := start(t, setup{inner: []grpc.DialOption{onAttempt(func(ctx context.Context, _ int) error {
			if _, err := probe.Call(ctx, tokens.conn, probe.Read, request("who")); err != nil {
				return err
			}
			_, err := probe.Call(ctx, tokens.conn, probe.KeyedOptional, request("token"))
			return err
		})}})
		r.srv.Script(probe.Keyed, unavailable(), unavailable())
		_, err := r.call(t, probe.Keyed, request("x"))
		wantOK(t, err)
		seen := map[string]bool{one(r.srv.Seen(probe.Keyed)[0].Metadata, keyKey): true}
		for _, e := range tokens.srv.Seen(probe.KeyedOptional) {
			wantEqual(t, "previous attempts", one(e.Metadata, attemptsKey), "")
			seen[one(e.Metadata, keyKey)] = true
		}
		wantEqual(t, "distinct keys of one call and three for tokens", len(seen), 4)
		for _, e := range tokens.srv.Seen(probe.Read) {
			wantEqual(t, "key of a method without one", one(e.Metadata, keyKey), "")
			wantEqual(t, "first sent of a method without a key", one(e.Metadata, "idempotency-first-sent"), "")
			wantEqual(t, "previous attempts", one(e.Metadata, attemptsKey), "")
		}
	})
}

// A key of the context's would be every call's.
func TestKeyInTheContextIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		ctx := metadata.AppendToOutgoingContext(t.Context(), keyKey, "k1")
		_, err := probe.Call(ctx, r.conn, probe.Keyed, request("x"))
		wantCode(t, err, codes.InvalidArgument)
		wantStop(t, err, interceptors.LocalRefusal, interceptors.No)
		if !strings.Contains(err.Error(), "WithKey") {
			t.Errorf("error %v does not say what to do instead", err)
		}
		r.wantCounts(t, probe.Keyed, 0, 0)
	})
}

// A client resumes after a crash with the key that it had stored.
func TestResumeWithAStoredKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Keyed, probe.Step{LoseReply: true})
		saved, err := idempotency.NewKey().MarshalText()
		wantOK(t, err)

		attempt := func() (*probev1.Response, error) {
			var k idempotency.Key
			wantOK(t, k.UnmarshalText(saved))
			return r.call(t, probe.Keyed, request("x"), interceptors.WithKey(k), interceptors.NoRetry())
		}
		_, err = attempt()
		wantCode(t, err, codes.Unavailable)
		resp, err := attempt()
		wantOK(t, err)
		wantEqual(t, "execution", resp.GetExecution(), 1)
		wantEqual(t, "effects", r.srv.Effects(probe.Keyed), 1)
	})
}
