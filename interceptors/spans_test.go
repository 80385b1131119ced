package interceptors_test

import (
	"context"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"
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

// recorder is a TracerProvider that keeps every span, as an SDK would with all
// sampled. (The SDK itself is the program's choice, so this module's tests do
// without.)
type recorder struct {
	embedded.TracerProvider

	unsampled bool // spans are real, and record nothing

	ids atomic.Uint64

	mu    sync.Mutex // guards spans
	spans []*recordedSpan
}

func (r *recorder) Tracer(string, ...trace.TracerOption) trace.Tracer {
	return &recordingTracer{recorder: r}
}

type recordingTracer struct {
	embedded.Tracer

	recorder *recorder
}

func (t *recordingTracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	r := t.recorder
	cfg := trace.NewSpanStartConfig(opts...)
	id := r.ids.Add(1)
	s := &recordedSpan{recorder: r, name: name, kind: cfg.SpanKind(), attributes: map[string]string{}}
	parent := trace.SpanContextFromContext(ctx)
	s.parent = parent.SpanID()
	var scc trace.SpanContextConfig
	scc.TraceID = parent.TraceID()
	if !parent.IsValid() {
		binary.BigEndian.PutUint64(scc.TraceID[8:], id)
	}
	binary.BigEndian.PutUint64(scc.SpanID[:], id)
	if !r.unsampled {
		scc.TraceFlags = trace.FlagsSampled
	}
	s.context = trace.NewSpanContext(scc)
	s.SetAttributes(cfg.Attributes()...)
	r.mu.Lock()
	r.spans = append(r.spans, s)
	r.mu.Unlock()
	return trace.ContextWithSpan(ctx, s), s
}

// recordedSpan is one span.
type recordedSpan struct {
	noop.Span

	recorder *recorder
	name     string
	kind     trace.SpanKind
	context  trace.SpanContext
	parent   trace.SpanID

	// Guarded by recorder.mu.
	attributes map[string]string
	events     []string
	status     otelcodes.Code
	ends       int
}

func (s *recordedSpan) SpanContext() trace.SpanContext { return s.context }

func (s *recordedSpan) IsRecording() bool {
	s.recorder.mu.Lock()
	defer s.recorder.mu.Unlock()
	return !s.recorder.unsampled && s.ends == 0
}

func (s *recordedSpan) SetStatus(c otelcodes.Code, _ string) {
	s.recorder.mu.Lock()
	defer s.recorder.mu.Unlock()
	s.status = c
}

func (s *recordedSpan) SetAttributes(kv ...attribute.KeyValue) {
	s.recorder.mu.Lock()
	defer s.recorder.mu.Unlock()
	for _, a := range kv {
		s.attributes[string(a.Key)] = a.Value.String()
	}
}

func (s *recordedSpan) AddEvent(name string, _ ...trace.EventOption) {
	s.recorder.mu.Lock()
	defer s.recorder.mu.Unlock()
	s.events = append(s.events, name)
}

func (s *recordedSpan) End(...trace.SpanEndOption) {
	s.recorder.mu.Lock()
	defer s.recorder.mu.Unlock()
	s.ends++
}

// named returns the spans of that name and kind in the order of their start.
func (r *recorder) named(name string, kind trace.SpanKind) []*recordedSpan {
	r.mu.Lock()
	defer r.mu.Unlock()
	var found []*recordedSpan
	for _, s := range r.spans {
		if s.name == name && s.kind == kind {
			found = append(found, s)
		}
	}
	return found
}

// attempts are the attempt spans of a method.
func (r *recorder) attempts(method string) []*recordedSpan {
	return r.named(strings.TrimPrefix(method, "/"), trace.SpanKindClient)
}

// call is the one call span of a method.
func (r *recorder) call(t *testing.T, method string) *recordedSpan {
	t.Helper()
	calls := r.named("belay "+strings.TrimPrefix(method, "/"), trace.SpanKindInternal)
	if len(calls) != 1 {
		t.Fatalf("%d call spans, want 1", len(calls))
	}
	return calls[0]
}

// wantEnded fails for every span of ours that was not ended exactly once. The
// probe by which the suite finds out that spans are real is never ended.
func (r *recorder) wantEnded(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.spans {
		if s.name != "belay probe" && s.ends != 1 {
			t.Errorf("span %q was ended %d times", s.name, s.ends)
		}
	}
}

// traced is a rig whose client has a recorder, and a context with the caller's
// span P in it.
func traced(t *testing.T, s setup) (*rig, *recorder, context.Context, *recordedSpan) {
	t.Helper()
	rec := new(recorder)
	s.client = append([]interceptors.ClientOption{interceptors.WithTracerProvider(rec)}, s.client...)
	ctx, p := rec.Tracer("app").Start(t.Context(), "P") //nolint:spancheck // the test ends it
	return start(t, s), rec, ctx, p.(*recordedSpan)     //nolint:forcetypeassert,spancheck // the recorder's own; the test ends it
}

// Every attempt has a span, and every span an end.
func TestB15_EveryAttemptSpanIsEnded(t *testing.T) {
	for _, c := range []struct {
		name    string
		steps   []probe.Step
		cancel  time.Duration
		backoff time.Duration
		codes   []string
		retries int
	}{
		{"(a)", []probe.Step{unavailable(), unavailable(), {}}, 0, 10 * time.Millisecond, []string{"UNAVAILABLE", "UNAVAILABLE", "OK"}, 2},
		{"(b)", []probe.Step{unavailable()}, 300 * time.Millisecond, time.Second, []string{"UNAVAILABLE"}, 0},
		{"(c)", []probe.Step{unavailable(), unavailable(), unavailable()}, 0, 10 * time.Millisecond, []string{"UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"}, 2},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r, rec, ctx, p := traced(t, setup{client: []interceptors.ClientOption{
				interceptors.WithPolicy(policy.Policy{Backoff: fixed(c.backoff)}),
			}})
			r.srv.Script(probe.Read, c.steps...)
			if c.cancel > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithCancel(ctx)
				time.AfterFunc(c.cancel, cancel)
			}
			_, _ = probe.Call(ctx, r.conn, probe.Read, request("x"))

			if !p.IsRecording() {
				t.Error("the caller's span was ended for it")
			}
			p.End()
			rec.wantEnded(t)
			call := rec.call(t, probe.Read)
			if call.parent != p.context.SpanID() {
				t.Error("the call's span is not under the caller's")
			}
			attempts := rec.attempts(probe.Read)
			var got []string
			for i, a := range attempts {
				got = append(got, a.attributes["rpc.response.status_code"])
				if a.parent != call.context.SpanID() {
					t.Errorf("attempt %d is not directly under the call", i+1)
				}
				wantEqual(t, "attempt number", a.attributes["belay.attempt.number"], strconv.Itoa(i+1))
				wantEqual(t, "previous attempts", a.attributes["previous-rpc-attempts"], strconv.Itoa(i))
			}
			if !slices.Equal(got, c.codes) {
				t.Errorf("attempts ended with %v, want %v", got, c.codes)
			}
			wantEqual(t, "retries", len(attempts)-1, c.retries)
			wantEqual(t, "attempts of the call", call.attributes["belay.attempts"], strconv.Itoa(len(c.codes)))
		})
	}
}

