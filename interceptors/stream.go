package interceptors

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// clientStream is one logical streaming call over any number of attempts.
//
// Until the application has seen something (a message or a header) the stream
// is not committed: what was sent is kept, and a failed attempt is replaced by a
// new one to which it is sent again. From then on, and from the moment that
// more was sent than may be kept, errors are the application's.
//
// Who may do what. gRPC allows one goroutine in SendMsg and one in RecvMsg, at
// the same time. Calls into an attempt's own stream are made without a lock,
// since they block on flow control, which only the other goroutine may be able
// to relieve. A message is kept before it is sent, so an attempt that is
// replaced meanwhile has been sent it by the replay.
//
// What follows from a failure (the verdict, the wait, the next attempt) is done
// by one goroutine at a time, the one that has set busy. It does not hold mu
// meanwhile: it runs interceptors, observers and tracers of other people, and it
// sleeps. The others wait on turn. The embedded call belongs to who is busy, or
// to who holds mu while nobody is.
//
// Only one goroutine may learn an attempt's status. While the application is in
// RecvMsg it is that one, and the others wait on turn.
type clientStream struct {
	*call

	desc     *grpc.StreamDesc
	streamer grpc.Streamer
	abort    context.CancelFunc // ends whatever attempt is current
	unwatch  func() bool        // stops the watch on ctx
	idle     *time.Timer        // nil without MaxIdle

	// settled is set when no attempt will be replaced any more: the stream is
	// committed, or more was sent than may be kept, or retries are off. It never goes back, so after it neither mu nor the buffer is touched
	// by a message.
	settled atomic.Bool
	current atomic.Pointer[innerStream] // nil only before the first attempt opened
	seen    atomic.Bool                 // mirrors committed
	over    atomic.Bool                 // mirrors ended
	active  atomic.Int64                // when a message last went or came; see MaxIdle

	mu        sync.Mutex // guards all below
	turn      sync.Cond  // on mu: busy, current, replaying, receiving, settled or ended changed
	busy      bool       // a goroutine decides what follows
	receiving bool       // the application is in RecvMsg of current
	committed bool       // the application has seen something
	overflow  bool       // more was sent than may be kept
	sentAll   bool       // no message is allowed any more
	closed    bool       // CloseSend was called
	buffer    replayBuffer
	lost      *time.Timer // see contextEnded
	ended     bool
	endErr    error        // what RecvMsg returns from now on; io.EOF after success
	decided   *innerStream // the attempt that endErr is from; nil when it is from none
}

// innerStream is an attempt that was opened.
type innerStream struct {
	grpc.ClientStream

	attempt   *attempt
	replaying atomic.Bool   // what was sent before is being sent again
	deadSince time.Duration // see sendToTheDead; who is busy may touch it
}

// Stream returns the interceptor for streaming calls, for programs that build
// their own chain; see [Client.Unary].
//
// A stream is retried until the application has seen a message or a header of
// it. What a client sends is kept for that up to Policy.ReplayBytes; a stream
// that sends more goes on without retries, and none is ever refused because it
// cannot be retried.
//
// Policy.Timeout bounds a stream from its first attempt to its end,
// Policy.AttemptTimeout the wait for the first response: from the beginning of
// an attempt, or from the last message that was sent on it. Policy.MaxIdle ends
// a stream on which nothing moves.
//
// The stream's Context is the call's own: it has the caller's values, and no
// peer. So grpc.PreparedMsg.Encode, which asks a stream's context for gRPC's
// codec, needs a stream of a channel without interceptors; a message prepared
// with one can be sent on any, and is not kept for a replay.
func (c *Client) Stream() grpc.StreamClientInterceptor { return c.streamInterceptor(false) }

