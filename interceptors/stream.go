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
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/belayrpc/belay/interceptors/policy"
)

// clientStream is one logical streaming call over any number of attempts.
//
// Until the application has seen something (a message or a header) the stream
// is not committed: what was sent is kept, and a failed attempt is replaced by a
// new one to which it is sent again. From then on, and from the moment that
// more was sent than may be kept, errors are the application's.
//
// Who may do what. gRPC allows one goroutine in SendMsg and one in RecvMsg, at
// the same time. Calls into an attempt's own stream are made without mu, since
// they block on flow control, which only the other goroutine may be able to
// relieve. Everything else (the buffer, which attempt is the current one, the
// verdict on a failed one, the replay) happens under mu. A message is kept
// before it is sent, so an attempt that is replaced meanwhile has been sent it
// by the replay.
//
// Only one goroutine may learn an attempt's status. While the application is in
// RecvMsg it is that one, and the others wait on turn.
type clientStream struct {
	*call
	desc     *grpc.StreamDesc
	streamer grpc.Streamer

	// settled is set when no attempt will be replaced any more: the stream is
	// committed, or more was sent than may be kept. It never goes back, so after
	// it neither mu nor the buffer is touched by a message.
	settled atomic.Bool
	current atomic.Pointer[innerStream] // nil only before the first attempt opened
	seen    atomic.Bool                 // mirrors committed
	over    atomic.Bool                 // mirrors ended, for who must not take mu
	active  atomic.Int64                // when a message last went or came; see MaxIdle

	mu        sync.Mutex // guards all below, and call
	turn      sync.Cond  // on mu: current, receiving, settled or ended changed
	receiving bool       // the application is in RecvMsg of current
	committed bool       // the application has seen something
	buffer    replayBuffer
	closed    bool // CloseSend was called
	ended     bool
	endErr    error // what RecvMsg returns from now on; io.EOF after success
	idle      *time.Timer
}

// innerStream is an attempt that was opened.
type innerStream struct {
	grpc.ClientStream
	attempt *attempt
}

// Stream returns the interceptor for streaming calls, for programs that build
// their own chain; see [Client.Unary].
//
// A stream is retried until the application has seen a message or a header of
// it. What a client sends is kept for that up to Policy.ReplayBytes; a stream
// that sends more goes on without retries, and none is ever refused because it
// cannot be retried.
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
		s.call.stream = s
		return s.open(ctx, set, opts)
	}
}

// open prepares the call and opens the first attempt that can be.
func (s *clientStream) open(ctx context.Context, set *policySet, opts []grpc.CallOption) (grpc.ClientStream, error) {
	// The call's own cancel ends whatever attempt is current, however the
	// application comes to be rid of the stream.
	ctx, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.abort = cancel
	err := s.call.open(ctx, set, nil, opts)
	if err == nil {
		s.buffer.limit = s.rules.ReplayBytes
		s.buffer.channel = &s.channel.replay
		err = s.openLocked(false)
	}
	if err != nil {
		s.endLocked(err)
		return nil, err
	}
	s.watchIdleLocked()
	h := &streamHandle{s}
	// The application may drop a stream without ending it in any way that gRPC
	// asks for. What is left then ends with the handle.
	runtime.AddCleanup(h, func(abort context.CancelFunc) { abort() }, s.abort)
	return h, nil
}

// openLocked makes attempts until one is open, with all that was sent so far
// sent again; or returns the call's error.
func (s *clientStream) openLocked(poll bool) error {
	for {
		if err := s.admit(); err != nil {
			return err
		}
		a := s.begin(poll)
		err := s.openOnce(a)
		if err == nil {
			return nil
		}
		d, notSent := s.judge(a, err, s.settled.Load())
		s.last = a
		s.settle(d, notSent)
		if err := s.next(d); err != nil {
			return err
		}
		poll = d.Poll
	}
}

