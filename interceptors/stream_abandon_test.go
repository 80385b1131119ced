package interceptors_test

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// abandoned is how often each way of leaving a stream is tried.
const abandoned = 200

// A stream is left in every way there is. Each time all that it held comes back:
// goroutines and memory, the spans, the breaker's permits; and the application's
// OnFinish has run once.
func TestAbandonedStreams(t *testing.T) {
	oneThenHang := probe.Step{Ops: []probe.Op{probe.Send(1), probe.Hang()}}
	for _, way := range []struct {
		name   string
		method string
		step   probe.Step
		policy policy.Policy
		// leave uses a stream and leaves it.
		leave func(l *leaving)
		// collected: the end comes when the garbage collector finds the stream.
		collected bool
		// cuts: connections end, and the in-memory ones stay in use for longer,
		// without Belay too. So the heap says nothing.
		cuts bool
	}{
		{
			name: "cancelled after a message", method: probe.ServerStream, step: oneThenHang,
			leave: func(l *leaving) {
				_, err := recv(l.open())
				wantOK(l.t, err)
				l.cancel()
			},
		},
		{
			name: "cancelled before a message", method: probe.Bidi, step: probe.Step{Hang: true},
			leave: func(l *leaving) {
				send(l.t, l.open(), "a", "b")
				l.cancel()
			},
		},
		{
			name: "cancelled while it reads", method: probe.Bidi, step: probe.Step{Hang: true},
			leave: func(l *leaving) {
				stream := l.open()
				var group sync.WaitGroup
				group.Go(l.cancel)
				_, err := recv(stream)
				wantCodeIs(l.t, "RecvMsg", err, codes.Canceled)
				group.Wait()
			},
		},
		{
			name: "cancelled in a backoff", method: probe.ServerStream, step: unavailable(), policy: policy.Policy{Backoff: fixed(time.Hour)},
			leave: func(l *leaving) {
				l.onBackoff = l.cancel
				_, err := recv(l.open())
				wantCodeIs(l.t, "RecvMsg", err, codes.Canceled)
			},
		},
		{
			name: "an error from SendMsg", method: probe.ClientStream, step: probe.Step{Hang: true},
			leave: func(l *leaving) {
				wantCodeIs(l.t, "SendMsg", l.open(grpc.MaxCallSendMsgSize(10)).SendMsg(request("more than ten bytes")), codes.ResourceExhausted)
			},
		},
		{
			name: "the caller's deadline", method: probe.ServerStream, step: oneThenHang,
			leave: func(l *leaving) {
				l.ctx, l.cancel = context.WithTimeout(l.ctx, 10*time.Millisecond)
				if stream, err := l.try(); err == nil {
					_, _ = recv(stream) // the deadline may be first here, too
				}
			},
		},
		{
			name: "the policy's Timeout", method: probe.Bidi, step: oneThenHang, policy: policy.Policy{Timeout: 10 * time.Millisecond},
			leave: func(l *leaving) { _, _ = l.try() },
		},
		{
			name: "the policy's MaxIdle", method: probe.Bidi, step: oneThenHang, policy: policy.Policy{MaxIdle: 5 * time.Millisecond},
			leave: func(l *leaving) {
				stream := l.open()
				for err := error(nil); err == nil; {
					_, err = recv(stream)
				}
			},
		},
		{
			name: "the channel closed", method: probe.Bidi, step: oneThenHang, cuts: true,
			leave: func(l *leaving) {
				l.conn = l.rig.network.Dial(l.t, l.dial...)
				_, err := recv(l.open())
				wantOK(l.t, err)
				wantOK(l.t, l.conn.Close())
			},
		},
		{
			name: "the channel closed before a message", method: probe.Bidi, step: probe.Step{Hang: true}, cuts: true,
			leave: func(l *leaving) {
				l.conn = l.rig.network.Dial(l.t, l.dial...)
				send(l.t, l.open(), "a")
				wantOK(l.t, l.conn.Close())
			},
		},
		{
			name: "the server killed, and read to the end", method: probe.ServerStream, step: oneThenHang, cuts: true,
			leave: func(l *leaving) {
				stream := l.open()
				_, err := recv(stream)
				wantOK(l.t, err)
				l.rig.network.Cut()
				_, err = recv(stream)
				wantCodeIs(l.t, "RecvMsg", err, codes.Unavailable)
			},
		},
		{
			name: "the server killed, and dropped", method: probe.ServerStream, step: oneThenHang, collected: true, cuts: true,
			leave: func(l *leaving) {
				_, err := recv(l.open())
				wantOK(l.t, err)
				l.rig.network.Cut()
			},
		},
		{
			name: "dropped after a message", method: probe.ServerStream, step: oneThenHang, collected: true,
			leave: func(l *leaving) {
				_, err := recv(l.open())
				wantOK(l.t, err)
			},
		},
		{
			name: "dropped before a message", method: probe.Bidi, step: probe.Step{Hang: true}, collected: true,
			leave: func(l *leaving) { send(l.t, l.open(), "a", "b", "c") },
		},
		{
			name: "dropped after CloseSend", method: probe.ClientStream, step: probe.Step{Hang: true}, collected: true,
			leave: func(l *leaving) {
				stream := l.open()
				send(l.t, stream, "a")
				wantOK(l.t, stream.CloseSend())
			},
		},
		{
			name: "dropped unused", method: probe.Bidi, step: probe.Step{Hang: true}, collected: true,
			leave: func(l *leaving) { l.open() },
		},
		{
			name: "dropped with every clock running", method: probe.Bidi, step: oneThenHang, collected: true,
			policy: policy.Policy{Timeout: time.Hour, AttemptTimeout: time.Hour, MaxIdle: time.Hour},
			leave: func(l *leaving) {
				send(l.t, l.open(), "a")
			},
		},
		{
			name: "read to the end", method: probe.Bidi, step: probe.Step{Ops: []probe.Op{probe.Send(3)}},
			leave: func(l *leaving) {
				_, err := drain(l.open())
				wantOK(l.t, err)
			},
		},
	} {
		t.Run(way.name, func(t *testing.T) {
			recorded, held := &spans{}, &permits{}
			l := &leaving{t: t, method: way.method, finished: make(chan struct{}, 2*abandoned)}
			p := way.policy
			if p.Backoff == (policy.Backoff{}) {
				p.Backoff = fixed(time.Millisecond)
			}
			c := newClient(t, interceptors.WithPolicy(p), interceptors.WithBudget(plenty()),
				interceptors.WithTracerProvider(recorded), interceptors.WithOwnBreaker(held), interceptors.WithObserver(l))
			l.dial = append(c.DialOptions(), onInner(l.track))
			l.rig = start(t, setup{realTime: true, plainClient: true, dial: l.dial})
			l.rig.srv.Default(way.step)

			// Once for what gRPC makes on first use.
			round := func(n int) {
				for range n {
					l.ctx, l.cancel = context.WithCancel(context.Background()) //nolint:fatcontext // made from the background each time
					l.conn = l.rig.conn
					way.leave(l)
					if !way.collected {
						<-l.finished
						l.cancel()
					}
				}
				for range n * btoi(way.collected) {
					l.awaitCollected()
				}
				l.rig.counter.Reset()
			}
			round(10)
			held.atRest()
			goroutines, bytes := runtime.NumGoroutine(), heap()
			round(abandoned)
			held.atRest()

			eventually(t, "goroutines are back", func() bool { return runtime.NumGoroutine() <= goroutines+5 })
			eventually(t, "attempts are collected", func() bool {
				runtime.GC()
				return l.live.Load() == 0
			})
			if after := heap(); after > bytes+1<<20 && !way.cuts {
				t.Errorf("the heap grew by %d KiB over %d streams", (after-bytes)>>10, abandoned)
			}
			wantEqual(t, "further calls of OnFinish", len(l.finished), 0)
			held.mu.Lock()
			attempts, twice := held.allowed, held.twice
			held.mu.Unlock()
			wantEqual(t, "permits given back twice", twice, 0)
			recorded.wantEndedOnce(t, way.method[1:], attempts)
			recorded.wantEndedOnce(t, "belay "+way.method[1:], abandoned+10)
		})
	}
}

