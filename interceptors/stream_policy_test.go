package interceptors_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// MaxIdle ends a stream on which nothing moves, and only that.
func TestMaxIdle(t *testing.T) {
	idle := policy.Policy{MaxIdle: time.Second, Backoff: fixed(10 * time.Millisecond)}
	bubbles(t, "the server falls silent", func(t *testing.T) {
		held := &permits{}
		r := start(t, setup{client: append(withPolicy(idle), interceptors.WithOwnBreaker(held))})
		r.srv.Script(probe.ServerStream, probe.Step{Ops: []probe.Op{probe.Sleep(900 * time.Millisecond), probe.Send(1), probe.Hang()}})
		begun := time.Now()
		got, err := drain(ask(t.Context(), t, r.conn, 1))
		wantCode(t, err, codes.DeadlineExceeded)
		if !strings.Contains(err.Error(), "MaxIdle") {
			t.Errorf("%v does not name MaxIdle", err)
		}
		wantEqual(t, "messages", len(got), 1)
		wantEqual(t, "took", time.Since(begun), 1900*time.Millisecond)
		wantEqual(t, "attempts", r.counter.Count(), 1) // a message was delivered
		synctest.Wait()
		wantEqual(t, "the server was told after", r.srv.Seen()[0].Took, 1900*time.Millisecond)
		held.wantDone(t, 1)
		wantEqual(t, "what the breaker learned", held.done[0], breaker.Failure)
	})
	bubbles(t, "before the first message it is repeated", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(idle)})
		r.srv.Script(probe.ServerStream, probe.Step{Hang: true})
		begun := time.Now()
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantOK(t, err)
		wantEqual(t, "took", time.Since(begun), 1010*time.Millisecond)
		wantEqual(t, "attempts", r.counter.Count(), 2)
	})
	bubbles(t, "messages one way are enough", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(idle)})
		r.srv.Script(probe.ClientStream, probe.Step{Ops: []probe.Op{probe.RecvAll()}})
		stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
		for range 100 {
			time.Sleep(900 * time.Millisecond)
			send(t, stream, "tick")
		}
		wantOK(t, stream.CloseSend())
		_, err := recv(stream)
		wantOK(t, err)
	})
	bubbles(t, "each attempt has its own", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(policy.Policy{MaxIdle: time.Second, Backoff: fixed(900 * time.Millisecond)})})
		r.srv.Script(probe.ServerStream, probe.Step{Delay: 500 * time.Millisecond, Code: codes.Unavailable}, probe.Step{Delay: 900 * time.Millisecond})
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantOK(t, err)
		wantEqual(t, "attempts", r.counter.Count(), 2)
	})
	bubbles(t, "none unless asked for", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ServerStream, probe.Step{Ops: []probe.Op{probe.Send(1), probe.Sleep(240 * time.Hour), probe.Send(1)}})
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantOK(t, err)
	})
}

// Policy.Timeout bounds a stream from its first attempt to its end.
func TestTimeoutOfAStream(t *testing.T) {
	bubbles(t, "over all attempts", func(t *testing.T) {
		r := start(t, setup{plainServer: true, client: withPolicy(policy.Policy{Timeout: time.Second, MaxAttempts: 9, Backoff: fixed(10 * time.Millisecond)})})
		r.srv.Default(probe.Step{Delay: 300 * time.Millisecond, Code: codes.Unavailable})
		begun := time.Now()
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantCode(t, err, codes.DeadlineExceeded)
		if reaches(err, codes.Unavailable) == nil {
			t.Errorf("%v does not show what the server had said", err)
		}
		wantEqual(t, "took", time.Since(begun), time.Second)
		wantEqual(t, "attempts", r.counter.Count(), 4)
	})
	bubbles(t, "a stream that is delivering, too", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(policy.Policy{Timeout: time.Second})})
		r.srv.Default(probe.Step{Ops: []probe.Op{probe.Send(1), probe.Sleep(2 * time.Second), probe.Send(1)}})
		stream := ask(t.Context(), t, r.conn, 1)
		got, err := drain(stream)
		wantCode(t, err, codes.DeadlineExceeded)
		wantEqual(t, "messages", len(got), 1)
	})
	bubbles(t, "never longer than the caller's", func(t *testing.T) {
		r := start(t, setup{plainServer: true, client: withPolicy(policy.Policy{Timeout: time.Hour})})
		r.srv.Default(probe.Step{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begun := time.Now()
		_, err := drain(ask(ctx, t, r.conn, 1))
		wantCode(t, err, codes.DeadlineExceeded)
		wantEqual(t, "took", time.Since(begun), time.Second)
	})
	bubbles(t, "no time for another attempt", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(policy.Policy{Timeout: 500 * time.Millisecond, Backoff: fixed(5 * time.Second)})})
		r.srv.Default(unavailable())
		begun := time.Now()
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantCode(t, err, codes.Unavailable)
		wantStopped(t, err, interceptors.DeadlineTooShort, interceptors.Maybe)
		wantEqual(t, "took", time.Since(begun), 0)
	})
}