// openOnce opens one attempt and replays. A panic of an inner interceptor
// passes through, and takes nothing with it.
func (s *clientStream) openOnce(a *attempt) error {
	returned := false
	defer func() {
		if !returned {
			s.abandon(a)
		}
	}()
	inner, err := s.streamer(a.ctx, s.desc, s.cc, s.method.full, a.opts...)
	returned = true
	if err != nil {
		return err
	}
	in := &innerStream{inner, a}
	s.current.Store(in)
	s.turn.Broadcast()
	return s.replayLocked(in)
}

// replayLocked sends again what was sent. An attempt that ends meanwhile and
// has nothing to say but its status has failed like one that did not open.
func (s *clientStream) replayLocked(in *innerStream) error {
	for _, m := range s.buffer.messages {
		err := in.SendMsg(m)
		switch {
		case errors.Is(err, io.EOF):
			st, spoke := in.learn()
			if spoke {
				return nil // RecvMsg will find what it said
			}
			return st
		case err != nil:
			return err
		}
	}
	if s.closed {
		return in.CloseSend()
	}
	return nil
}

// learn finds out how an attempt ended on which SendMsg said io.EOF. An attempt
// without a header has only a status, which RecvMsg then returns without ever
// decoding into its argument; one with a header may have messages to deliver,
// and nothing may be taken out of it here.
func (in *innerStream) learn() (status error, spoke bool) {
	header, err := in.Header()
	if header != nil {
		return nil, true
	}
	if err != nil {
		return err, false
	}
	return in.RecvMsg(&emptypb.Empty{}), false
}

// RecvMsg returns the next message. A failed attempt is replaced while the
// application has seen nothing.
func (s *clientStream) RecvMsg(m any) error {
	if s.settled.Load() {
		return s.recvSettled(m)
	}
	for first := true; ; first = false {
		s.mu.Lock()
		if s.ended {
			defer s.mu.Unlock()
			return s.endErr
		}
		in := s.current.Load()
		s.receiving = true
		s.mu.Unlock()
		if !first {
			reset(m)
		}
		err := in.RecvMsg(m)
		if done, err := s.received(in, err); done {
			return err
		}
	}
}

// received is what a RecvMsg of an attempt that could be replaced means. It
// reports false when the attempt was replaced and RecvMsg is to be called anew.
func (s *clientStream) received(in *innerStream, err error) (done bool, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.receiving = false
	defer s.turn.Broadcast()
	switch {
	case s.ended: // the call's context ended, and somebody else saw it first
		return true, s.endErr
	case err == nil:
		s.commitLocked()
		if !s.desc.ServerStreams {
			s.succeedLocked(in) // one answer, and gRPC has read the status behind it
		}
		return true, nil
	case errors.Is(err, io.EOF):
		s.succeedLocked(in)
		return true, io.EOF
	}
	if err := s.replaceLocked(in, err); err != nil {
		return true, err
	}
	return false, nil
}

// recvSettled is RecvMsg on a stream whose attempt stays. This is the path of
// every message of a long stream.
func (s *clientStream) recvSettled(m any) error {
	in := s.current.Load()
	err := in.RecvMsg(m)
	if err == nil && s.desc.ServerStreams {
		if s.idleSet() {
			s.active.Store(int64(time.Since(epoch0)))
		}
		if !s.seen.Load() {
			s.commit()
		}
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended:
		return s.endErr
	case err == nil:
		s.commitLocked()
		s.succeedLocked(in)
		return nil
	case errors.Is(err, io.EOF):
		s.succeedLocked(in)
		return io.EOF
	}
	return s.replaceLocked(in, err) // which, settled, is never nil
}

// commit is for a stream whose buffer overflowed before its first message.
func (s *clientStream) commit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.commitLocked()
	}
}