// What happened to a call is told by its span.
func TestCallSpan(t *testing.T) {
	for _, c := range []struct {
		name   string
		client []interceptors.ClientOption
		steps  []probe.Step
		events []string
		stop   string
		code   string
	}{
		{"at once", nil, nil, nil, "", "OK"},
		{"a blip", nil, []probe.Step{unavailable()}, []string{"backoff"}, "", "OK"},
		{"pushback", nil, []probe.Step{{Code: codes.Unavailable, Pushback: "-1"}}, []string{"pushback"}, "pushback", "UNAVAILABLE"},
		{"no budget", []interceptors.ClientOption{interceptors.WithBudget(empty())}, []probe.Step{unavailable()}, []string{"budget refused"}, "budget_spent", "UNAVAILABLE"},
		{"breaker", []interceptors.ClientOption{interceptors.WithBreaker(threshold(1, time.Minute))}, []probe.Step{unavailable()}, nil, "breaker_open", "UNAVAILABLE"},
		{"final", nil, []probe.Step{{Code: codes.NotFound}}, nil, "final", "NOT_FOUND"},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r, rec, ctx, p := traced(t, setup{client: c.client})
			r.srv.Script(probe.Read, c.steps...)
			_, _ = probe.Call(ctx, r.conn, probe.Read, request("x"))
			p.End()
			rec.wantEnded(t)
			call := rec.call(t, probe.Read)
			if !slices.Equal(call.events, c.events) {
				t.Errorf("events %q, want %q", call.events, c.events)
			}
			wantEqual(t, "stop", call.attributes["belay.stop"], c.stop)
			wantEqual(t, "code", call.attributes["rpc.response.status_code"], c.code)
			wantEqual(t, "method", call.attributes["rpc.method"], strings.TrimPrefix(probe.Read, "/"))
			wantEqual(t, "failed", call.status == otelcodes.Error, c.code != "OK")
		})
	}

	bubbles(t, "refused before anything", func(t *testing.T) {
		r, rec, ctx, p := traced(t, setup{})
		ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantStop(t, err, interceptors.DeadlineTooShort, interceptors.No)
		p.End()
		rec.wantEnded(t)
		wantEqual(t, "attempts", len(rec.attempts(probe.Read)), 0)
		if call := rec.call(t, probe.Read); !slices.Equal(call.events, []string{"deadline too short"}) {
			t.Errorf("events %q", call.events)
		}
	})

	bubbles(t, "an open breaker", func(t *testing.T) {
		r, rec, ctx, p := traced(t, setup{client: []interceptors.ClientOption{interceptors.WithBreaker(threshold(1, time.Minute))}})
		r.srv.Script(probe.Undeclared, unavailable())
		_, _ = probe.Call(ctx, r.conn, probe.Undeclared, request("x"))
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantStop(t, err, interceptors.BreakerOpen, interceptors.No)
		p.End()
		rec.wantEnded(t)
		if call := rec.call(t, probe.Read); !slices.Equal(call.events, []string{"breaker refused"}) {
			t.Errorf("events %q", call.events)
		}
		wantEqual(t, "state", r.breakerState(), breaker.Open)
	})

	bubbles(t, "a panic", func(t *testing.T) {
		r, rec, ctx, p := traced(t, setup{inner: []grpc.DialOption{onAttempt(func(context.Context, int) error { panic("scripted") })}})
		func() {
			defer func() { _ = recover() }()
			_, _ = probe.Call(ctx, r.conn, probe.Read, request("x"))
		}()
		p.End()
		rec.wantEnded(t)
		wantEqual(t, "attempts", len(rec.attempts(probe.Read)), 1)
	})

	bubbles(t, "keyed", func(t *testing.T) {
		r, rec, ctx, p := traced(t, setup{})
		r.srv.Script(probe.Keyed, probe.Step{LoseReply: true})
		_, err := probe.Call(ctx, r.conn, probe.Keyed, request("x"), key("secret-key"))
		wantOK(t, err)
		p.End()
		rec.wantEnded(t)
		attempts := rec.attempts(probe.Keyed)
		wantEqual(t, "status of the retry", attempts[1].attributes["belay.idempotency.status"], "replayed")
		for _, s := range append(attempts, rec.call(t, probe.Keyed)) {
			for k, v := range s.attributes {
				if strings.Contains(v, "secret-key") {
					t.Errorf("attribute %s tells the key", k)
				}
			}
		}
	})
}