// What all streams of a channel keep is bounded together, and comes back.
func TestReplayIsBoundedPerChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const size, fit = 1 << 20, 15 // of 16 MiB, and every message weighs a little more
		r := start(t, setup{client: withPolicy(policy.Policy{ReplayBytes: 2 << 20, MaxAttempts: 2, Backoff: fixed(time.Millisecond)})})
		ctx, cancel := context.WithCancel(t.Context())
		take := func(n int) (kept int) {
			t.Helper()
			r.counter.Reset()
			r.srv.Script(probe.ClientStream, slices.Repeat([]probe.Step{{Ops: []probe.Op{probe.Recv(1), probe.Sleep(time.Second)}, Code: codes.Unavailable}}, n)...)
			var streams []grpc.ClientStream
			for range n {
				stream := openStream(ctx, t, r.conn, probe.ClientStream)
				wantOK(t, stream.SendMsg(&probev1.Request{Payload: make([]byte, size)}))
				wantOK(t, stream.CloseSend())
				streams = append(streams, stream)
			}
			for _, stream := range streams {
				if _, err := recv(stream); err == nil {
					kept++
				} else {
					wantCode(t, err, codes.Unavailable)
				}
			}
			return kept
		}
		wantEqual(t, "streams that could be repeated", take(fit+5), fit)
		wantEqual(t, "and again, when those are over", take(fit+5), fit)
		// Streams that are left give their share back as well.
		for range fit {
			send(t, openStream(ctx, t, r.conn, probe.ClientStream), strings.Repeat("x", size))
		}
		cancel()
		synctest.Wait()
		ctx = t.Context()
		wantEqual(t, "and after others were left", take(fit+5), fit)
	})
}

// One attempt, by any of the switches.
func TestStreamsWithoutRetries(t *testing.T) {
	for _, c := range []struct {
		name  string
		setup setup
		opts  []grpc.CallOption
		stop  interceptors.StopReason
	}{
		{name: "NoRetry", opts: []grpc.CallOption{interceptors.NoRetry()}},
		{name: "Override", opts: []grpc.CallOption{interceptors.Override(policy.Policy{MaxAttempts: 1})}},
		{name: "MaxAttempts 1", setup: setup{client: withPolicy(policy.Policy{MaxAttempts: 1})}},
		{name: "Disable"},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			recorded := &spans{}
			c.setup.client = append(c.setup.client, interceptors.WithTracerProvider(recorded))
			r := start(t, c.setup)
			if c.name == "Disable" {
				r.client.Disable()
			}
			for _, method := range []string{probe.ServerStream, probe.ClientStream, probe.Bidi} {
				r.counter.Reset()
				r.srv.Script(method, probe.Step{Code: codes.Unavailable, Message: "the server's own"})
				stream := openStream(t.Context(), t, r.conn, method, c.opts...)
				_ = stream.SendMsg(request("a")) // RecvMsg has the last word
				wantOK(t, stream.CloseSend())
				_, err := recv(stream)
				wantCode(t, err, codes.Unavailable)
				wantBare(t, err)
				wantEqual(t, "attempts", r.counter.Count(), 1)
				// Observed all the same.
				wantEqual(t, "stop", recorded.wantEndedOnce(t, "belay "+method[1:], 1)[0].text("belay.stop"), "disabled")
			}
			if c.name == "Disable" {
				r.client.Enable()
				r.srv.Script(probe.Bidi, unavailable())
				_, err := drain(openClosed(t.Context(), t, r))
				wantOK(t, err)
			}
		})
	}
}

