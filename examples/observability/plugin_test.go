package observability_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	experimental "google.golang.org/grpc/experimental/opentelemetry"
	"google.golang.org/grpc/stats/opentelemetry"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The plugin tells the end of a call by OnFinish, and gRPC runs that once per
// attempt. Belay runs it once per call: so a stream that was tried three times
// is one call to the plugin, with its three attempts below, and it ends as the
// call did and not as its first attempt.
func TestPluginRecordsOneCallPerStream(t *testing.T) {
	const service = "belay.probe.v1.ProbeService"
	for _, kind := range []struct {
		name string
		call func(ctx context.Context, client probev1.ProbeServiceClient) error
	}{
		{"Idempotent", func(ctx context.Context, client probev1.ProbeServiceClient) error {
			_, err := client.Idempotent(ctx, &probev1.Request{})
			return err
		}},
		{"ServerStream", func(ctx context.Context, client probev1.ProbeServiceClient) error {
			stream, err := client.ServerStream(ctx, &probev1.Request{Number: 3})
			if err != nil {
				return err
			}
			return drain(stream)
		}},
		{"ClientStream", func(ctx context.Context, client probev1.ProbeServiceClient) error {
			stream, err := client.ClientStream(ctx)
			if err != nil {
				return err
			}
			if err := stream.Send(&probev1.Request{}); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			_, err = stream.CloseAndRecv()
			return err
		}},
		{"Bidi", func(ctx context.Context, client probev1.ProbeServiceClient) error {
			stream, err := client.Bidi(ctx)
			if err != nil {
				return err
			}
			if err := stream.Send(&probev1.Request{}); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if err := stream.CloseSend(); err != nil {
				return err
			}
			return drain(stream)
		}},
	} {
		for _, end := range []struct {
			name     string
			steps    []probe.Step
			code     codes.Code
			attempts int
		}{
			{"at once", nil, codes.OK, 1},
			{"the third attempt works", []probe.Step{{Code: codes.Unavailable}, {Code: codes.Unavailable}}, codes.OK, 3},
			{"the second is final", []probe.Step{{Code: codes.Unavailable}, {Code: codes.NotFound}}, codes.NotFound, 2},
		} {
			t.Run(kind.name+", "+end.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					recorded := tracetest.NewInMemoryExporter()
					tracers := sdktrace.NewTracerProvider(sdktrace.WithSyncer(recorded))
					reader := sdkmetric.NewManualReader()
					client, err := interceptors.NewClient(interceptors.WithTransportTracing(), interceptors.WithTracerProvider(tracers))
					if err != nil {
						t.Fatal(err)
					}
					plugin := opentelemetry.DialOption(opentelemetry.Options{
						MetricsOptions: opentelemetry.MetricsOptions{MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))},
						TraceOptions: experimental.TraceOptions{
							TracerProvider: tracers, TextMapPropagator: propagation.TraceContext{},
						},
					})
					conn, srv := probe.Start(t, probe.DialOptions(append([]grpc.DialOption{plugin}, client.DialOptions()...)...))
					srv.Script("/"+service+"/"+kind.name, end.steps...)

					err = kind.call(t.Context(), probev1.NewProbeServiceClient(conn))
					if status.Code(err) != end.code {
						t.Fatalf("ended with %v, want %v", err, end.code)
					}
					synctest.Wait()

					calls, attempts := spansOf(recorded, "Sent."+service+"."+kind.name), spansOf(recorded, "Attempt."+service+"."+kind.name)
					if len(calls) != 1 || len(attempts) != end.attempts {
						t.Fatalf("%d call spans and %d attempt spans, want 1 and %d", len(calls), len(attempts), end.attempts)
					}
					if failed := calls[0].Status.Code == otelcodes.Error; failed != (end.code != codes.OK) {
						t.Errorf("the call span's status is %v, and the call ended with %v", calls[0].Status, end.code)
					}
					numbers := map[int64]bool{}
					for _, a := range attempts {
						if a.SpanContext.TraceID() != calls[0].SpanContext.TraceID() || a.EndTime.After(calls[0].EndTime) {
							t.Error("an attempt span is not within its call's")
						}
						for _, kv := range a.Attributes {
							if kv.Key == "previous-rpc-attempts" {
								numbers[kv.Value.AsInt64()] = true
							}
						}
					}
					if len(numbers) != end.attempts {
						t.Errorf("previous-rpc-attempts %v, want each of %d numbers", numbers, end.attempts)
					}
					for _, e := range srv.Seen() {
						if n := len(e.Metadata.Get("traceparent")); n != 1 {
							t.Errorf("%d traceparent values reached the server, want 1", n)
						}
					}
					if count, codeName := callsRecorded(t, reader); count != 1 || codeName != canonical(end.code) {
						t.Errorf("grpc.client.call.duration has %d records, the last with %s; want 1 with %s", count, codeName, canonical(end.code))
					}
				})
			})
		}
	}
}

func drain(stream grpc.ServerStreamingClient[probev1.Response]) error {
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func spansOf(exporter *tracetest.InMemoryExporter, name string) (found tracetest.SpanStubs) {
	for _, s := range exporter.GetSpans() {
		if s.Name == name {
			found = append(found, s)
		}
	}
	return found
}

// callsRecorded returns how many calls the plugin's metric has, and a status.
func callsRecorded(t *testing.T, reader sdkmetric.Reader) (count uint64, code string) {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name != "grpc.client.call.duration" {
				continue
			}
			for _, p := range m.Data.(metricdata.Histogram[float64]).DataPoints { //nolint:forcetypeassert // gRFC A66 says that it is one
				count += p.Count
				v, _ := p.Attributes.Value(attribute.Key("grpc.status"))
				code = v.AsString()
			}
		}
	}
	return count, code
}

func canonical(c codes.Code) string {
	return map[codes.Code]string{codes.OK: "OK", codes.NotFound: "NOT_FOUND"}[c]
}