func empty() *budget.Budget { return budget.New(budget.Config{StartEmpty: true}) }

// Who is not listened to costs nothing, and who is sampled out sends its
// context and no attempt spans.
func TestSpansNobodyRecords(t *testing.T) {
	bubbles(t, "no SDK", func(t *testing.T) {
		counting := &countingProvider{TracerProvider: noop.NewTracerProvider()}
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithTracerProvider(counting)}})
		for range 10 {
			_, err := r.call(t, probe.Read, request("x"))
			wantOK(t, err)
		}
		wantEqual(t, "spans started in one second", counting.starts.Load(), 1)
		time.Sleep(time.Second)
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		wantEqual(t, "spans started after another", counting.starts.Load(), 2)
	})
	bubbles(t, "sampled out", func(t *testing.T) {
		rec := &recorder{unsampled: true}
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithTracerProvider(rec), interceptors.WithPropagators(propagation.TraceContext{}),
		}})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		wantEqual(t, "attempt spans", len(rec.attempts(probe.Read)), 0)
		rec.wantEnded(t)
		if got := one(r.srv.Seen(probe.Read)[0].Metadata, "traceparent"); !strings.HasSuffix(got, "-00") {
			t.Errorf("traceparent %q, want one that is not sampled", got)
		}
	})
}

// countingProvider counts the spans of a provider.
type countingProvider struct {
	trace.TracerProvider

	starts atomic.Int32
}

func (p *countingProvider) Tracer(name string, opts ...trace.TracerOption) trace.Tracer {
	return &countingTracer{p.TracerProvider.Tracer(name, opts...), p}
}

