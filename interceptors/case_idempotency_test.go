package interceptors_test

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// wantReason asserts a refusal of the dedupe's own.
func wantReason(t *testing.T, err error, code codes.Code, reason idempotency.Reason) {
	t.Helper()
	wantCode(t, err, code)
	if got := infoOf(err).GetReason(); got != string(reason) {
		t.Fatalf("reason %q (%v), want %s", got, err, reason)
	}
}

// process is one more server process over the same service and store: a
// channel to it, with a client of its own.
func (r *rig) process(t *testing.T, store idempotency.Store, cfg idempotency.Config) *rig {
	t.Helper()
	return start(t, setup{
		server: []interceptors.ServerOption{stored(store, cfg)},
		probe:  []probe.Option{probe.Using(r.srv)},
	})
}

// One key is one execution, for however many callers, and whoever of them goes.
func TestB03_SameKeyManyAtOnce(t *testing.T) {
	bubbles(t, "(a)", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Default(probe.Step{Delay: 100 * time.Millisecond})
		same := key("k1")
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				resp, err := probe.Call(ctx, r.conn, probe.Keyed, request("x"), same)
				if err != nil || resp.GetExecution() != 1 {
					t.Errorf("response %v, error %v; want the first execution's", resp, err)
				}
			})
		}
		wg.Wait()
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})

	bubbles(t, "(b)", func(t *testing.T) {
		r := start(t, setup{})
		release := make(chan struct{})
		r.srv.Script(probe.Keyed, probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			select {
			case <-release:
				return &probev1.Response{Text: req.GetText(), Execution: 1}, nil
			case <-ctx.Done(): // it listens, and must not hear of its caller
				return nil, status.FromContextError(ctx.Err()).Err()
			}
		}})
		same := key("k1")

		leader, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := probe.Call(leader, r.conn, probe.Keyed, request("x"), same); status.Code(err) != codes.Canceled {
				t.Errorf("the leader got %v, want Canceled", err)
			}
		})
		synctest.Wait()
		for range 5 {
			wg.Go(func() {
				resp, err := probe.Call(t.Context(), r.conn, probe.Keyed, request("x"), same)
				if err != nil || resp.GetExecution() != 1 {
					t.Errorf("a follower got %v, %v; want the leader's response", resp, err)
				}
			})
		}
		synctest.Wait()
		leave()
		synctest.Wait()
		close(release)
		wg.Wait()

		var trailer metadata.MD
		resp, err := r.call(t, probe.Keyed, request("x"), same, grpc.Trailer(&trailer))
		wantOK(t, err)
		wantEqual(t, "execution", resp.GetExecution(), 1)
		wantEqual(t, "status", one(trailer, statusKey), "replayed")
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})
}

// A key is one request's, in every state of its record.
func TestB17_PayloadMismatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Keyed, probe.Step{Delay: 100 * time.Millisecond})
		same := key("k1")
		mismatch := func(state string) {
			t.Helper()
			before := r.counter.Count()
			_, err := r.call(t, probe.Keyed, request("p2"), same)
			wantReason(t, err, codes.FailedPrecondition, idempotency.ReasonKeyReused)
			wantEqual(t, "attempts of the mismatch while "+state, r.counter.Count()-before, 1)
		}

		var wg sync.WaitGroup
		var first *probev1.Response
		wg.Go(func() {
			var err error
			if first, err = probe.Call(t.Context(), r.conn, probe.Keyed, request("p1"), same); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		mismatch("running")
		wg.Wait()
		mismatch("done")

		again, err := r.call(t, probe.Keyed, request("p1"), same)
		wantOK(t, err)
		if !proto.Equal(first, again) {
			t.Errorf("replay %v, want %v", again, first)
		}
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})
}

