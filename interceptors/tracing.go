package interceptors

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/interceptors/policy"
)

// scopeName is the instrumentation scope of all spans.
const scopeName = "github.com/belayrpc/belay/interceptors"

// tracer starts spans where somebody records them.
//
// Without an SDK, OpenTelemetry's API hands out spans that do nothing, at a
// price. So the tracer asks once a second whether spans are real, and starts
// none until they are. Once they are they stay so.
type tracer struct {
	provider    trace.TracerProvider // nil: the global one, which may be set later
	propagators propagation.TextMapPropagator
	real        atomic.Bool
	carries     atomic.Bool // the propagators write something
	clock       clock
	probed      atomic.Int64 // when last, on the clock; 0 before the first time
}

func newTracer(c *commonConfig) *tracer {
	t := &tracer{clock: newClock(), provider: c.tracerProvider, propagators: c.propagators}
	if t.provider != nil {
		t.enabled(time.Now()) // given, so it will not come later: ask now, and not beside the first calls
	}
	return t
}

func (t *tracer) get() trace.Tracer {
	if t.provider != nil {
		return t.provider.Tracer(scopeName)
	}
	return otel.GetTracerProvider().Tracer(scopeName)
}

func (t *tracer) propagator() propagation.TextMapPropagator {
	if t.propagators != nil {
		return t.propagators
	}
	return otel.GetTextMapPropagator()
}

// enabled reports whether starting a span makes a real one.
func (t *tracer) enabled(now time.Time) bool {
	if t.real.Load() {
		return true
	}
	at := t.clock.at(now)
	last := t.probed.Load()
	if last != 0 && at-last < int64(time.Second) || !t.probed.CompareAndSwap(last, at) {
		return false
	}
	t.carries.Store(len(t.propagator().Fields()) > 0)
	// A span of an SDK has a context of its own. It is never ended, so it is
	// never exported.
	_, span := t.get().Start(context.Background(), "belay probe")
	if span.SpanContext().IsValid() {
		t.real.Store(true)
		return true
	}
	return false
}

// spanNames are the strings and attributes of a method's spans, made once.
type spanNames struct {
	call, attempt string
	attributes    []attribute.KeyValue
}

func newSpanNames(full string) spanNames {
	name := strings.TrimPrefix(full, "/")
	return spanNames{
		call:    "belay " + name,
		attempt: name,
		attributes: []attribute.KeyValue{
			attribute.String("rpc.system.name", "grpc"),
			attribute.String("rpc.method", name),
		},
	}
}

// startCall starts the span of a whole call, or returns nil.
func (t *tracer) startCall(ctx context.Context, now time.Time, names *spanNames) (context.Context, trace.Span) {
	if !t.enabled(now) {
		return ctx, nil
	}
	//nolint:spancheck // finish ends it
	return t.get().Start(ctx, names.call, trace.WithTimestamp(now),
		trace.WithSpanKind(trace.SpanKindInternal), trace.WithAttributes(names.attributes...))
}

// startAttempt starts the span of one attempt below a call span that records,
// or returns nil.
func (t *tracer) startAttempt(ctx context.Context, call trace.Span, names *spanNames, kind trace.SpanKind,
	number int, delay time.Duration,
) (context.Context, trace.Span) {
	if call == nil || !call.IsRecording() {
		return ctx, nil
	}
	ctx, span := t.get().Start(ctx, names.attempt, trace.WithSpanKind(kind), trace.WithAttributes(names.attributes...))
	span.SetAttributes(
		attribute.Int("belay.attempt.number", number),
		attribute.Int("previous-rpc-attempts", number-1),
	)
	if delay > 0 {
		span.SetAttributes(attribute.Float64("belay.retry.delay", delay.Seconds()))
	}
	return ctx, span
}

// endSpan ends a span with a status code, once; a nil span is no span.
func endSpan(span trace.Span, code codes.Code, message string, more ...attribute.KeyValue) {
	if span == nil {
		return
	}
	span.SetAttributes(attribute.String("rpc.response.status_code", policy.CodeName(code)))
	span.SetAttributes(more...)
	if code != codes.OK {
		span.SetAttributes(attribute.String("error.type", policy.CodeName(code)))
		span.SetStatus(otelcodes.Error, message)
	}
	span.End()
}

// injects reports whether a context has a trace to send, and somebody to write it.
func (t *tracer) injects(ctx context.Context) bool {
	return (t.carries.Load() || t.real.Load()) && trace.SpanContextFromContext(ctx).IsValid()
}

func (t *tracer) inject(ctx context.Context, md metadata.MD) {
	t.propagator().Inject(ctx, carrier(md))
}

func (t *tracer) extract(ctx context.Context) context.Context {
	md, ok := metadata.FromIncomingContext(ctx)
	if !ok {
		return ctx
	}
	return t.propagator().Extract(ctx, carrier(md))
}

// carrier is metadata as OpenTelemetry's propagators read and write it.
type carrier metadata.MD

func (c carrier) Get(key string) string {
	if v := metadata.MD(c).Get(key); len(v) > 0 {
		return v[0]
	}
	return ""
}

// Set replaces, so that a trace which the caller's metadata carries by hand
// does not make two values.
func (c carrier) Set(key, value string) { metadata.MD(c).Set(key, value) }

func (c carrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for k := range c {
		keys = append(keys, k)
	}
	return keys
}

// spanEvent adds an event to a span that records.
func spanEvent(span trace.Span, name string, attributes ...attribute.KeyValue) {
	if span != nil && span.IsRecording() {
		span.AddEvent(name, trace.WithAttributes(attributes...))
	}
}
