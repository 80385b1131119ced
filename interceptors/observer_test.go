package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

var kindNames = map[interceptors.EventKind]string{
	interceptors.EventAttempt: "attempt", interceptors.EventBackoff: "backoff", interceptors.EventPoll: "poll",
	interceptors.EventCall: "call", interceptors.EventDemoted: "demoted", interceptors.EventMark: "mark",
	interceptors.EventShed: "shed", interceptors.EventDedupe: "dedupe", interceptors.EventForeign: "foreign",
}

// story is one line per event, with what its kind sets.
func story(all []interceptors.Event) []string {
	var lines []string
	for _, e := range all {
		line := kindNames[e.Kind]
		switch e.Kind {
		case interceptors.EventAttempt:
			line += fmt.Sprintf(" %d %v in %v sent=%v", e.Attempt, e.Code, e.Duration, e.Sent)
		case interceptors.EventBackoff, interceptors.EventPoll:
			line += fmt.Sprintf(" after %d for %v", e.Attempt, e.Delay)
		case interceptors.EventCall:
			line += fmt.Sprintf(" %d %v %q in %v", e.Attempt, e.Code, e.Stop, e.Duration)
		case interceptors.EventMark:
			line += fmt.Sprintf(" %v %v %s", e.Code, e.Stop, e.Detail)
		default:
			line += " " + e.Detail
		}
		lines = append(lines, strings.TrimSpace(line))
	}
	return lines
}

// One event per decision, in the order of the call.
func TestEventsOfACall(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name   string
		method string
		steps  []probe.Step
		opts   []grpc.CallOption
		client []string
		server []string
	}{
		{"at once", probe.Read, nil, nil, []string{
			"attempt 1 OK in 0s sent=true",
			`call 1 OK "" in 0s`,
		}, nil},
		{"a blip", probe.Read, []probe.Step{{Code: codes.Unavailable, Delay: 20 * ms}, {Delay: 30 * ms}}, nil, []string{
			"attempt 1 Unavailable in 20ms sent=true",
			"backoff after 1 for 10ms",
			"attempt 2 OK in 30ms sent=true",
			`call 2 OK "" in 60ms`,
		}, nil},
		{"exhausted", probe.Read, []probe.Step{unavailable(), unavailable(), unavailable()}, nil, []string{
			"attempt 1 Unavailable in 0s sent=true", "backoff after 1 for 10ms",
			"attempt 2 Unavailable in 0s sent=true", "backoff after 2 for 10ms",
			"attempt 3 Unavailable in 0s sent=true",
			`call 3 Unavailable "exhausted" in 20ms`,
		}, nil},
		{"final", probe.Read, []probe.Step{{Code: codes.NotFound}}, nil, []string{
			"attempt 1 NotFound in 0s sent=true",
			`call 1 NotFound "final" in 0s`,
		}, nil},
		{"refused here", probe.Read, nil, []grpc.CallOption{interceptors.Override(policy.Policy{MaxAttempts: -1})}, []string{
			`call 0 InvalidArgument "local_refusal" in 0s`,
		}, nil},
		{"keyed", probe.Keyed, []probe.Step{{LoseReply: true}}, nil, []string{
			"attempt 1 Unavailable in 0s sent=true", "backoff after 1 for 10ms",
			"attempt 2 OK in 0s sent=true",
			`call 2 OK "" in 10ms`,
		}, []string{"dedupe executed", "dedupe replayed"}},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			client, server := new(events), new(events)
			r := start(t, setup{
				client: []interceptors.ClientOption{
					interceptors.WithObserver(client), interceptors.WithPolicy(policy.Policy{Backoff: fixed(10 * ms)}),
				},
				server: []interceptors.ServerOption{interceptors.WithObserver(server)},
			})
			r.srv.Script(c.method, c.steps...)
			_, _ = r.call(t, c.method, request("x"), c.opts...)
			if diff := cmp.Diff(c.client, story(client.list())); diff != "" {
				t.Errorf("client's events (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.server, story(server.list())); diff != "" {
				t.Errorf("server's events (-want +got):\n%s", diff)
			}
			for _, e := range client.list() {
				wantEqual(t, "method", e.Method, c.method)
			}
		})
	}
}