type countingTracer struct {
	trace.Tracer

	provider *countingProvider
}

func (t *countingTracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	t.provider.starts.Add(1)
	return t.Tracer.Start(ctx, name, opts...) //nolint:spancheck // the caller ends it
}

// One traceparent crosses the wire, that of the attempt; the server goes on
// from there.
func TestTraceContextCrossesTheWire(t *testing.T) {
	bubbles(t, "attempt to server", func(t *testing.T) {
		rec := new(recorder)
		tracing := []interceptors.Option{interceptors.WithTracerProvider(rec), interceptors.WithPropagators(propagation.TraceContext{})}
		var client []interceptors.ClientOption
		var server []interceptors.ServerOption
		for _, o := range tracing {
			client, server = append(client, o), append(server, o)
		}
		r := start(t, setup{client: client, server: server})
		r.srv.Script(probe.Read, unavailable(), probe.Step{})
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-11111111111111111111111111111111-2222222222222222-01")
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantOK(t, err)
		rec.wantEnded(t)
		attempts := rec.attempts(probe.Read)
		servers := rec.named(strings.TrimPrefix(probe.Read, "/"), trace.SpanKindServer)
		wantEqual(t, "server spans", len(servers), 2)
		for i, e := range r.srv.Seen(probe.Read) {
			if parents := e.Metadata.Get("traceparent"); len(parents) != 1 || !strings.Contains(parents[0], attempts[i].context.SpanID().String()) {
				t.Errorf("attempt %d sent traceparents %q, want its own alone", i+1, parents)
			}
			wantEqual(t, "server's parent", servers[i].parent, attempts[i].context.SpanID())
		}
		wantEqual(t, "server's code", servers[0].attributes["rpc.response.status_code"], "UNAVAILABLE")
		wantEqual(t, "deadline on the server's span", servers[1].attributes["belay.server.deadline.remaining"], "")
	})

	bubbles(t, "the transport traces", func(t *testing.T) {
		r, rec, ctx, p := traced(t, setup{client: []interceptors.ClientOption{
			interceptors.WithTransportTracing(), interceptors.WithPropagators(propagation.TraceContext{}),
		}})
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantOK(t, err)
		p.End()
		rec.wantEnded(t)
		wantEqual(t, "CLIENT spans", len(rec.attempts(probe.Read)), 0)
		wantEqual(t, "attempt spans", len(rec.named(strings.TrimPrefix(probe.Read, "/"), trace.SpanKindInternal)), 1)
		if got := r.srv.Seen(probe.Read)[0].Metadata.Get("traceparent"); got != nil {
			t.Errorf("traceparent %q was injected beside the transport's", got)
		}
	})

	bubbles(t, "refused by the server", func(t *testing.T) {
		rec := new(recorder)
		r := start(t, setup{plainClient: true, server: []interceptors.ServerOption{
			interceptors.WithTracerProvider(rec), interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: time.Hour}),
		}})
		_, err := r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.DeadlineExceeded)
		rec.wantEnded(t)
		spans := rec.named(strings.TrimPrefix(probe.Read, "/"), trace.SpanKindServer)
		wantEqual(t, "server spans", len(spans), 1)
		wantEqual(t, "shed", spans[0].attributes["belay.server.shed"], "deadline")
		wantEqual(t, "left", spans[0].attributes["belay.server.deadline.remaining"], "2")
	})

	// A span of somebody else's in the context is neither ended nor doubled.
	bubbles(t, "somebody traces the server", func(t *testing.T) {
		rec := new(recorder)
		outer := grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			ctx, span := rec.Tracer("outer").Start(ctx, "outer", trace.WithSpanKind(trace.SpanKindServer))
			defer span.End()
			return next(ctx, req)
		})
		server := newServer(t, interceptors.WithTracerProvider(rec))
		r := start(t, setup{plainClient: true, plainServer: true, probe: []probe.Option{
			probe.ServerOptions(outer), probe.ServerOptions(server.ServerOptions()...),
		}})
		r.srv.Script(probe.Read, probe.Step{Do: func(ctx context.Context, _ *probev1.Request) (*probev1.Response, error) {
			wantEqual(t, "recording", trace.SpanFromContext(ctx).IsRecording(), true)
			return &probev1.Response{}, nil
		}})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		rec.wantEnded(t)
		wantEqual(t, "server spans of Belay's", len(rec.named(strings.TrimPrefix(probe.Read, "/"), trace.SpanKindServer)), 0)
	})
}