// A keyed client stream has one key for all attempts, and is run once.
func TestKeyedClientStream(t *testing.T) {
	keyed := func(t *testing.T, r *rig, opts ...grpc.CallOption) (string, error) {
		t.Helper()
		stream := openStream(t.Context(), t, r.conn, probe.ClientStreamKeyed, opts...)
		for _, text := range []string{"a", "b", "c"} {
			_ = stream.SendMsg(request(text)) // RecvMsg has the last word
		}
		wantOK(t, stream.CloseSend())
		return recv(stream)
	}
	bubbles(t, "waits for a running execution, with one attempt", func(t *testing.T) {
		// The question whether it is over is not an attempt, and carries all that
		// was sent, as any attempt does.
		r := start(t, setup{plainServer: true, client: withPolicy(policy.Policy{MaxAttempts: 1})})
		inFlight := probe.Step{Ops: []probe.Op{probe.RecvAll()}, Code: codes.Aborted, Trailer: metadata.Pairs(reasonKey, "IN_FLIGHT", executedKey, "no")}
		r.srv.Script(probe.ClientStreamKeyed, inFlight, inFlight)
		got, err := keyed(t, r, key("k"))
		wantOK(t, err)
		wantEqual(t, "answer", got, "1:c")
		for _, e := range r.srv.Seen() {
			wantEqual(t, "messages", strings.Join(e.Texts, ","), "a,b,c")
			wantEqual(t, "key", one(e.Metadata, keyKey), "k")
		}
		for _, gap := range gaps(r.counter.Attempts()) {
			wantBetween(t, "between two questions", gap, 50*time.Millisecond, time.Second)
		}
		wantEqual(t, "runs", len(r.srv.Seen()), 3)
	})
	bubbles(t, "a bad key is refused before anything is sent", func(t *testing.T) {
		r := start(t, setup{})
		synctest.Wait() // the server serves
		_, err := r.conn.NewStream(t.Context(), descOf(probe.ClientStreamKeyed), probe.ClientStreamKeyed, key("clé"))
		wantCode(t, err, codes.InvalidArgument)
		r.wantCounts(t, probe.ClientStreamKeyed, 0, 0)
	})
}

// Pushback is read from the trailer of a stream, as of a unary call.
func TestPushbackOfAStream(t *testing.T) {
	for _, c := range []struct {
		pushback string
		attempts int
		gap      time.Duration
		stop     interceptors.StopReason
	}{
		{"300", 2, 300 * time.Millisecond, interceptors.NotStopped},
		{"0", 2, 10 * time.Millisecond, interceptors.NotStopped}, // never sooner than the backoff
		{"-1", 1, 0, interceptors.Pushback},
		{"soon", 1, 0, interceptors.Pushback},
		{"7200000", 1, 0, interceptors.Pushback}, // two hours: come back later
	} {
		for _, method := range []string{probe.ServerStream, probe.ClientStream, probe.Bidi} {
			bubbles(t, c.pushback+method, func(t *testing.T) {
				r := start(t, setup{plainServer: true, client: withPolicy(policy.Policy{Backoff: fixed(10 * time.Millisecond)})})
				r.srv.Script(method, probe.Step{Code: codes.Unavailable, Pushback: c.pushback})
				stream := openStream(t.Context(), t, r.conn, method)
				_ = stream.SendMsg(request("a")) // RecvMsg has the last word
				wantOK(t, stream.CloseSend())
				_, err := drain(stream)
				wantEqual(t, "attempts", r.counter.Count(), c.attempts)
				if c.stop != interceptors.NotStopped {
					wantStopped(t, err, c.stop, interceptors.Maybe)
					return
				}
				wantOK(t, err)
				wantEqual(t, "gap", gaps(r.counter.Attempts())[0], c.gap)
			})
		}
	}
	bubbles(t, "two values are no wish but to stop", func(t *testing.T) {
		r := start(t, setup{plainServer: true})
		r.srv.Script(probe.Bidi, probe.Step{Code: codes.Unavailable, Trailer: metadata.Pairs(pushbackKey, "10", pushbackKey, "10")})
		_, err := drain(openStream(t.Context(), t, r.conn, probe.Bidi))
		wantStopped(t, err, interceptors.Pushback, interceptors.Maybe)
	})
}

