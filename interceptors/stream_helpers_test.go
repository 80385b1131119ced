package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The descriptors of the probe's streams, for tests that take a method by name.
func descOf(method string) *grpc.StreamDesc {
	switch method {
	case probe.ServerStream, probe.ServerStreamUndeclared:
		return &grpc.StreamDesc{ServerStreams: true}
	case probe.ClientStream, probe.ClientStreamKeyed:
		return &grpc.StreamDesc{ClientStreams: true}
	default:
		return &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	}
}

// openStream opens a stream of any kind, or fails.
func openStream(ctx context.Context, t testing.TB, conn *grpc.ClientConn, method string, opts ...grpc.CallOption) grpc.ClientStream {
	t.Helper()
	stream, err := conn.NewStream(ctx, descOf(method), method, opts...)
	if err != nil {
		t.Fatalf("open %s: %v", method, err)
	}
	return stream
}

// send sends one message for each text and fails on an error.
func send(t testing.TB, stream grpc.ClientStream, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err := stream.SendMsg(request(text)); err != nil {
			t.Fatalf("send %q: %v", text, err)
		}
	}
}

// ask opens a server stream and sends its request for n messages.
func ask(ctx context.Context, t testing.TB, conn *grpc.ClientConn, n int64, opts ...grpc.CallOption) grpc.ClientStream {
	t.Helper()
	stream := openStream(ctx, t, conn, probe.ServerStream, opts...)
	if err := stream.SendMsg(&probev1.Request{Text: "q", Number: n}); err != nil {
		t.Fatalf("send: %v", err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return stream
}

// recv receives one message as "index:text".
func recv(stream grpc.ClientStream) (string, error) {
	resp := new(probev1.Response)
	if err := stream.RecvMsg(resp); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d:%s", resp.GetIndex(), resp.GetText()), nil
}

// drain receives to the end. io.EOF is no error here.
func drain(stream grpc.ClientStream) (got []string, err error) {
	for {
		m, err := recv(stream)
		switch {
		case errors.Is(err, io.EOF):
			return got, nil
		case err != nil:
			return got, err
		}
		got = append(got, m)
	}
}

// spans is a TracerProvider that records when spans begin and end.
type spans struct {
	embedded.TracerProvider

	mu  sync.Mutex // guards all, and the spans in it
	all []*span
}

type span struct {
	trace.Span // does nothing

	in      *spans
	name    string
	kind    trace.SpanKind
	parent  trace.SpanID
	context trace.SpanContext
	ends    int
	status  otelcodes.Code
	values  map[attribute.Key]attribute.Value
	events  []string
}

func (p *spans) Tracer(string, ...trace.TracerOption) trace.Tracer { return spanTracer{in: p} }

type spanTracer struct {
	embedded.Tracer

	in *spans
}

func (tr spanTracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	cfg := trace.NewSpanStartConfig(opts...)
	p := tr.in
	p.mu.Lock()
	defer p.mu.Unlock()
	id := len(p.all) + 1
	s := &span{
		Span: noop.Span{}, in: p, name: name, kind: cfg.SpanKind(),
		parent: trace.SpanContextFromContext(ctx).SpanID(), values: map[attribute.Key]attribute.Value{},
		context: trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: trace.TraceID{1}, SpanID: trace.SpanID{byte(id >> 16), byte(id >> 8), byte(id), 1}, TraceFlags: trace.FlagsSampled,
		}),
	}
	for _, kv := range cfg.Attributes() {
		s.values[kv.Key] = kv.Value
	}
	p.all = append(p.all, s)
	return trace.ContextWithSpan(ctx, s), s
}

func (s *span) SpanContext() trace.SpanContext { return s.context }

func (s *span) IsRecording() bool {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	return s.ends == 0
}

func (s *span) End(...trace.SpanEndOption) {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	s.ends++
}

func (s *span) SetStatus(c otelcodes.Code, _ string) {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	s.status = c
}