// The client's key: one value, the same in all attempts, in no other call.
func TestB25_KeyIsStableSingleReal(t *testing.T) {
	bubbles(t, "(a)", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Keyed, unavailable(), unavailable())
		_, err := r.call(t, probe.Keyed, request("x"))
		wantOK(t, err)
		seen := r.srv.Seen(probe.Keyed)
		if len(seen) != 3 {
			t.Fatalf("%d attempts, want 3", len(seen))
		}
		for i, e := range seen {
			if values := e.Metadata.Get(keyKey); len(values) != 1 || values[0] == "" || values[0] != one(seen[0].Metadata, keyKey) {
				t.Errorf("attempt %d has keys %q, want one, the same in all", i+1, values)
			}
			if first := e.Metadata.Get("idempotency-first-sent"); len(first) != 1 || first[0] != one(seen[0].Metadata, "idempotency-first-sent") {
				t.Errorf("attempt %d first sent %q, want one time, the same in all", i+1, first)
			}
			wantEqual(t, "previous attempts", e.PreviousAttempts(), i)
			wantEqual(t, "values of previous attempts", len(e.Metadata.Get(attemptsKey)), min(i, 1))
		}
	})

	bubbles(t, "(b)", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Keyed, unavailable())
		_, err := r.call(t, probe.Keyed, request("x"), interceptors.WithKey(idempotency.Key{Value: "k1"}))
		wantOK(t, err)
		for _, e := range r.srv.Seen(probe.Keyed) {
			wantEqual(t, "key", one(e.Metadata, keyKey), "k1")
		}
	})

	bubbles(t, "(c)", func(t *testing.T) {
		var attemptCtx context.Context
		r := start(t, setup{inner: []grpc.DialOption{onAttempt(func(ctx context.Context, n int) error {
			if n == 1 {
				attemptCtx = context.WithoutCancel(ctx) //nolint:fatcontext // one assignment, to look at it from outside
			}
			return nil
		})}})
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Keyed, request("x"))
		wantOK(t, err)
		type label struct{}
		_, err = probe.Call(context.WithValue(ctx, label{}, "derived"), r.conn, probe.Keyed, request("x"))
		wantOK(t, err)
		// And with a context that has seen the wire: an inner interceptor's.
		_, err = probe.Call(attemptCtx, r.conn, probe.Keyed, request("x"))
		wantOK(t, err)
		distinct := map[string]bool{}
		for _, e := range r.srv.Seen(probe.Keyed) {
			wantEqual(t, "values", len(e.Metadata.Get(keyKey)), 1)
			distinct[one(e.Metadata, keyKey)] = true
		}
		wantEqual(t, "distinct keys", len(distinct), 3)
	})

	bubbles(t, "(d)", func(t *testing.T) {
		keys := map[string]bool{}
		r := start(t, setup{inner: []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ grpc.UnaryInvoker, _ ...grpc.CallOption) error {
				md, _ := metadata.FromOutgoingContext(ctx)
				keys[one(md, keyKey)] = true
				return nil
			}),
		}})
		for range 10_000 {
			_, err := probe.Call(t.Context(), r.conn, probe.Keyed, request("x"))
			wantOK(t, err)
		}
		wantEqual(t, "distinct keys", len(keys), 10_000)
	})

	for _, c := range []struct {
		name   string
		method string
		keys   []string
		code   codes.Code
		reason idempotency.Reason
		exec   int
	}{
		{"required, none", probe.Keyed, nil, codes.InvalidArgument, idempotency.ReasonKeyMissing, 0},
		{"required, empty", probe.Keyed, []string{""}, codes.InvalidArgument, idempotency.ReasonKeyInvalid, 0},
		{"required, blank", probe.Keyed, []string{"  "}, codes.InvalidArgument, idempotency.ReasonKeyInvalid, 0},
		{"required, two", probe.Keyed, []string{"k1", "k1"}, codes.InvalidArgument, idempotency.ReasonKeyInvalid, 0},
		{"optional, none", probe.KeyedOptional, nil, codes.OK, "", 2},
		{"optional, empty", probe.KeyedOptional, []string{""}, codes.InvalidArgument, idempotency.ReasonKeyInvalid, 0},
		{"optional, blank", probe.KeyedOptional, []string{"  "}, codes.InvalidArgument, idempotency.ReasonKeyInvalid, 0},
	} {
		bubbles(t, "(e) "+c.name, func(t *testing.T) {
			r := start(t, setup{plainClient: true})
			for _, payload := range []string{"p1", "p2"} {
				ctx := t.Context()
				for _, k := range c.keys {
					ctx = metadata.AppendToOutgoingContext(ctx, keyKey, k) //nolint:fatcontext // at most two
				}
				resp, err := probe.Call(ctx, r.conn, c.method, request(payload))
				wantCode(t, err, c.code)
				if err != nil {
					wantReason(t, err, c.code, c.reason)
				} else {
					wantEqual(t, "answer", resp.GetText(), payload)
				}
			}
			wantEqual(t, "exec", r.srv.Hits(c.method), c.exec)
		})
	}

	for name, value := range map[string]string{"non-ASCII": "schlüssel", "empty": "", "too long": strings.Repeat("k", 256), "blank": "a b"} {
		bubbles(t, "(f) "+name, func(t *testing.T) {
			r := start(t, setup{})
			_, err := r.call(t, probe.Keyed, request("x"), interceptors.WithKey(idempotency.Key{Value: value}))
			wantCode(t, err, codes.InvalidArgument)
			wantStop(t, err, interceptors.LocalRefusal, interceptors.No)
			if !strings.Contains(err.Error(), "key") {
				t.Errorf("error %v does not speak of the key", err)
			}
			if value != "" && strings.Contains(err.Error(), value) {
				t.Errorf("error %v tells the key", err)
			}
			r.wantCounts(t, probe.Keyed, 0, 0)
		})
	}
}

