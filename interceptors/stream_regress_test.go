package interceptors_test

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// Each test in this file failed once: it hung, leaked, raced or showed metadata
// of an attempt that did not decide.

func withPolicy(p policy.Policy) []interceptors.ClientOption {
	return []interceptors.ClientOption{interceptors.WithPolicy(p)}
}

// A goroutine that waits for a lock is not at rest for synctest. With the lock
// held during the backoff, fake time stood still for ever.
func TestSendDuringBackoff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{client: withPolicy(policy.Policy{Backoff: fixed(time.Second)})})
		r.srv.Script(probe.Bidi, unavailable())
		stream := openStream(t.Context(), t, r.conn, probe.Bidi)
		var group sync.WaitGroup
		group.Go(func() {
			time.Sleep(500 * time.Millisecond) // RecvMsg is in its backoff
			send(t, stream, "a")
			wantOK(t, stream.CloseSend())
		})
		got, err := drain(stream)
		group.Wait()
		wantOK(t, err)
		wantEqual(t, "messages", strings.Join(got, ","), "1:a")
	})
}

// The server answers as it reads. It stops reading when nobody takes its
// answers, and then a replay that RecvMsg waits for waits for RecvMsg.
func TestReplayLargerThanTheWindows(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const messages, size = 64, 16 << 10 // 1 MiB each way
		r := start(t, setup{client: withPolicy(policy.Policy{ReplayBytes: 4 << 20})})
		r.srv.Script(probe.Bidi, probe.Step{Ops: []probe.Op{probe.Recv(messages)}, Code: codes.Unavailable})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stream := openStream(ctx, t, r.conn, probe.Bidi)
		var group sync.WaitGroup
		group.Go(func() {
			for i := range messages + 2 {
				if i == messages {
					time.Sleep(time.Second) // the rest is sent behind the replay
				}
				if err := stream.SendMsg(&probev1.Request{Text: strconv.Itoa(i), Payload: make([]byte, size)}); err != nil {
					t.Errorf("send %d: %v", i, err)
				}
			}
			wantOK(t, stream.CloseSend())
		})
		got, err := drain(stream)
		group.Wait()
		wantOK(t, err)
		wantEqual(t, "messages", len(got), messages+2)
		for i, m := range got {
			wantEqual(t, "message", m, fmt.Sprintf("%d:%d", i+1, i))
		}
		wantEqual(t, "attempts", r.counter.Count(), 2)
	})
}

// OnFinish is the application's: it may use the stream that has finished.
func TestOnFinishMayUseTheStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Bidi, probe.Step{Code: codes.NotFound, Trailer: metadata.Pairs("t", "one")})
		var stream grpc.ClientStream
		saw := make(chan string, 2)
		stream = openStream(t.Context(), t, r.conn, probe.Bidi, grpc.OnFinish(func(err error) {
			_, again := recv(stream)
			saw <- strings.Join([]string{
				outcome(err), outcome(again), outcome(stream.SendMsg(request("late"))), outcome(stream.CloseSend()), one(stream.Trailer(), "t"),
			}, ";")
		}))
		_, err := drain(stream)
		wantCode(t, err, codes.NotFound)
		wantEqual(t, "OnFinish saw", <-saw, "NotFound;NotFound;EOF;OK;one")
		wantEqual(t, "further calls of OnFinish", len(saw), 0)
	})
}

