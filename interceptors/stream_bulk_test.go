package interceptors_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// bottomless is an attempt's stream that always has a message and takes every one.
type bottomless struct{ grpc.ClientStream }

func (bottomless) RecvMsg(any) error { return nil }
func (bottomless) SendMsg(any) error { return nil }

// committed opens a stream over an endless one and reads its first message.
func committed(tb testing.TB, p policy.Policy) grpc.ClientStream {
	tb.Helper()
	c, err := interceptors.NewClient(interceptors.WithPolicy(p))
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	tb.Cleanup(cancel)
	stream, err := c.Stream()(ctx, descOf(probe.Bidi), nil, probe.Bidi,
		func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			return bottomless{}, nil
		})
	if err != nil {
		tb.Fatal(err)
	}
	if err := stream.RecvMsg(&probev1.Response{}); err != nil {
		tb.Fatal(err)
	}
	return stream
}

// A stream that is committed costs nothing that a collector would see.
func TestCommittedStreamAllocatesNothing(t *testing.T) {
	for _, c := range []struct {
		name   string
		policy policy.Policy
	}{{"defaults", policy.Policy{}}, {"with every clock", policy.Policy{MaxIdle: time.Hour, AttemptTimeout: time.Hour}}} {
		t.Run(c.name, func(t *testing.T) {
			stream := committed(t, c.policy)
			in, out := &probev1.Response{}, &probev1.Request{}
			for what, f := range map[string]func() error{
				"RecvMsg": func() error { return stream.RecvMsg(in) },
				"SendMsg": func() error { return stream.SendMsg(out) },
			} {
				allocs := testing.AllocsPerRun(1000, func() {
					if err := f(); err != nil {
						t.Error(err)
					}
				})
				if allocs != 0 && !raceEnabled {
					t.Errorf("%s allocates %v times a message, want 0", what, allocs)
				}
			}
		})
	}
}

// What a message of a committed stream costs, beside the same without Belay.
func BenchmarkStreamMessage(b *testing.B) {
	in, out := &probev1.Response{}, &probev1.Request{}
	for _, c := range []struct {
		name   string
		stream grpc.ClientStream
	}{
		{"bare", bottomless{}},
		{"belay", committed(b, policy.Policy{})},
		{"belay-maxidle", committed(b, policy.Policy{MaxIdle: time.Hour})},
	} {
		b.Run("recv/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.stream.RecvMsg(in); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("send/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.stream.SendMsg(out); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// How fast 256 MiB go up, beside the same without Belay, and that beside itself:
// what the machine does meanwhile it does to all three. They take turns every
// 16 MiB.
func BenchmarkUpload(b *testing.B) {
	client, err := interceptors.NewClient()
	if err != nil {
		b.Fatal(err)
	}
	bare, _ := probe.Start(b)
	belay, _ := probe.Start(b, probe.DialOptions(client.DialOptions()...))
	again, _ := probe.Start(b)
	ways := []*grpc.ClientConn{bare, belay, again}
	const messages = uploadMessages / 16
	took := make([][]float64, len(ways))
	turn := 0
	for b.Loop() {
		for range 16 {
			turn++
			for i := range ways {
				i = (i + turn) % len(ways)
				begun := time.Now()
				uploadAll(b, ways[i], messages)
				took[i] = append(took[i], time.Since(begun).Seconds())
			}
		}
	}
	ratio := func(i int) float64 {
		var all []float64
		for n := range took[i] {
			all = append(all, took[0][n]/took[i][n])
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	b.ReportMetric(ratio(1), "belay/bare")
	b.ReportMetric(ratio(2), "bare/bare")
}

func uploadAll(tb testing.TB, cc *grpc.ClientConn, messages int) {
	tb.Helper()
	stream, err := probev1.NewProbeServiceClient(cc).ClientStream(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	req := &probev1.Request{Payload: make([]byte, uploadSize)}
	for range messages {
		if err := stream.Send(req); err != nil {
			tb.Fatal(err)
		}
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		tb.Fatal(err)
	}
}