// Only a verdict is remembered, and whole.
func TestB31_WhatIsStoredAndReplayed(t *testing.T) {
	bubbles(t, "(a)", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Keyed, unavailable(), probe.Step{}, probe.Step{Code: codes.Internal})
		same := key("k1")
		want := []struct {
			code   codes.Code
			status string
		}{{codes.Unavailable, "executed"}, {codes.OK, "executed"}, {codes.OK, "replayed"}}
		for _, w := range want {
			var trailer metadata.MD
			resp, err := r.call(t, probe.Keyed, request("x"), same, interceptors.NoRetry(), grpc.Trailer(&trailer))
			wantCode(t, err, w.code)
			wantEqual(t, "status", one(trailer, statusKey), w.status)
			if err == nil {
				wantEqual(t, "execution", resp.GetExecution(), 2)
			}
		}
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 2)
	})

	bubbles(t, "(b)", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Keyed, probe.Step{
			Code: codes.FailedPrecondition, Message: "the account is closed",
			Details: []proto.Message{&errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{
				{Type: "ACCOUNT", Subject: "a-1", Description: "closed"},
			}}},
		})
		same := key("k1")
		var first, second metadata.MD
		_, err1 := r.call(t, probe.Keyed, request("x"), same, grpc.Trailer(&first))
		_, err2 := r.call(t, probe.Keyed, request("x"), same, grpc.Trailer(&second))
		wantCode(t, err1, codes.FailedPrecondition)
		if !proto.Equal(status.Convert(err1).Proto(), status.Convert(err2).Proto()) ||
			len(detailBytes(err1)) != 1 || detailBytes(err1)[0] != detailBytes(err2)[0] {
			t.Errorf("replay %v, want %v byte for byte", status.Convert(err2).Proto(), status.Convert(err1).Proto())
		}
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
		wantEqual(t, "status of the first", one(first, statusKey), "executed")
		wantEqual(t, "status of the second", one(second, statusKey), "replayed")
	})

	bubbles(t, "(c)", func(t *testing.T) {
		edited := 0
		r := start(t, setup{between: []grpc.ServerOption{
			grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
				resp, err := next(ctx, req)
				if m, ok := resp.(*probev1.Response); ok && edited == 0 {
					edited++
					m.Text, m.Labels = "edited", map[string]string{"edited": "yes"}
				}
				return resp, err
			}),
		}})
		same := key("k1")
		first, err := r.call(t, probe.Keyed, request("x"), same)
		wantOK(t, err)
		wantEqual(t, "the first answer", first.GetText(), "edited")
		for range 2 {
			var header, trailer metadata.MD
			replay, err := r.call(t, probe.Keyed, request("x"), same, grpc.Header(&header), grpc.Trailer(&trailer))
			wantOK(t, err)
			if want := (&probev1.Response{Text: "x", Execution: 1, Index: 1, Received: 1}); !proto.Equal(replay, want) {
				t.Errorf("replay %v, want %v as the handler made it", replay, want)
			}
			wantEqual(t, "status in the header", one(header, statusKey), "replayed")
			wantEqual(t, "status in the trailer", one(trailer, statusKey), "replayed")
		}
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})
}