// Metadata and status are of one attempt. The last one here never had a stream.
func TestNoMetadataOfAnAttemptThatDoesNotDecide(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(cancel context.CancelFunc) error // in place of the second attempt
		want codes.Code
	}{
		{"the next attempt is refused on its way out", func(context.CancelFunc) error {
			return status.Error(codes.PermissionDenied, "no token")
		}, codes.PermissionDenied},
		{"the caller leaves while the next attempt opens", func(cancel context.CancelFunc) error {
			cancel()
			return status.FromContextError(context.Canceled).Err()
		}, codes.Canceled},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			n := 0
			r := start(t, setup{inner: []grpc.DialOption{grpc.WithChainStreamInterceptor(
				func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					if n++; n > 1 {
						return nil, c.end(cancel)
					}
					return streamer(ctx, desc, cc, method, opts...)
				})}})
			r.srv.Script(probe.ServerStream, probe.Step{
				Ops: []probe.Op{probe.Header("h", "one")}, Trailer: metadata.Pairs("t", "one"), Code: codes.Unavailable,
			})
			var header, trailer metadata.MD
			stream := ask(ctx, t, r.conn, 1, grpc.Header(&header), grpc.Trailer(&trailer))
			_, err := drain(stream)
			wantCode(t, err, c.want)
			md, err := stream.Header()
			wantOK(t, err)
			for what, got := range map[string]string{
				"Header()": one(md, "h"), "Trailer()": one(stream.Trailer(), "t"),
				"grpc.Header": one(header, "h"), "grpc.Trailer": one(trailer, "t"),
			} {
				if got != "" {
					t.Errorf("%s shows %q of the first attempt, which does not decide", what, got)
				}
			}
		})
	}
	bubbles(t, "the caller's time ends in a backoff", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(policy.Policy{Backoff: fixed(time.Second)})})
		r.srv.Script(probe.ServerStream, probe.Step{Trailer: metadata.Pairs("t", "one"), Code: codes.Unavailable})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(500*time.Millisecond, cancel)
		stream := ask(ctx, t, r.conn, 1)
		_, err := drain(stream)
		wantCode(t, err, codes.Canceled)
		wantEqual(t, "trailer", one(stream.Trailer(), "t"), "")
		if reaches(err, codes.Unavailable) == nil {
			t.Errorf("%v does not show what the server had said", err)
		}
	})
}

// gRPC tells of an attempt's end once. When that comes before the application
// leaves, and the application does not ask, nothing else will.
func TestHeldUntilTheApplicationLeaves(t *testing.T) {
	const name = "belay.probe.v1.ProbeService/ServerStream"
	for _, c := range []struct {
		name   string
		policy policy.Policy
		step   probe.Step
		use    func(t *testing.T, stream grpc.ClientStream)
		// atOnce: what the stream holds need not wait for the application.
		atOnce bool
	}{
		{
			name: "Header of a stream that could not be repeated", policy: policy.Policy{ReplayBytes: 1},
			step: probe.Step{Code: codes.Unavailable},
			use: func(t *testing.T, stream grpc.ClientStream) {
				md, err := stream.Header()
				if md != nil || err != nil {
					t.Errorf("Header: %v, %v; want nothing", md, err)
				}
			},
		},
		{
			name: "MaxIdle passed", policy: policy.Policy{MaxIdle: time.Second},
			step: probe.Step{Ops: []probe.Op{probe.Send(1)}, Hang: true},
			use: func(t *testing.T, stream grpc.ClientStream) {
				_, err := recv(stream)
				wantOK(t, err)
				time.Sleep(5 * time.Second)
			},
			atOnce: true,
		},
		{
			name: "MaxIdle passed before the first message", policy: policy.Policy{MaxIdle: time.Second},
			step: probe.Step{Hang: true},
			use:  func(*testing.T, grpc.ClientStream) { time.Sleep(5 * time.Second) },
		},
		{
			name: "AttemptTimeout passed", policy: policy.Policy{AttemptTimeout: time.Second},
			step: probe.Step{Hang: true},
			use:  func(*testing.T, grpc.ClientStream) { time.Sleep(5 * time.Second) },
		},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			recorded, held := &spans{}, &permits{}
			r := start(t, setup{client: append(withPolicy(c.policy),
				interceptors.WithTracerProvider(recorded), interceptors.WithOwnBreaker(held))})
			r.srv.Default(c.step)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			c.use(t, ask(ctx, t, r.conn, 1))
			synctest.Wait()
			if (held.open() == 0) != c.atOnce {
				t.Errorf("%d permits are held before the application leaves; at once: %t", held.open(), c.atOnce)
			}
			cancel()
			synctest.Wait()
			held.wantDone(t, 1)
			recorded.wantEndedOnce(t, name, 1)
			recorded.wantEndedOnce(t, "belay "+name, 1)
		})
	}
}

