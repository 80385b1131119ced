package probe_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

func TestNetworkDownAndUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := probe.NewNetwork()
		network.Down()
		conn, srv := probe.Start(t, probe.On(network))

		_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
		if st := status.Convert(err); st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "connection refused") {
			t.Errorf("while down: %v, want UNAVAILABLE that says why", err)
		}

		time.AfterFunc(600*time.Millisecond, network.Up)
		start := time.Now()
		if _, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{}, grpc.WaitForReady(true)); err != nil {
			t.Errorf("once up: %v", err)
		}
		if took := time.Since(start); took < 600*time.Millisecond {
			t.Errorf("answered after %v, before the network was up", took)
		}
		if hits := srv.Hits(probe.Read); hits != 1 {
			t.Errorf("%d hits, want 1", hits)
		}
	})
}

// A call in flight loses its connection; the next one finds a new connection,
// or is refused, at once.
func TestNetworkBreaksCallsInFlight(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*probe.Network)
		next codes.Code
	}{
		{"cut", (*probe.Network).Cut, codes.OK},
		{"down", (*probe.Network).Down, codes.Unavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				network := probe.NewNetwork()
				conn, srv := probe.Start(t, probe.On(network))
				srv.Script(probe.Read, probe.Step{Hang: true})
				time.AfterFunc(time.Second, func() { c.end(network) })

				start := time.Now()
				_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
				if status.Code(err) != codes.Unavailable || time.Since(start) != time.Second {
					t.Errorf("in flight: %v after %v, want UNAVAILABLE after exactly 1s", err, time.Since(start))
				}
				synctest.Wait() // the channel and the handler have noticed
				_, err = probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
				if status.Code(err) != c.next {
					t.Errorf("next: %v, want %v", err, c.next)
				}
				if entry := srv.Seen()[0]; entry.CtxErr == nil {
					t.Errorf("entry %+v; want its context ended by the lost connection", entry)
				}
			})
		})
	}
}

func TestTwoChannelsToOneServerAndTwoServersWithOneScript(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := probe.NewNetwork()
		a, srv := probe.Start(t, probe.On(network))
		b := network.Dial(t)
		c, same := probe.Start(t, probe.Using(srv))
		if same != srv {
			t.Fatal("Using started another service")
		}
		for i, conn := range []*grpc.ClientConn{a, b, c} {
			resp, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
			if err != nil || resp.GetExecution() != uint64(i+1) {
				t.Errorf("channel %d: %v, %v; want run %d of one script", i, resp, err, i+1)
			}
		}
	})
}

func TestRegisteredSeesTheServicesBeforeTheyServe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var info map[string]grpc.ServiceInfo
		_, _ = probe.Start(t, probe.Registered(func(s *grpc.Server) { info = s.GetServiceInfo() }))
		if len(info["belay.probe.v1.ProbeService"].Methods) != 11 || len(info["belay.probe.v1.KeyedService"].Methods) != 3 {
			t.Errorf("services %v, want the probe's two with 11 and 3 methods", info)
		}
	})
}

func TestCounterSeesEveryAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var counter probe.Counter
		twice := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			_ = invoke(metadata.AppendToOutgoingContext(ctx, "n", "1"), method, req, reply, cc, opts...) // the second decides
			return invoke(metadata.AppendToOutgoingContext(ctx, "n", "2"), method, req, reply, cc, opts...)
		})
		conn, srv := probe.Start(t, probe.DialOptions(append([]grpc.DialOption{twice}, counter.DialOptions()...)...))
		srv.Script(probe.Read, probe.Step{Delay: time.Second, Code: codes.Unavailable})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if _, err := probe.Call(ctx, conn, probe.Read, &probev1.Request{}); err != nil {
			t.Fatal(err)
		}

		want := []string{"n=[1] left=5s took=1s code=Unavailable", "n=[2] left=4s took=0s code=OK"}
		var got []string
		for _, a := range counter.Attempts() {
			if !a.HasDeadline || !a.Ended || a.Method != probe.Read {
				t.Errorf("attempt %+v; want an ended one of %s with a deadline", a, probe.Read)
			}
			got = append(got, fmt.Sprintf("n=%v left=%v took=%v code=%v", a.Metadata.Get("n"), a.Left, a.Took, status.Code(a.Err)))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("attempts (-want +got):\n%s", diff)
		}
		counter.Reset()
		if n := counter.Count(); n != 0 {
			t.Errorf("%d attempts after Reset", n)
		}
	})
}

func TestCounterSeesHowAStreamEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var counter probe.Counter
		network := probe.NewNetwork()
		conn, srv := probe.Start(t, probe.On(network), probe.DialOptions(counter.DialOptions()...))
		srv.Script(probe.Bidi, probe.Step{Ops: []probe.Op{probe.Sleep(3 * time.Second)}, Code: codes.Aborted})

		stream, err := probev1.NewProbeServiceClient(conn).Bidi(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if a := counter.Attempts()[0]; a.Ended {
			t.Errorf("attempt %+v ended by being opened", a)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.Aborted {
			t.Fatalf("stream ended with %v", err)
		}
		if a := counter.Attempts()[0]; !a.Ended || a.Took != 3*time.Second || status.Code(a.Err) != codes.Aborted {
			t.Errorf("attempt %+v; want ABORTED after exactly 3s", a)
		}

		// A stream that could not be opened is an attempt that has ended too.
		network.Down()
		synctest.Wait() // the channel has noticed
		if _, err := probev1.NewProbeServiceClient(conn).Bidi(t.Context()); err == nil {
			t.Fatal("a stream was opened on a network that is down")
		}
		if a := counter.Attempts()[1]; !a.Ended || status.Code(a.Err) != codes.Unavailable {
			t.Errorf("attempt %+v; want ended as UNAVAILABLE", a)
		}
	})
}