// replaceLocked judges a failed attempt and opens the next. Its error is the
// call's, and ends it.
func (s *clientStream) replaceLocked(in *innerStream, err error) error {
	d, notSent := s.judge(in.attempt, err, s.settled.Load())
	s.last = in.attempt
	s.settle(d, notSent)
	err = s.next(d)
	if err == nil {
		err = s.openLocked(d.Poll)
	}
	if err != nil {
		s.endLocked(err)
	}
	return err
}

// commitLocked is the point of no return: the application has seen something.
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
		s.bank.Refund()
		s.paid = false
	}
	spanEvent(s.span, "committed")
}

// settleLocked gives up the means to replace the attempt.
func (s *clientStream) settleLocked() {
	s.buffer.release()
	s.settled.Store(true)
	s.turn.Broadcast()
}

func (s *clientStream) succeedLocked(in *innerStream) {
	s.succeed(in.attempt)
	s.options.user.deliver(in.attempt)
	s.finish(NotStopped, nil, s.total)
	s.endLocked(io.EOF)
}

// endLocked is the last thing that happens to a stream, once. Later calls get
// the same result.
func (s *clientStream) endLocked(err error) {
	if s.ended {
		return
	}
	s.ended, s.endErr = true, err
	s.over.Store(true)
	s.settleLocked()
	if s.idle != nil {
		s.idle.Stop()
	}
	s.abort()
	if s.cancel != nil {
		s.cancel()
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	s.options.user.finish(err)
}

// SendMsg keeps the message for a replay, while one is possible, and sends it.
func (s *clientStream) SendMsg(m any) error {
	if s.idleSet() {
		s.active.Store(int64(time.Since(epoch0)))
	}
	in := s.keep(m)
	if in == nil {
		return io.EOF // ended: RecvMsg says how
	}
	err := in.SendMsg(m)
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, io.EOF):
		return s.sendFailed(in, err)
	}
	return s.sendOnto(in)
}

// keep puts a message into the buffer and returns the attempt to send it on;
// nil when the stream has ended.
func (s *clientStream) keep(m any) *innerStream {
	if s.settled.Load() {
		return s.current.Load()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return nil
	}
	if !s.settled.Load() && !s.buffer.add(m) {
		spanEvent(s.span, "replay buffer full")
		s.settleLocked()
	}
	return s.current.Load()
}

// sendFailed ends the stream on an error that this side made: gRPC has ended
// the attempt already.
func (s *clientStream) sendFailed(in *innerStream, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return err
	}
	d, notSent := s.judgeAs(in.attempt, err, s.settled.Load(), true)
	s.last = in.attempt
	s.settle(d, notSent)
	err = s.next(d)
	s.endLocked(err)
	return err
}

// sendOnto is for a SendMsg whose attempt has ended. It returns nil when the
// message is, or will be, sent on another one, and io.EOF when RecvMsg has the
// last word.
func (s *clientStream) sendOnto(in *innerStream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.ended:
			return io.EOF
		case s.current.Load() != in:
			return nil // the replay has sent it
		case s.settled.Load():
			return io.EOF
		case s.receiving:
			s.turn.Wait() // RecvMsg is about to learn the same
			continue
		}
		st, spoke := in.learn()
		if spoke {
			// There may be messages, and only RecvMsg knows their type. This
			// one is kept in case that they are followed by a failure.
			return nil
		}
		if errors.Is(st, io.EOF) {
			s.succeedLocked(in)
			return io.EOF
		}
		if st != nil && s.replaceLocked(in, st) != nil {
			return io.EOF
		}
		return nil
	}
}

// CloseSend says that no more is sent, to this attempt and to those after it.
func (s *clientStream) CloseSend() error {
	s.mu.Lock()
	if s.ended || s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	in := s.current.Load()
	s.mu.Unlock()
	return in.CloseSend()
}