// A lease that ran out is not the end of its owner, nor is a late owner the
// end of its successor.
func TestB39_LeaseRunsOutUnderTheHandler(t *testing.T) {
	const ms = time.Millisecond
	type outcome struct {
		text string
		err  error
	}
	// Four callers on servers of their own over one store.
	run := func(t *testing.T, cfg idempotency.Config, aFails bool) (exec int, got map[string]outcome) {
		t.Helper()
		cfg.Lease, cfg.WaitMax = 300*ms, 10*ms
		store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		a := start(t, setup{server: []interceptors.ServerOption{stored(store, cfg)}})
		handler := func(d time.Duration, text string, err error) probe.Step {
			return probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
				time.Sleep(d)
				if err != nil {
					return nil, err
				}
				return &probev1.Response{Text: text}, nil
			}}
		}
		var failure error
		if aFails {
			failure = status.Error(codes.Unavailable, "A failed")
		}
		a.srv.Script(probe.Keyed, handler(400*ms, "A", failure), handler(250*ms, "B", nil), handler(0, "third", nil))

		callers := map[string]*rig{"A": a}
		for _, name := range []string{"B", "C", "D"} {
			callers[name] = a.process(t, store, cfg)
		}
		same := key("k1")
		got = map[string]outcome{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for name, at := range map[string]time.Duration{"A": 0, "B": 320 * ms, "C": 450 * ms, "D": 710 * ms} {
			wg.Go(func() {
				time.Sleep(at)
				resp, err := probe.Call(t.Context(), callers[name].conn, probe.Keyed, request("x"), same, interceptors.NoRetry())
				mu.Lock()
				defer mu.Unlock()
				got[name] = outcome{resp.GetText(), err}
			})
		}
		wg.Wait()
		return a.srv.Hits(probe.Keyed), got
	}
	want := func(t *testing.T, got map[string]outcome, caller, text string) {
		t.Helper()
		if got[caller].err != nil || got[caller].text != text {
			t.Errorf("%s got %+v, want %q", caller, got[caller], text)
		}
	}
	inFlight := func(t *testing.T, got map[string]outcome, caller string) {
		t.Helper()
		wantReason(t, got[caller].err, codes.Aborted, idempotency.ReasonInFlight)
	}

	for _, aFails := range []bool{false, true} {
		bubbles(t, fmt.Sprintf("without renewal, A fails %v", aFails), func(t *testing.T) {
			exec, got := run(t, idempotency.Config{DisableRenewal: true, Rerun: true}, aFails)
			wantEqual(t, "exec", exec, 2)
			want(t, got, "B", "B")
			inFlight(t, got, "C")
			want(t, got, "D", "B")
			if aFails {
				wantCode(t, got["A"].err, codes.Unavailable)
			} else {
				want(t, got, "A", "A")
			}
		})
	}
	bubbles(t, "with renewal", func(t *testing.T) {
		exec, got := run(t, idempotency.Config{}, false)
		wantEqual(t, "exec", exec, 1)
		want(t, got, "A", "A")
		inFlight(t, got, "B")
		want(t, got, "C", "A")
		want(t, got, "D", "A")
	})
	bubbles(t, "with renewal, A fails", func(t *testing.T) {
		exec, got := run(t, idempotency.Config{}, true)
		wantEqual(t, "exec", exec, 2)
		wantCode(t, got["A"].err, codes.Unavailable)
		inFlight(t, got, "B")
		want(t, got, "C", "B") // the one new run
		want(t, got, "D", "B")
	})
	// Without leave to run again nobody does: the owner's late word counts.
	bubbles(t, "without renewal or rerun", func(t *testing.T) {
		exec, got := run(t, idempotency.Config{DisableRenewal: true}, false)
		wantEqual(t, "exec", exec, 1)
		want(t, got, "A", "A")
		wantReason(t, got["B"].err, codes.FailedPrecondition, idempotency.ReasonOutcomeUnknown)
		want(t, got, "C", "A")
		want(t, got, "D", "A")
	})
}

// Equal requests have equal fingerprints, however their maps come out.
func TestB49_MapOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		labels := func(n int) map[string]string {
			m := map[string]string{}
			for i := range n {
				m[fmt.Sprintf("label-%d", i)] = fmt.Sprintf("value-%d", i)
			}
			return m
		}
		build := func(m map[string]string) *probev1.Request {
			inner := &probev1.Node{Name: "inner", Children: map[string]*probev1.Node{}}
			for k := range m {
				inner.Children[k] = &probev1.Node{Name: k}
			}
			packed, err := anypb.New(inner) // in the order of this very moment
			if err != nil {
				t.Fatal(err)
			}
			return &probev1.Request{Labels: m, Any: packed}
		}

		store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		r := start(t, setup{server: []interceptors.ServerOption{stored(store, idempotency.Config{})}})
		other := r.process(t, store, idempotency.Config{})
		same := key("k1")
		replays := 0
		for i := range 500 {
			from := r
			if i%2 == 1 {
				from = other
			}
			var trailer metadata.MD
			_, err := from.call(t, probe.Keyed, build(labels(20)), same, grpc.Trailer(&trailer))
			wantOK(t, err)
			if one(trailer, statusKey) == "replayed" {
				replays++
			}
		}
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
		wantEqual(t, "replays", replays, 499)

		changed := maps.Clone(labels(20))
		changed["label-7"] = "another"
		for name, m := range map[string]map[string]string{"a changed value": changed, "a dropped entry": labels(19)} {
			_, err := r.call(t, probe.Keyed, build(m), same)
			if got := infoOf(err).GetReason(); got != string(idempotency.ReasonKeyReused) {
				t.Errorf("%s: %v, want KEY_REUSED", name, err)
			}
		}
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})
}
