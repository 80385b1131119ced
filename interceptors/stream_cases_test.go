package interceptors_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// B09: retrying after the caller has already seen messages.
func TestB09(t *testing.T) {
	bubbles(t, "run 1, fails half-way", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ServerStream, probe.Step{Ops: []probe.Op{probe.Send(2)}, Code: codes.Unavailable})
		got, err := drain(ask(t.Context(), t, r.conn, 4))
		wantCode(t, err, codes.Unavailable)
		if diff := cmp.Diff([]string{"1:", "2:"}, got); diff != "" {
			t.Errorf("messages (-want +got):\n%s", diff)
		}
		r.wantCounts(t, probe.ServerStream, 1, 1)
	})
	bubbles(t, "run 2, fails before any message", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ServerStream, unavailable())
		got, err := drain(ask(t.Context(), t, r.conn, 4))
		wantOK(t, err)
		if diff := cmp.Diff([]string{"1:q", "2:q", "3:q", "4:q"}, got); diff != "" {
			t.Errorf("messages (-want +got):\n%s", diff)
		}
		r.wantCounts(t, probe.ServerStream, 2, 2)
	})
}

const (
	uploadMessages = 4096
	uploadSize     = 64 << 10 // 256 MiB in all
)

// B33: sent messages are kept for replay without a limit, or mixed between
// streams.
func TestB33(t *testing.T) {
	t.Run("a, a long upload is not kept", func(t *testing.T) {
		r := start(t, setup{realTime: true})
		growth, sent, resp, err := upload(t, r, uploadMessages)
		wantOK(t, err)
		if sent != uploadMessages || resp.GetReceived() != uploadMessages {
			t.Errorf("sent %d, received %d; want %d once each", sent, resp.GetReceived(), uploadMessages)
		}
		t.Logf("the heap grew by at most %d KiB", growth>>10)
		if growth >= 32<<20 {
			t.Errorf("the heap grew by %d MiB, want less than 32", growth>>20)
		}
		r.wantCounts(t, probe.ClientStream, 1, 1)
	})
	t.Run("b, fails after 200 MiB", func(t *testing.T) {
		r := start(t, setup{realTime: true})
		r.srv.Script(probe.ClientStream, probe.Step{
			Ops: []probe.Op{probe.Recv(200 << 20 / uploadSize)}, Code: codes.Unavailable, Message: "the server's own",
		})
		_, _, _, err := upload(t, r, uploadMessages)
		wantCode(t, err, codes.Unavailable)
		wantBare(t, err)
		wantEqual(t, "message", status.Convert(err).Message(), "the server's own")
		r.wantCounts(t, probe.ClientStream, 1, 1)
	})
	bubbles(t, "c, 32 streams, each fails once before any response", func(t *testing.T) {
		const streams, messages = 32, 20
		r := start(t, setup{})
		steps := make([]probe.Step, streams)
		for i := range steps {
			steps[i] = probe.Step{Ops: []probe.Op{probe.Recv(i % 5)}, Code: codes.Unavailable}
		}
		r.srv.Script(probe.Bidi, steps...)
		begun := time.Now()
		var group sync.WaitGroup
		for i := range streams {
			group.Go(func() { talkTagged(t, r, fmt.Sprintf("s%d", i), messages) })
		}
		group.Wait()
		if took := time.Since(begun); took >= 5*time.Second {
			t.Errorf("took %v, want less than 5 s", took)
		}
		wantEqual(t, "handler runs", r.srv.Hits(probe.Bidi), 2*streams)
		whole := 0
		for _, e := range r.srv.Seen(probe.Bidi) {
			wantOneTagInOrder(t, e.Texts)
			if len(e.Texts) == messages {
				whole++
			}
		}
		wantEqual(t, "handler runs that saw a whole stream", whole, streams)
	})
}

// upload sends n messages of 64 KiB as a well-behaved client does and returns
// the most that the heap grew meanwhile.
func upload(t *testing.T, r *rig, n int) (growth uint64, sent int, resp *probev1.Response, err error) {
	t.Helper()
	before := heap()
	most := before
	stream, err := probev1.NewProbeServiceClient(r.conn).ClientStream(t.Context())
	wantOK(t, err)
	req := &probev1.Request{Payload: make([]byte, uploadSize)}
	for ; sent < n; sent++ {
		if sent%512 == 511 {
			most = max(most, heap()) // what is in use, not what waits to be collected
		}
		if stream.Send(req) != nil {
			break // the reason comes with the answer
		}
	}
	resp, err = stream.CloseAndRecv()
	return most - before, sent, resp, err
}

// talkTagged sends messages that carry a tag while another goroutine reads, and
// wants each answered, in order.
func talkTagged(t *testing.T, r *rig, tag string, messages int) {
	t.Helper()
	stream := openStream(t.Context(), t, r.conn, probe.Bidi)
	var group sync.WaitGroup
	group.Go(func() {
		for i := range messages {
			if err := stream.SendMsg(request(fmt.Sprintf("%s/%d", tag, i))); err != nil {
				t.Errorf("%s: send %d: %v", tag, i, err)
				return
			}
		}
		if err := stream.CloseSend(); err != nil {
			t.Errorf("%s: close: %v", tag, err)
		}
	})
	got, err := drain(stream)
	group.Wait()
	if err != nil {
		t.Errorf("%s: %v", tag, err)
	}
	var want []string
	for i := range messages {
		want = append(want, fmt.Sprintf("%d:%s/%d", i+1, tag, i))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s: messages (-want +got):\n%s", tag, diff)
	}
}