func (c *Client) streamInterceptor(bundled bool) grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, fullMethod string,
		streamer grpc.Streamer, opts ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		set, m := c.methodOf(fullMethod)
		if m.exempt {
			return streamer(ctx, desc, cc, fullMethod, opts...)
		}
		s := &clientStream{
			call:     &call{client: c, channel: c.channelOf(cc), cc: cc, method: m, bundled: bundled},
			desc:     desc,
			streamer: streamer,
		}
		s.turn.L = &s.mu
		s.stream = s
		return s.open(ctx, set, opts)
	}
}

// open prepares the call and opens the first attempt that can be.
func (s *clientStream) open(ctx context.Context, set *policySet, opts []grpc.CallOption) (grpc.ClientStream, error) {
	// The call's own cancel ends whatever attempt is current, however the
	// application comes to be rid of the stream.
	ctx, s.abort = context.WithCancel(ctx)
	s.busy = true
	returned := false
	defer s.endOnPanic(&returned)
	err := s.call.open(ctx, set, nil, opts)
	if err == nil {
		s.buffer.limit = s.rules.ReplayBytes
		s.buffer.channel = &s.channel.replay
		s.settled.Store(s.off)
		s.unwatch = context.AfterFunc(s.ctx, s.contextEnded) //nolint:contextcheck // s.ctx is made of ctx
		err = s.connect(false)                               //nolint:contextcheck // so are the attempts'
	}
	returned = true
	if err != nil {
		s.end(err)
		return nil, err
	}
	s.watchIdle()
	s.giveUpTurn()
	h := &streamHandle{s}
	// The application may drop a stream without ending it in any way that gRPC
	// asks for. What is left then ends with the handle.
	if !inBubble() {
		runtime.AddCleanup(h, func(abort context.CancelFunc) { abort() }, s.abort)
	}
	return h, nil
}

// takeTurnLocked waits until nobody decides, and makes the caller the one who
// does. It reports false when the stream has ended instead.
func (s *clientStream) takeTurnLocked() bool {
	for s.busy && !s.ended {
		s.turn.Wait()
	}
	if s.ended {
		return false
	}
	s.busy = true
	return true
}

func (s *clientStream) giveUpTurn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = false
	s.turn.Broadcast()
}

// endOnPanic is deferred by who is busy. A panic in the code of others goes on
// its way to the application, and the goroutine on the stream's other side must
// not wait for ever for the turn of one that is gone.
func (s *clientStream) endOnPanic(returned *bool) {
	if !*returned {
		s.end(status.Error(codes.Internal, "belay: a panic in this call ended the stream"))
	}
}

// connect makes attempts until one is open, with all that was sent so far on
// its way again; or returns the call's error. The caller is busy.
func (s *clientStream) connect(poll bool) error {
	for {
		permit, err := s.admit()
		if err != nil {
			return err
		}
		a := s.begin(permit, poll, nil)
		err = s.openOnce(a)
		if err == nil {
			return nil
		}
		a.collect()
		d, notSent := s.judge(a, err, s.fixed())
		s.settle(d, notSent)
		if err := s.next(d); err != nil {
			return err
		}
		poll = d.Poll
	}
}

// openOnce opens one attempt and makes it the current one. A panic of an inner
// interceptor passes through, and takes nothing with it.
func (s *clientStream) openOnce(a *attempt) error {
	returned := false
	defer func() {
		if !returned {
			s.abandon(a)
		}
	}()
	inner, err := s.streamer(a.ctx, s.desc, s.cc, s.method.full, a.opts...)
	if err == nil {
		err = s.startReplay(&innerStream{ClientStream: inner, attempt: a})
	}
	returned = true
	return err
}

// fixed reports whether the attempt cannot be replaced, for a reason that lies
// in what went over the stream. The caller is busy.
func (s *clientStream) fixed() bool { return s.committed || s.overflow }