// An inner interceptor may make a stream of its own, about which gRPC says
// nothing.
func TestStreamThatIsNotGRPCs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		recorded, held := &spans{}, &permits{}
		c := newClient(t, interceptors.WithTracerProvider(recorded), interceptors.WithOwnBreaker(held))
		made := func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
			return silent{ctx: ctx}, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := c.Stream()(ctx, descOf(probe.Bidi), nil, probe.Bidi, made)
		wantOK(t, err)
		wantOK(t, stream.SendMsg(request("a")))
		cancel()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		held.wantDone(t, 1)
		recorded.wantEndedOnce(t, "belay.probe.v1.ProbeService/Bidi", 1)
		_, err = recv(stream)
		wantCode(t, err, codes.Canceled)
	})
}

// silent is a stream that takes everything and says nothing.
type silent struct {
	grpc.ClientStream

	ctx context.Context //nolint:containedctx // a stream is its context
}

func (silent) SendMsg(any) error { return nil }
func (s silent) RecvMsg(any) error {
	<-s.ctx.Done()
	return status.FromContextError(s.ctx.Err()).Err()
}

// The runtime runs cleanups outside of a bubble, where ending a bubble's context
// ends the process.
func TestDroppedInABubble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Default(probe.Step{Ops: []probe.Op{probe.Send(1), probe.Hang()}})
		ctx, cancel := context.WithCancel(t.Context())
		for range 10 {
			_, err := recv(ask(ctx, t, r.conn, 1))
			wantOK(t, err)
		}
		for range 5 {
			runtime.GC()
			time.Sleep(time.Second)
		}
		cancel()
		synctest.Wait()
		for _, e := range r.srv.Seen(probe.ServerStream) {
			if !e.Ended {
				t.Error("a handler still runs after the caller has left")
			}
		}
	})
}

// An inner interceptor may fail a message of a stream that is alive. Its trailer
// is gRPC's to write until gRPC is done with it.
func TestInnerInterceptorFailsAMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{inner: []grpc.DialOption{onInner(func(_ int, s grpc.ClientStream) (grpc.ClientStream, error) {
			return &failingRecv{ClientStream: s, err: status.Error(codes.DataLoss, "checksum")}, nil
		})}})
		r.srv.Default(probe.Step{Trailer: metadata.Pairs("t", "one"), Ops: []probe.Op{probe.Send(3), probe.Hang()}})
		var trailer metadata.MD
		finished := 0
		stream := ask(t.Context(), t, r.conn, 3, grpc.Trailer(&trailer), grpc.OnFinish(func(error) { finished++ }))
		_, err := drain(stream)
		wantCode(t, err, codes.DataLoss)
		synctest.Wait()
		wantEqual(t, "trailer", one(trailer, "t"), "")
		wantEqual(t, "OnFinish", finished, 1)
		if e := r.srv.Seen()[0]; !e.Ended {
			t.Error("the handler runs on: the attempt was not cancelled")
		}
	})
}

type failingRecv struct {
	grpc.ClientStream

	err error
}

func (f *failingRecv) RecvMsg(m any) error {
	if err := f.ClientStream.RecvMsg(m); err != nil {
		return err
	}
	return f.err
}