func wantOneTagInOrder(t *testing.T, texts []string) {
	t.Helper()
	for i, text := range texts {
		tag, _, _ := strings.Cut(texts[0], "/")
		if text != fmt.Sprintf("%s/%d", tag, i) {
			t.Errorf("a handler saw %q, want the messages of one stream in order", texts)
			return
		}
	}
}

// B41: abandoned streams leak spans; the interceptor ends a span that is not
// its own.
func TestB41(t *testing.T) {
	const name = "belay.probe.v1.ProbeService/ServerStream"
	bubbles(t, "a, 50 streams read once, cancelled and dropped", func(t *testing.T) {
		recorded := &spans{}
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithTracerProvider(recorded)}})
		r.srv.Default(probe.Step{Ops: []probe.Op{probe.Send(1), probe.Hang()}})
		r.srv.Script(probe.Read, probe.Step{})
		_, err := r.call(t, probe.Read, request("a")) // the connection has goroutines, too
		wantOK(t, err)
		synctest.Wait()
		before := runtime.NumGoroutine()
		for range 50 {
			ctx, cancel := context.WithCancel(t.Context())
			_, err := recv(ask(ctx, t, r.conn, 1))
			wantOK(t, err)
			cancel()
		}
		time.Sleep(time.Second)
		synctest.Wait()
		recorded.wantEndedOnce(t, name, 50)
		recorded.wantEndedOnce(t, "belay "+name, 50)
		if after := runtime.NumGoroutine(); after > before+5 {
			t.Errorf("%d goroutines, %d before", after, before)
		}
	})
	bubbles(t, "b, the caller's span stays the caller's", func(t *testing.T) {
		recorded := &spans{}
		r := start(t, setup{}) // no tracing of Belay's
		r.srv.Script(probe.ServerStream, probe.Step{Code: codes.InvalidArgument})
		ctx, caller := recorded.Tracer("").Start(t.Context(), "P")
		seen := recorded.named("P")[0]
		_, err := drain(ask(ctx, t, r.conn, 1))
		wantCode(t, err, codes.InvalidArgument)
		if !caller.IsRecording() {
			t.Error("the caller's span was ended")
		}
		for _, key := range []attribute.Key{"rpc.method", "rpc.response.status_code", "error.type"} {
			if v := seen.text(key); v != "" {
				t.Errorf("the caller's span has %s=%s", key, v)
			}
		}
		caller.AddEvent("mine")
		caller.End()
		recorded.wantEndedOnce(t, "P", 1)
		wantEqual(t, "kind", seen.kind, trace.SpanKindUnspecified)
	})
	bubbles(t, "c, read to the end, and again", func(t *testing.T) {
		recorded := &spans{}
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithTracerProvider(recorded)}})
		stream := ask(t.Context(), t, r.conn, 2)
		_, err := drain(stream)
		wantOK(t, err)
		for range 2 {
			_, err = recv(stream)
			wantEqual(t, "RecvMsg after the end", outcome(err), "EOF")
			wantOK(t, stream.CloseSend())
		}
		recorded.wantEndedOnce(t, name, 1)
		recorded.wantEndedOnce(t, "belay "+name, 1)
	})
}

// B47 (d): what each attempt of a stream is told about the time left.
func TestB47d(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p := casePolicy()
		p.AttemptTimeout = 10 * time.Second
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(p)}})
		r.srv.Default(probe.Step{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
		defer cancel()
		begun := time.Now()
		_, err := drain(ask(ctx, t, r.conn, 1))
		wantCode(t, err, codes.DeadlineExceeded)
		wantBetween(t, "took", time.Since(begun), 0, 250*time.Millisecond)
		synctest.Wait()
		entry := r.srv.Seen(probe.ServerStream)[0]
		if !entry.HasDeadline {
			t.Fatal("the server was told no deadline")
		}
		wantBetween(t, "time left at the server", entry.Left, 1, 150*time.Millisecond)
	})
	// The same with the time of several attempts: each is told what is left.
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Backoff: fixed(40 * time.Millisecond)})}})
		r.srv.Script(probe.Bidi, probe.Step{Delay: 30 * time.Millisecond, Code: codes.Unavailable})
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
		defer cancel()
		_, err := drain(openClosed(ctx, t, r))
		wantOK(t, err)
		var left []time.Duration
		for _, a := range r.counter.Attempts() {
			left = append(left, a.Left)
		}
		if want := []time.Duration{150 * time.Millisecond, 80 * time.Millisecond}; !slices.Equal(left, want) {
			t.Errorf("time left at each attempt: %v, want %v", left, want)
		}
	})
}
