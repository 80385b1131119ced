package main

import (
	"context"
	"os"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// span is a finished span on its way to the parent.
type span struct {
	Trace   string            `json:"trace"`
	ID      string            `json:"id"`
	Parent  string            `json:"parent,omitempty"`
	Service string            `json:"service"`
	Name    string            `json:"name"`
	Kind    string            `json:"kind"`
	Start   time.Time         `json:"start"`
	End     time.Time         `json:"end"`
	Failed  bool              `json:"failed,omitempty"`
	Attrs   map[string]string `json:"attrs,omitempty"`
	Events  []spanEvent       `json:"events,omitempty"`
}

type spanEvent struct {
	Name  string            `json:"name"`
	At    time.Time         `json:"at"`
	Attrs map[string]string `json:"attrs,omitempty"`
}

// flushLimit is how long the last spans may take to reach a collector. It is
// less than stopLimit, or an absent collector would get services killed.
const flushLimit = 2 * time.Second

// startTracing installs OpenTelemetry's SDK. Spans go to report, for the
// waterfall, and over OTLP where OTEL_EXPORTER_OTLP_ENDPOINT names a collector.
// The returned function sends what is left.
//
// The user decides which calls are traced; everybody else follows.
func startTracing(ctx context.Context, serviceName string, report *reporter) (flush func(context.Context) error, err error) {
	provider, err := newTracerProvider(ctx, serviceName, sdktrace.ParentBased(sdktrace.NeverSample()), &pipeExporter{serviceName, report.span})
	if err != nil {
		return nil, err
	}
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	return provider.Shutdown, nil
}

func newTracerProvider(ctx context.Context, serviceName string, sampler sdktrace.Sampler, exporter sdktrace.SpanExporter) (*sdktrace.TracerProvider, error) {
	opts := []sdktrace.TracerProviderOption{
		sdktrace.WithSampler(sampler),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", serviceName))),
		sdktrace.WithSyncer(exporter), // few spans, and a killed process must not keep any
	}
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "" {
		otlp, err := otlptracegrpc.New(ctx)
		if err != nil {
			return nil, err
		}
		opts = append(opts, sdktrace.WithBatcher(otlp))
	}
	return sdktrace.NewTracerProvider(opts...), nil
}

func (r *reporter) span(s *span) { r.send(fact{Span: s}) }

// pipeExporter hands finished spans on in the form of the waterfall.
type pipeExporter struct {
	service string
	keep    func(*span)
}

// ExportSpans implements [sdktrace.SpanExporter].
func (e *pipeExporter) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	for _, s := range spans {
		out := &span{
			Trace: s.SpanContext().TraceID().String(), ID: s.SpanContext().SpanID().String(),
			Service: e.service, Name: s.Name(), Kind: s.SpanKind().String(),
			Start: s.StartTime(), End: s.EndTime(),
			Failed: s.Status().Description != "" || s.Status().Code.String() == "Error",
			Attrs:  textOf(s.Attributes()),
		}
		if s.Parent().IsValid() {
			out.Parent = s.Parent().SpanID().String()
		}
		for _, event := range s.Events() {
			out.Events = append(out.Events, spanEvent{Name: event.Name, At: event.Time, Attrs: textOf(event.Attributes)})
		}
		e.keep(out)
	}
	return nil
}

// Shutdown implements [sdktrace.SpanExporter].
func (e *pipeExporter) Shutdown(context.Context) error { return nil }

func textOf(attrs []attribute.KeyValue) map[string]string {
	text := make(map[string]string, len(attrs))
	for _, a := range attrs {
		text[string(a.Key)] = a.Value.String()
	}
	return text
}