// Header returns the header of the attempt that stays. It drives a retry, like
// RecvMsg, and what it returns commits. A stream that failed has none; RecvMsg
// says why.
func (s *clientStream) Header() (metadata.MD, error) {
	for {
		in := s.current.Load()
		md, err := in.Header()
		s.mu.Lock()
		again, md, err := s.headedLocked(in, md, err)
		s.mu.Unlock()
		if !again {
			return md, err
		}
	}
}

func (s *clientStream) headedLocked(in *innerStream, md metadata.MD, err error) (again bool, _ metadata.MD, _ error) {
	switch {
	case md != nil:
		if !s.ended {
			if s.current.Load() != in {
				return true, nil, nil
			}
			s.commitLocked()
		}
		return false, md, nil
	case s.ended || s.settled.Load():
		return false, nil, err
	case s.current.Load() != in:
		return true, nil, nil
	case s.receiving:
		s.turn.Wait()
		return true, nil, nil
	}
	st := err
	if st == nil {
		st = in.RecvMsg(&emptypb.Empty{}) // without a header there is only a status
	}
	if errors.Is(st, io.EOF) {
		s.succeedLocked(in)
		return false, nil, nil
	}
	if s.replaceLocked(in, st) != nil {
		return false, nil, nil
	}
	return true, nil, nil
}

// Trailer returns the deciding attempt's trailer, after RecvMsg has returned an
// error.
func (s *clientStream) Trailer() metadata.MD {
	if in := s.current.Load(); in != nil {
		return in.Trailer()
	}
	return nil
}

// Context returns the call's own context. The inner stream's is never asked
// for: gRPC would take that as the application's commitment.
func (s *clientStream) Context() context.Context { return s.ctx }

// attemptFinished is told by gRPC that an attempt is over. Mostly the
// application hears it first; but when the call's context ended, or the channel
// was closed, it may never ask again.
func (s *clientStream) attemptFinished(a *attempt) {
	if s.over.Load() {
		return
	}
	if s.ctx.Err() != nil || s.cc != nil && s.cc.GetState() == connectivity.Shutdown {
		// Not here: this may be the goroutine that holds mu.
		go s.reap(a)
	}
}

// reap ends a stream whose application is gone.
func (s *clientStream) reap(a *attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	in := s.current.Load()
	if s.ended || in == nil || in.attempt != a {
		return
	}
	st := status.New(codes.Canceled, "the channel was closed")
	if s.ctx.Err() != nil {
		st = statusOfContext(s.ctx)
	}
	s.off = true // nobody is there for another attempt
	_ = s.replaceLocked(in, st.Err())
}

func (s *clientStream) idleSet() bool { return s.rules.MaxIdle != policy.Unlimited }

// watchIdleLocked ends the stream when no message went or came for MaxIdle. The
// timer is not moved by each message; it looks how long ago the last one was.
func (s *clientStream) watchIdleLocked() {
	if !s.idleSet() {
		return
	}
	limit := s.rules.MaxIdle
	s.active.Store(int64(time.Since(epoch0)))
	s.idle = time.AfterFunc(limit, func() {
		quiet := time.Since(epoch0) - time.Duration(s.active.Load())
		s.mu.Lock()
		defer s.mu.Unlock()
		switch {
		case s.ended:
		case quiet < limit:
			s.idle.Reset(limit - quiet)
		default:
			in := s.current.Load()
			in.attempt.expire(errIdle)
			s.idle.Reset(limit)
		}
	})
}

var errIdle = errors.New("belay: no message within the policy's MaxIdle")

// streamHandle is what the application holds. Nothing of the stream refers to
// it, so that its collection tells that the application has dropped the stream.
type streamHandle struct{ s *clientStream }

func (h *streamHandle) Header() (metadata.MD, error) {
	md, err := h.s.Header()
	runtime.KeepAlive(h)
	return md, err
}

func (h *streamHandle) Trailer() metadata.MD     { return h.s.Trailer() }
func (h *streamHandle) CloseSend() error         { return h.s.CloseSend() }
func (h *streamHandle) Context() context.Context { return h.s.Context() }

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