// replace judges a failed attempt and opens the next. Its error is the call's,
// and has ended it. The caller is busy, and is not any more afterwards.
func (s *clientStream) replace(in *innerStream, err error) error {
	returned := false
	defer s.endOnPanic(&returned)
	in.attempt.collect()
	d, notSent := s.judge(in.attempt, err, s.fixed())
	s.settle(d, notSent)
	err = s.next(d)
	if err == nil {
		err = s.connect(d.Poll)
	}
	returned = true
	if err != nil {
		s.end(err)
		return err
	}
	s.giveUpTurn()
	return nil
}

// fail ends the stream with an error that this side made of a message. The
// caller is busy, and is not any more afterwards.
func (s *clientStream) fail(in *innerStream, err error) error {
	returned := false
	defer s.endOnPanic(&returned)
	in.attempt.collect()
	d, notSent := s.judgeAs(in.attempt, err, true, true)
	s.settle(d, notSent)
	err = s.next(d) // a local refusal is final, and so is a caller who is gone
	returned = true
	s.end(err)
	return err
}

// complete ends the stream with success. The caller is busy, and is not any
// more afterwards.
func (s *clientStream) complete(in *innerStream) {
	returned := false
	defer s.endOnPanic(&returned)
	in.attempt.collect()
	s.succeed(in.attempt)
	s.user.deliver(in.attempt)
	s.finish(NotStopped, nil, int(s.total))
	returned = true
	s.end(io.EOF)
}

// end is the last thing that happens to a stream. Later calls get the same
// result. The caller is busy.
func (s *clientStream) end(err error) {
	s.mu.Lock()
	s.ended, s.endErr, s.decided = true, err, s.decider(err)
	s.over.Store(true)
	s.busy = false
	s.settleLocked()
	lost := s.lost
	s.mu.Unlock()

	for _, t := range []*time.Timer{s.idle, lost} {
		if t != nil {
			t.Stop()
		}
	}
	if s.unwatch != nil {
		s.unwatch()
	}
	s.abort()
	if s.cancel != nil {
		s.cancel()
	}
	// Last, and with nothing held: it is the application's, and may use the stream.
	if errors.Is(err, io.EOF) {
		err = nil
	}
	s.user.finish(err)
}

// decider returns the attempt whose header and trailer belong to the stream's
// end. There is none when the last attempt was not opened, or when the context
// ended between two.
func (s *clientStream) decider(err error) *innerStream {
	in := s.current.Load()
	if in == nil || errors.Is(err, io.EOF) {
		return in
	}
	if s.failed == nil || s.last != in.attempt {
		return nil
	}
	return in
}

// commitLocked is the point of no return: the application has seen something.
// Nobody is busy, or the caller is.
func (s *clientStream) commitLocked() {
	if s.committed {
		return
	}
	s.committed = true
	s.seen.Store(true)
	s.settleLocked()
	s.current.Load().attempt.answer()
	if s.paid {
		// The retry has worked; a stream may go on for days, and must not hold
		// a place in the bank for so long.
		s.paid = false
		s.bank.Refund()
	}
	spanEvent(s.span, "committed")
}

// settleLocked gives up the means to replace the attempt.
func (s *clientStream) settleLocked() {
	s.buffer.release()
	s.settled.Store(true)
	s.turn.Broadcast()
}

// streamHandle is what the application holds. Nothing of the stream refers to
// it, so that its collection tells that the application has dropped the stream.
type streamHandle struct{ s *clientStream }

func (h *streamHandle) Header() (metadata.MD, error) {
	md, err := h.s.Header()
	runtime.KeepAlive(h)
	return md, err
}

func (h *streamHandle) SendMsg(m any) error {
	err := h.s.SendMsg(m)
	runtime.KeepAlive(h)
	return err
}

func (h *streamHandle) RecvMsg(m any) error {
	err := h.s.RecvMsg(m)
	runtime.KeepAlive(h)
	return err
}

func (h *streamHandle) CloseSend() error {
	err := h.s.CloseSend()
	runtime.KeepAlive(h)
	return err
}

func (h *streamHandle) Trailer() metadata.MD     { return h.s.Trailer() }
func (h *streamHandle) Context() context.Context { return h.s.Context() }