// Streams and unary calls of a channel have one bank.
func TestOneBankForBothKinds(t *testing.T) {
	bubbles(t, "what streams spend, unary calls lack", func(t *testing.T) {
		bank := budget.New(budget.Config{Initial: 2})
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithBudget(bank)}})
		r.srv.Default(unavailable())
		_, err := drain(openClosed(t.Context(), t, r)) // three attempts: two retries that failed
		wantStopped(t, err, interceptors.Exhausted, interceptors.Maybe)
		r.counter.Reset()
		_, err = r.call(t, probe.Read, request("a"))
		wantStopped(t, err, interceptors.BudgetSpent, interceptors.Maybe)
		wantEqual(t, "attempts", r.counter.Count(), 1)
	})
	bubbles(t, "what unary calls spend, streams lack", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithBudget(budget.New(budget.Config{Initial: 2}))}})
		r.srv.Default(unavailable())
		_, err := r.call(t, probe.Read, request("a"))
		wantStopped(t, err, interceptors.Exhausted, interceptors.Maybe)
		for _, method := range []string{probe.ServerStream, probe.ClientStream, probe.Bidi} {
			r.counter.Reset()
			stream := openStream(t.Context(), t, r.conn, method)
			_ = stream.SendMsg(request("a")) // RecvMsg has the last word
			_, err = recv(stream)
			wantStopped(t, err, interceptors.BudgetSpent, interceptors.Maybe)
			wantEqual(t, "attempts", r.counter.Count(), 1)
		}
	})
	bubbles(t, "a retry that works is free, from the moment it works", func(t *testing.T) {
		bank := budget.New(budget.Config{Initial: 1})
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithBudget(bank)}})
		r.srv.Script(probe.ServerStream, unavailable(), probe.Step{Ops: []probe.Op{probe.Send(1), probe.Hang()}})
		ctx, cancel := context.WithCancel(t.Context())
		stream := ask(ctx, t, r.conn, 1)
		_, err := recv(stream)
		wantOK(t, err)
		wantEqual(t, "balance while the stream lives", bank.Snapshot().Balance, 1.0)
		cancel()
		_, err = recv(stream)
		wantCode(t, err, codes.Canceled)
		wantEqual(t, "balance after it", bank.Snapshot().Balance, 1.0)
	})
	bubbles(t, "a stream that succeeds at once earns", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithBudget(budget.New(budget.Config{Initial: 1, Earn: 0.5, Cap: 10}))}})
		r.srv.Script(probe.ServerStream, unavailable(), unavailable(), unavailable())
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantStopped(t, err, interceptors.BudgetSpent, interceptors.Maybe)
		r.srv.Script(probe.ServerStream)
		for range 2 {
			_, err = drain(ask(t.Context(), t, r.conn, 1))
			wantOK(t, err)
		}
		r.srv.Script(probe.ServerStream, unavailable())
		_, err = drain(ask(t.Context(), t, r.conn, 1))
		wantOK(t, err)
	})
}