// A panic of an inner interceptor belongs to the application, and takes neither
// the process nor the goroutine on the stream's other side with it.
func TestPanicsBelowAStream(t *testing.T) {
	bubbles(t, "while the next attempt opens", func(t *testing.T) {
		recorded, held := &spans{}, &permits{}
		r := start(t, setup{
			client: []interceptors.ClientOption{interceptors.WithTracerProvider(recorded), interceptors.WithOwnBreaker(held)},
			inner: []grpc.DialOption{onInner(func(n int, s grpc.ClientStream) (grpc.ClientStream, error) {
				if n == 2 {
					panic("inner")
				}
				return s, nil
			})},
		})
		r.srv.Script(probe.Bidi, probe.Step{Ops: []probe.Op{probe.Recv(1)}, Code: codes.Unavailable})
		stream := openStream(t.Context(), t, r.conn, probe.Bidi)
		send(t, stream, "a")
		var group sync.WaitGroup
		group.Go(func() {
			time.Sleep(5 * time.Millisecond) // in the backoff
			wantEqual(t, "SendMsg beside it", outcome(stream.SendMsg(request("b"))), "EOF")
		})
		wantEqual(t, "RecvMsg panics with", panicOf(func() { _, _ = recv(stream) }), "inner")
		group.Wait()
		_, err := recv(stream)
		wantCode(t, err, codes.Internal)
		synctest.Wait()
		held.wantDone(t, 2)
		recorded.wantEndedOnce(t, "belay.probe.v1.ProbeService/Bidi", 2)
	})
	bubbles(t, "in a replay", func(t *testing.T) {
		held := &permits{}
		r := start(t, setup{
			client: []interceptors.ClientOption{interceptors.WithOwnBreaker(held)},
			inner: []grpc.DialOption{onInner(func(n int, s grpc.ClientStream) (grpc.ClientStream, error) {
				if n == 2 {
					return panickingSend{s}, nil
				}
				return s, nil
			})},
		})
		r.srv.Script(probe.Bidi, probe.Step{Ops: []probe.Op{probe.Recv(1)}, Code: codes.Unavailable})
		_, err := drain(openClosed(t.Context(), t, r))
		wantCode(t, err, codes.Internal)
		if !strings.Contains(err.Error(), "inner") {
			t.Errorf("%v does not say what was panicked with", err)
		}
		synctest.Wait()
		held.wantDone(t, 2)
	})
	bubbles(t, "in RecvMsg", func(t *testing.T) {
		r := start(t, setup{inner: []grpc.DialOption{onInner(func(_ int, s grpc.ClientStream) (grpc.ClientStream, error) {
			return panickingRecv{s}, nil
		})}})
		r.srv.Default(unavailable())
		stream := openStream(t.Context(), t, r.conn, probe.Bidi)
		wantEqual(t, "RecvMsg panics with", panicOf(func() { _, _ = recv(stream) }), "inner")
		synctest.Wait()
		// It does not wait for the goroutine that is gone.
		if got := outcome(stream.SendMsg(request("b"))); got != "OK" && got != "EOF" {
			t.Errorf("SendMsg: %s", got)
		}
	})
}

type panickingSend struct{ grpc.ClientStream }

func (panickingSend) SendMsg(any) error { panic("inner") }

type panickingRecv struct{ grpc.ClientStream }

func (p panickingRecv) RecvMsg(m any) error {
	if _, asksForStatus := m.(*probev1.Response); asksForStatus {
		panic("inner")
	}
	return p.ClientStream.RecvMsg(m)
}

func panicOf(f func()) (value any) {
	defer func() { value = recover() }()
	f()
	return nil
}

// An application that only sends is told, in the end, that nobody reads.
func TestSendingToAnAttemptThatHasEnded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ClientStream, probe.Step{Ops: []probe.Op{probe.Header("h", "one")}, Code: codes.Unavailable})
		stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
		begun := time.Now()
		var err error
		for err == nil {
			synctest.Wait()
			err = stream.SendMsg(request("tick"))
			time.Sleep(100 * time.Millisecond)
		}
		wantEqual(t, "SendMsg", outcome(err), "EOF")
		wantBetween(t, "told after", time.Since(begun), time.Second, 1200*time.Millisecond)
		_, err = recv(stream)
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "attempts", r.counter.Count(), 1)
	})
}