func TestEventsOfAServer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		seen := new(events)
		leaf := start(t, setup{})
		leaf.srv.Default(unavailable())
		mid := start(t, setup{plainClient: true, server: []interceptors.ServerOption{
			interceptors.WithObserver(seen), stored(&brokenStore{}, idempotency.Config{}),
			interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: 100 * time.Millisecond}),
		}})
		mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			return probe.Call(ctx, leaf.conn, probe.Read, req)
		}})
		_, _ = mid.call(t, probe.Read, request("x"))
		_, _ = probe.Call(metadata.AppendToOutgoingContext(t.Context(), keyKey, "k"), mid.conn, probe.Keyed, request("x"))
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, _ = probe.Call(ctx, mid.conn, probe.Read, request("x"))
		want := []string{"mark Unavailable exhausted " + probe.Read, "dedupe STORE_UNAVAILABLE", "shed deadline"}
		if diff := cmp.Diff(want, story(seen.list())); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// An observer runs with no lock held: it may use the client that tells it.
func TestObserverMayCallBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var r *rig
		calls := 0
		observer := interceptors.ObserverFunc(func(ctx context.Context, e interceptors.Event) {
			if e.Kind != interceptors.EventBackoff || calls > 0 {
				return
			}
			calls++
			_ = r.client.Explain(r.conn, e.Method)
			_ = r.client.Budget(r.conn).Snapshot()
			_ = r.client.Breaker(r.conn, probeService).Snapshot()
			if err := r.client.Update(); err != nil {
				t.Error(err)
			}
			if _, err := probe.Call(ctx, r.conn, probe.Idempotent, request("inner")); err != nil {
				t.Error(err)
			}
		})
		r = start(t, setup{asShipped: true, client: []interceptors.ClientOption{interceptors.WithObserver(observer)}})
		r.srv.Script(probe.Read, unavailable())
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		wantEqual(t, "calls of the observer's own", r.srv.Hits(probe.Idempotent), 1)
	})
}

// What a CallError says, attempt by attempt.
func TestCallError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Backoff: fixed(10 * time.Millisecond)})}})
		r.srv.Script(probe.Read,
			probe.Step{Code: codes.Unavailable, Message: "one", Delay: 5 * time.Millisecond},
			probe.Step{Code: codes.Unavailable, Message: "two", Delay: 7 * time.Millisecond},
			probe.Step{Code: codes.FailedPrecondition, Message: "three"})
		began := time.Now()
		_, err := r.call(t, probe.Read, request("x"))
		wantStop(t, err, interceptors.Final, interceptors.Maybe)
		ce := callErrorOf(t, err)
		wantEqual(t, "method", ce.Method(), probe.Read)
		wantEqual(t, "text", err.Error(), "rpc error: code = FailedPrecondition desc = three (belay: final after 3 attempt(s), effect: maybe)")

		const ms = time.Millisecond
		want := []interceptors.Attempt{
			{Code: codes.Unavailable, Start: began, Duration: 5 * ms},
			{Code: codes.Unavailable, Start: began.Add(15 * ms), Duration: 7 * ms, Delay: 10 * ms},
			{Code: codes.FailedPrecondition, Start: began.Add(32 * ms), Delay: 10 * ms},
		}
		got := ce.Attempts()
		for i := range got {
			if got[i].Err == nil || status.Code(got[i].Err) != got[i].Code {
				t.Errorf("attempt %d has the error %v beside code %v", i+1, got[i].Err, got[i].Code)
			}
			got[i].Err = nil
			want[min(i, 2)].Sent, want[min(i, 2)].Executed, want[min(i, 2)].Origin = true, interceptors.Maybe, interceptors.OriginPeer
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("attempts (-want +got):\n%s", diff)
		}
		// A copy: nobody edits another's error.
		got[0].Code = codes.OK
		wantEqual(t, "code after an edit", ce.Attempts()[0].Code, codes.Unavailable)
	})

	// Thousands of questions keep a bounded list.
	bubbles(t, "bounded", func(t *testing.T) {
		r := start(t, setup{plainServer: true, client: []interceptors.ClientOption{
			interceptors.WithPolicy(policy.Policy{MaxAttempts: 100, Backoff: fixed(time.Millisecond)}),
		}})
		r.srv.Default(unavailable())
		began := time.Now()
		_, err := r.call(t, probe.Read, request("x"))
		list := wantStop(t, err, interceptors.Exhausted, interceptors.Maybe).Attempts()
		wantEqual(t, "kept", len(list), 32)
		wantEqual(t, "the first", list[0].Start.Equal(began), true)
		wantEqual(t, "the last", list[31].Start.Equal(began.Add(99*time.Millisecond)), true)
		if !strings.Contains(err.Error(), "after 100 attempt(s)") {
			t.Errorf("error %v does not count all attempts", err)
		}
	})
}