func TestExecCounts(t *testing.T) {
	var exec probe.Exec
	if got := exec.Count("a"); got != 0 {
		t.Errorf("zero value counts %d", got)
	}
	for i, name := range []string{"a", "b", "a"} {
		if got, want := exec.Add(name), 1+i/2; got != want {
			t.Errorf("add %d of %s: %d, want %d", i, name, got, want)
		}
	}
	if exec.Count("a") != 2 || exec.Count("b") != 1 || exec.Total() != 3 {
		t.Errorf("a=%d b=%d total=%d; want 2, 1, 3", exec.Count("a"), exec.Count("b"), exec.Total())
	}
}

func TestScriptRefusesWhatItCannotPlay(t *testing.T) {
	do := func(context.Context, *probev1.Request) (*probev1.Response, error) { return &probev1.Response{}, nil }
	for _, c := range []struct {
		method string
		step   probe.Step
		want   string
	}{
		{"/belay.probe.v1.ProbeService/Nope", probe.Step{}, "is not a method of the probe"},
		{probe.Read, probe.Step{Code: codes.Aborted, Hang: true}, "more than one way: [Code Hang]"},
		{probe.Read, probe.Step{Panic: true, Do: do}, "more than one way: [Panic Do]"},
		{probe.Bidi, probe.Step{Do: do}, "only unary methods"},
		{probe.Read, probe.Step{Ops: []probe.Op{probe.Send(1)}}, "only streams"},
		{probe.Read, probe.Step{LoseReply: true, Code: codes.Aborted}, "only a success can be lost"},
		{probe.Read, probe.Step{Message: "m"}, "without a Code"},
		{probe.Read, probe.Step{RetryInfo: new(time.Second)}, "without a Code"},
		{probe.Read, probe.Step{Deaf: true}, "Deaf without a Delay"},
		{probe.Read, probe.Step{Delay: -1}, "negative Delay -1ns"},
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.Contains(got, c.want) {
					t.Errorf("%s %+v: panic %q, want one that says %q", c.method, c.step, got, c.want)
				}
			}()
			probe.NewServer().Script(c.method, probe.Step{}, c.step)
		}()
	}
}

// A shared step meets its method only when it is taken.
func TestSharedStepThatDoesNotFitIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		srv.ScriptAll(probe.Step{Ops: []probe.Op{probe.Send(1)}})
		_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
		if st := status.Convert(err); st.Code() != codes.Internal || !strings.Contains(st.Message(), "only streams run") {
			t.Errorf("got %v, want INTERNAL that names the misfit", err)
		}
	})
}

// LoseReply without its interceptors must not pass for a success.
func TestLoseReplyNeedsItsInterceptors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t, probe.ServerOptions(grpc.ChainUnaryInterceptor(
			func(_ context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
				return next(context.Background(), req) //nolint:contextcheck // as a server without the interceptors has it
			})))
		srv.Script(probe.Read, probe.Step{LoseReply: true})
		_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
		if st := status.Convert(err); st.Code() != codes.Internal || !strings.Contains(st.Message(), "LoseReplies") {
			t.Errorf("got %v, want INTERNAL that names LoseReplies", err)
		}
	})
}

// errorsOf is a testing.TB that keeps its failures to itself and runs its
// cleanups when told.
type errorsOf struct {
	testing.TB

	failures []string
	cleanups []func()
}

func (tb *errorsOf) Errorf(format string, args ...any) {
	tb.failures = append(tb.failures, fmt.Sprintf(format, args...))
}

func (tb *errorsOf) Cleanup(fn func()) { tb.cleanups = append(tb.cleanups, fn) }

func (tb *errorsOf) end() {
	for len(tb.cleanups) > 0 {
		last := len(tb.cleanups) - 1
		fn := tb.cleanups[last]
		tb.cleanups = tb.cleanups[:last]
		fn()
	}
}

func TestPanicThatNobodyScriptedFailsTheTest(t *testing.T) {
	for _, c := range []struct {
		name string
		step probe.Step
		want int
	}{
		{"scripted", probe.Step{Panic: true}, 0},
		{"a bug", probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) { panic("a bug") }}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tb := &errorsOf{TB: t}
				conn, srv := probe.Start(tb)
				srv.Script(probe.Read, c.step)
				_, err := probe.Call(t.Context(), conn, probe.Read, &probev1.Request{})
				if status.Code(err) != codes.Internal {
					t.Errorf("got %v, want INTERNAL", err)
				}
				tb.end()
				if len(tb.failures) != c.want {
					t.Errorf("failures %q, want %d", tb.failures, c.want)
				}
			})
		})
	}
}

// Cleanup returns only when the handlers have, or a bubble could end around one.
func TestCleanupWaitsForHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tb := &errorsOf{TB: t}
		conn, srv := probe.Start(tb)
		srv.Script(probe.Read, probe.Step{Delay: time.Minute, Deaf: true})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _ = probe.Call(ctx, conn, probe.Read, &probev1.Request{}) // its handler outlives it
		tb.end()
		if entry := srv.Seen()[0]; !entry.Ended || entry.Took != time.Minute {
			t.Errorf("entry %+v; want ended after exactly 1m, before the cleanup was over", entry)
		}
		if len(tb.failures) != 0 {
			t.Errorf("failures %q", tb.failures)
		}
	})
}