// leaving is one stream that is being left, time after time.
type leaving struct {
	t        *testing.T
	rig      *rig
	conn     *grpc.ClientConn
	dial     []grpc.DialOption
	method   string
	ctx      context.Context //nolint:containedctx // the stream's, made anew each time
	cancel   context.CancelFunc
	finished chan struct{}
	live     atomic.Int64 // attempts' streams that are in memory

	onBackoff func()
}

// open opens a stream whose end is told to finished. Where it is dropped,
// nothing of the test may hold it.
func (l *leaving) open(opts ...grpc.CallOption) grpc.ClientStream {
	l.t.Helper()
	stream, err := l.try(opts...)
	wantOK(l.t, err)
	return stream
}

func (l *leaving) try(opts ...grpc.CallOption) (grpc.ClientStream, error) {
	finished := l.finished
	opts = append(opts, grpc.OnFinish(func(error) { finished <- struct{}{} }))
	stream, err := l.conn.NewStream(l.ctx, descOf(l.method), l.method, opts...)
	if err == nil && l.method == probe.ServerStream {
		err = stream.SendMsg(&probev1.Request{})
	}
	return stream, err
}

// track counts the streams of attempts until they are collected.
func (l *leaving) track(_ int, s grpc.ClientStream) (grpc.ClientStream, error) {
	tracked := &struct{ grpc.ClientStream }{s}
	l.live.Add(1)
	runtime.AddCleanup(tracked, func(live *atomic.Int64) { live.Add(-1) }, &l.live)
	return tracked, nil
}