// Executed is the worst over all attempts.
func TestExecuted(t *testing.T) {
	bubbles(t, "never claimed", func(t *testing.T) {
		r := start(t, setup{server: []interceptors.ServerOption{
			stored(&faultyStore{begin: func() error { return idempotency.ErrFull }}, idempotency.Config{}),
		}})
		_, err := r.call(t, probe.Keyed, request("x"))
		wantReason(t, err, codes.ResourceExhausted, idempotency.ReasonStoreFull)
		wantStop(t, err, interceptors.Pushback, interceptors.No)
		r.wantCounts(t, probe.Keyed, 1, 0)
	})
	bubbles(t, "it may have", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithPolicy(policy.Policy{Codes: []codes.Code{codes.Internal}}),
		}})
		r.srv.Script(probe.Keyed, probe.Step{Code: codes.Internal})
		_, err := r.call(t, probe.Keyed, request("x"))
		wantReason(t, err, codes.FailedPrecondition, idempotency.ReasonOutcomeUnknown)
		wantStop(t, err, interceptors.Final, interceptors.Maybe)
		r.wantCounts(t, probe.Keyed, 2, 1)
	})
	bubbles(t, "done, and the reply is lost for good", func(t *testing.T) {
		r := start(t, setup{server: []interceptors.ServerOption{memory(idempotency.Config{MaxReply: 1})}})
		r.srv.Script(probe.Keyed, probe.Step{LoseReply: true})
		_, err := r.call(t, probe.Keyed, request("x"))
		wantReason(t, err, codes.FailedPrecondition, idempotency.ReasonResponseNotRetained)
		wantStop(t, err, interceptors.Final, interceptors.Yes)
	})
	bubbles(t, "not executed, again and again", func(t *testing.T) {
		r := start(t, setup{server: []interceptors.ServerOption{stored(&brokenStore{}, idempotency.Config{})}})
		_, err := r.call(t, probe.Keyed, request("x"))
		wantStop(t, err, interceptors.Exhausted, interceptors.No)
		r.wantCounts(t, probe.Keyed, 3, 0)
	})
	bubbles(t, "an undeclared method whose server says it did not run it", func(t *testing.T) {
		// Its key is honoured by the server's configuration alone, so the client
		// knows nothing of it and goes by the server's word.
		store := &faultyStore{Store: idempotency.NewMemoryStore(idempotency.MemoryConfig{})}
		n := 0
		store.begin = func() error {
			if n++; n <= 3 {
				return errors.New("down")
			}
			return nil
		}
		r := start(t, setup{server: []interceptors.ServerOption{storeOption{interceptors.WithIdempotencyFor(
			"belay.probe.v1.ProbeService/Undeclared", store, idempotency.Config{Scope: idempotency.SingleTenant})}}})
		_, err := r.call(t, probe.Undeclared, request("x"), key("k1"))
		wantOK(t, err)
		r.wantCounts(t, probe.Undeclared, 2, 1)
	})
}