// Streams and unary calls of a service have one breaker. It learns how a stream
// ended and not that it opened.
func TestOneBreakerForBothKinds(t *testing.T) {
	cfg := interceptors.WithBreaker(breaker.Config{MinCalls: 5, FailureRate: 0.8})
	bubbles(t, "opened by streams", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{cfg}})
		r.srv.Default(probe.Step{Ops: []probe.Op{probe.Send(1)}, Code: codes.Unavailable})
		for range 5 {
			got, err := drain(ask(t.Context(), t, r.conn, 1))
			wantCode(t, err, codes.Unavailable)
			wantEqual(t, "messages", len(got), 1)
		}
		_, err := r.call(t, probe.Read, request("a"))
		wantStopped(t, err, interceptors.BreakerOpen, interceptors.No)
		stream, err := r.conn.NewStream(t.Context(), descOf(probe.Bidi), probe.Bidi)
		wantStopped(t, err, interceptors.BreakerOpen, interceptors.No)
		if !errors.Is(err, breaker.ErrOpen) || stream != nil {
			t.Errorf("stream %v, error %v; want none and breaker.ErrOpen", stream, err)
		}
		wantEqual(t, "hits", r.srv.TotalHits(), 5)
	})
	bubbles(t, "opened by unary calls", func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{cfg}})
		r.srv.Default(unavailable())
		for range 5 {
			_, err := r.call(t, probe.Undeclared, request("a"))
			wantCode(t, err, codes.Unavailable)
		}
		_, err := r.conn.NewStream(t.Context(), descOf(probe.ClientStream), probe.ClientStream)
		wantStopped(t, err, interceptors.BreakerOpen, interceptors.No)
	})
	for _, c := range []struct {
		name string
		step probe.Step
		end  func(cancel context.CancelFunc, stream grpc.ClientStream)
		want breaker.Outcome
	}{
		{"success", probe.Step{}, func(_ context.CancelFunc, s grpc.ClientStream) { _, _ = drain(s) }, breaker.Success},
		{"a verdict", probe.Step{Code: codes.NotFound}, func(_ context.CancelFunc, s grpc.ClientStream) { _, _ = drain(s) }, breaker.Success},
		{"a failure half-way", probe.Step{Ops: []probe.Op{probe.Send(1)}, Code: codes.Internal}, func(_ context.CancelFunc, s grpc.ClientStream) { _, _ = drain(s) }, breaker.Failure},
		{"a caller who leaves", probe.Step{Ops: []probe.Op{probe.Send(1), probe.Hang()}}, func(cancel context.CancelFunc, _ grpc.ClientStream) { cancel() }, breaker.Neutral},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			held := &permits{}
			r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithOwnBreaker(held)}})
			r.srv.Script(probe.ServerStream, c.step)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stream := ask(ctx, t, r.conn, 1)
			synctest.Wait()
			wantEqual(t, "permits held by an open stream", held.open(), 1)
			c.end(cancel, stream)
			synctest.Wait()
			held.wantDone(t, 1)
			wantEqual(t, "outcome", held.done[0], c.want)
		})
	}
}

// Each attempt of a stream has a span of its own, and the stream one above them.
func TestSpansOfAStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		recorded := &spans{}
		r := start(t, setup{client: append(withPolicy(policy.Policy{Backoff: fixed(10 * time.Millisecond)}), interceptors.WithTracerProvider(recorded))})
		r.srv.Script(probe.Bidi, unavailable(), unavailable())
		_, err := drain(openClosed(t.Context(), t, r))
		wantOK(t, err)
		const name = "belay.probe.v1.ProbeService/Bidi"
		call := recorded.wantEndedOnce(t, "belay "+name, 1)[0]
		attempts := recorded.wantEndedOnce(t, name, 3)
		for i, code := range []string{"UNAVAILABLE", "UNAVAILABLE", "OK"} {
			wantEqual(t, "parent", attempts[i].parent, call.context.SpanID())
			wantEqual(t, "code", attempts[i].text("rpc.response.status_code"), code)
			wantEqual(t, "number", attempts[i].text("belay.attempt.number"), strconv.Itoa(i+1))
		}
		wantEqual(t, "events", strings.Join(call.events, ","), "backoff,backoff,committed")
	})
}