func (l *leaving) Observe(_ context.Context, e interceptors.Event) {
	if e.Kind == interceptors.EventBackoff && l.onBackoff != nil {
		l.onBackoff()
	}
}

// awaitCollected collects until one more stream has ended.
func (l *leaving) awaitCollected() {
	for {
		select {
		case <-l.finished:
			return
		default:
			runtime.GC()
		}
	}
}

// atRest waits until no permit is held.
func (p *permits) atRest() {
	for p.open() != 0 {
		runtime.Gosched()
	}
}

// eventually waits for what other goroutines are about to do.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for begun := time.Now(); !is(); runtime.Gosched() {
		if time.Since(begun) > 10*time.Second {
			t.Errorf("not after 10 s: %s", what)
			return
		}
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// The end that the application hears and the end that its context brings are the
// same end, whoever is first.
func TestEndIsOneEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		recorded, held := &spans{}, &permits{}
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithTracerProvider(recorded), interceptors.WithOwnBreaker(held),
		}})
		const calls = 100
		for i := range calls {
			method := []string{probe.ClientStream, probe.ServerStream, probe.Bidi}[i%3]
			ctx, cancel := context.WithCancel(t.Context())
			finished := make(chan error, 2)
			stream := openStream(ctx, t, r.conn, method, grpc.OnFinish(func(err error) { finished <- err }))
			_ = stream.SendMsg(&probev1.Request{Number: 1}) // RecvMsg has the last word
			_ = stream.CloseSend()
			var group sync.WaitGroup
			group.Go(cancel)
			_, err := recv(stream)
			for err == nil && method != probe.ClientStream {
				_, err = recv(stream)
			}
			group.Wait()
			if got := outcome(err); got != "OK" && got != "EOF" && got != "Canceled" {
				t.Errorf("%s ended with %s", method, got)
			}
			finish := <-finished
			if (finish == nil) != (err == nil || errors.Is(err, io.EOF)) {
				t.Errorf("%s: OnFinish was told %v and RecvMsg %v", method, finish, err)
			}
			wantEqual(t, "further calls of OnFinish", len(finished), 0)
		}
		synctest.Wait()
		held.wantDone(t, calls)
	})
}
