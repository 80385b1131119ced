package observability_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The public failure case B15 on OpenTelemetry's own SDK: every attempt's span
// is exported, once, below the call's, which is below the caller's.
func TestB15_AttemptSpansOnTheSDK(t *testing.T) {
	failing := probe.Step{Code: codes.Unavailable}
	for _, c := range []struct {
		name    string
		steps   []probe.Step
		backoff time.Duration
		cancel  time.Duration // when the caller does; 0: never
		codes   []string
	}{
		{"a", []probe.Step{failing, failing, {}}, 10 * time.Millisecond, 0, []string{"UNAVAILABLE", "UNAVAILABLE", "OK"}},
		{"b", []probe.Step{failing}, time.Second, 300 * time.Millisecond, []string{"UNAVAILABLE"}},
		{"c", []probe.Step{failing, failing, failing}, 10 * time.Millisecond, 0, []string{"UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				exporter := tracetest.NewInMemoryExporter()
				provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))
				client, err := interceptors.NewClient(
					interceptors.WithTracerProvider(provider),
					interceptors.WithPolicy(policy.Policy{
						MaxAttempts: 3,
						Backoff:     policy.Backoff{Base: c.backoff, Max: c.backoff, Jitter: policy.JitterNone},
					}),
				)
				if err != nil {
					t.Fatal(err)
				}
				conn, srv := probe.Start(t, probe.DialOptions(client.DialOptions()...))
				srv.Script(probe.Read, c.steps...)

				ctx, caller := provider.Tracer("app").Start(t.Context(), "caller")
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				if c.cancel > 0 {
					time.AfterFunc(c.cancel, cancel)
				}
				_, _ = probe.Call(ctx, conn, probe.Read, &probev1.Request{})
				if !caller.IsRecording() {
					t.Error("the caller's span was ended for it")
				}
				caller.End()

				exported := exporter.GetSpans()
				name := strings.TrimPrefix(probe.Read, "/")
				calls := spansNamed(exported, "belay "+name)
				attempts := spansNamed(exported, name)
				if len(exported) != 2+len(c.codes) || len(calls) != 1 || len(attempts) != len(c.codes) {
					t.Fatalf("%d spans exported, %d of them calls and %d attempts; want the caller's, 1 and %d",
						len(exported), len(calls), len(attempts), len(c.codes))
				}
				if calls[0].Parent.SpanID() != caller.SpanContext().SpanID() {
					t.Error("the call's span is not below the caller's")
				}
				var got []string
				for i, a := range attempts {
					if a.Parent.SpanID() != calls[0].SpanContext.SpanID() {
						t.Errorf("attempt %d is not directly below the call", i+1)
					}
					if n := attributeOf(a, "belay.attempt.number").AsInt64(); n != int64(i+1) {
						t.Errorf("attempt %d has the number %d", i+1, n)
					}
					got = append(got, attributeOf(a, "rpc.response.status_code").AsString())
				}
				if !slices.Equal(got, c.codes) {
					t.Errorf("attempts ended with %q, want %q", got, c.codes)
				}
			})
		})
	}
}

// spansNamed are the spans of that name in the order of their start.
func spansNamed(all tracetest.SpanStubs, name string) []tracetest.SpanStub {
	var found []tracetest.SpanStub
	for _, s := range all {
		if s.Name == name {
			found = append(found, s)
		}
	}
	slices.SortStableFunc(found, func(a, b tracetest.SpanStub) int { return a.StartTime.Compare(b.StartTime) })
	return found
}

func attributeOf(s tracetest.SpanStub, key attribute.Key) attribute.Value {
	for _, kv := range s.Attributes {
		if kv.Key == key {
			return kv.Value
		}
	}
	return attribute.Value{}
}