func (s *span) SetAttributes(kvs ...attribute.KeyValue) {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	for _, kv := range kvs {
		s.values[kv.Key] = kv.Value
	}
}

func (s *span) AddEvent(name string, _ ...trace.EventOption) {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	s.events = append(s.events, name)
}

// named returns the spans of one name. The probe by which Belay finds out
// whether spans are real is none of anybody's.
func (p *spans) named(name string) []*span {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []*span
	for _, s := range p.all {
		if s.name == name {
			found = append(found, s)
		}
	}
	return found
}

// wantEndedOnce asserts how many spans of a name there are, each ended once.
func (p *spans) wantEndedOnce(t testing.TB, name string, n int) []*span {
	t.Helper()
	found := p.named(name)
	if len(found) != n {
		t.Errorf("%d spans %q, want %d", len(found), name, n)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, s := range found {
		if s.ends != 1 {
			t.Errorf("span %d %q was ended %d times, want once", i, name, s.ends)
		}
	}
	return found
}

// text is one attribute of a span; "" without it.
func (s *span) text(key attribute.Key) string {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	v := s.values[key]
	return v.String()
}

// permits is a breaker of the test's own that admits everything and counts.
type permits struct {
	mu      sync.Mutex // guards all below
	allowed int
	done    []breaker.Outcome
	twice   int
	refuse  error
}

func (p *permits) Allow(string) (func(breaker.Outcome, time.Duration), error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refuse != nil {
		return nil, p.refuse
	}
	p.allowed++
	called := false
	return func(o breaker.Outcome, _ time.Duration) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if called {
			p.twice++
		}
		called = true
		p.done = append(p.done, o)
	}, nil
}

func (p *permits) open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.allowed - len(p.done)
}

// wantDone asserts that n permits were taken and each was given back once.
func (p *permits) wantDone(t testing.TB, n int) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.allowed != n || len(p.done) != n || p.twice != 0 {
		t.Errorf("permits: %d taken, %d given back, %d of them twice; want %d, %d, 0", p.allowed, len(p.done), p.twice, n, n)
	}
}

// onInner wraps the streams of every attempt, below Belay. f gets the number of
// the attempt, from 1, and may return an error instead of a stream.
func onInner(f func(n int, s grpc.ClientStream) (grpc.ClientStream, error)) grpc.DialOption {
	var mu sync.Mutex
	n := 0
	return grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		mu.Lock()
		n++
		number := n
		mu.Unlock()
		s, err := streamer(ctx, desc, cc, method, opts...)
		if err != nil {
			return nil, err
		}
		return f(number, s)
	})
}

// heap returns the bytes in use. What cleanups and pools let go of is only
// collected the next time, and the time after it.
func heap() uint64 {
	for range 3 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// outcome writes an error as its code, success as OK and the end as EOF.
func outcome(err error) string {
	switch {
	case err == nil:
		return "OK"
	case errors.Is(err, io.EOF):
		return "EOF"
	default:
		return status.Code(err).String()
	}
}

func wantCodeIs(t testing.TB, what string, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Errorf("%s: code %v (%v), want %v", what, got, err, want)
	}
}

// openClosed opens a bidi stream that sends one message and no more.
func openClosed(ctx context.Context, t testing.TB, r *rig, opts ...grpc.CallOption) grpc.ClientStream {
	t.Helper()
	stream := openStream(ctx, t, r.conn, probe.Bidi, opts...)
	send(t, stream, "a")
	if err := stream.CloseSend(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return stream
}

// wantStopped is wantStop where nothing more of the error is looked at.
func wantStopped(t *testing.T, err error, stop interceptors.StopReason, executed interceptors.Executed) {
	t.Helper()
	_ = wantStop(t, err, stop, executed)
}

func slogTo(l *logLines) *slog.Logger { return slog.New(l) }

var errOpen = errors.New("the test's breaker is open")
