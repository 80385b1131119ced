package interceptors

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors/policy"
)

// streamAttempt is what an attempt of a stream has besides. Unlike a unary
// attempt it can be judged while gRPC still works on it: an inner interceptor
// may fail a message of a stream that is alive.
type streamAttempt struct {
	owner *clientStream

	// What gRPC writes. It may be read once finished is set, and not before.
	header, trailer metadata.MD
	peer            peer.Peer
	endErr          error
	finished        atomic.Bool

	kill     context.CancelCauseFunc
	timer    *time.Timer  // bounds the wait for the first response; nil without AttemptTimeout
	moved    atomic.Int64 // when a message last went, as a time since the call began
	timedOut atomic.Bool
	cut      bool          // it was its own time that ended it
	answered time.Duration // how long the first response took; 0 before it
}

func (s *streamAttempt) onFinish(err error) {
	s.endErr = err
	s.finished.Store(true)
	s.owner.attemptFinished()
}

// collect takes over what gRPC has written. Where gRPC is not done with the
// attempt nothing is known of it, which is what a missing trailer means too.
func (a *attempt) collect() {
	if s := a.stream; s.finished.Load() {
		a.header, a.trailer, a.peer = s.header, s.trailer, s.peer
		a.finishes.Store(1)
	}
}

// boundStream gives a stream's attempt its time. A deadline would cut a healthy
// stream off, so the time until the first response is a timer's, and the
// context is the attempt's to cancel.
func (a *attempt) boundStream() {
	s := a.stream
	ctx, kill := context.WithCancelCause(a.ctx)
	a.ctx, a.cancel, s.kill = ctx, func() { kill(nil) }, kill
	if a.timeout == 0 {
		return
	}
	s.progress()
	limit := a.timeout
	// Set for good before it can fire: the function moves its own timer.
	s.timer = time.AfterFunc(policy.Unlimited, func() {
		if ctx.Err() != nil {
			return
		}
		// What is bounded is the wait. While the application sends, and the
		// server takes it, nobody waits: an upload is not slow for being long.
		if waited := s.owner.elapsed() - time.Duration(s.moved.Load()); waited < limit {
			s.timer.Reset(limit - waited)
			return
		}
		s.expire(errAttemptTimeout)
	})
	s.timer.Reset(limit)
}

// progress notes that a message went, which starts the wait for the first
// response anew.
func (s *streamAttempt) progress() { s.moved.Store(int64(s.owner.elapsed())) }

// expire ends the attempt because its time is over.
func (s *streamAttempt) expire(cause error) {
	s.timedOut.Store(true)
	s.kill(cause)
}

// answer notes the first response: the wait for it is over.
func (a *attempt) answer() {
	if a.stream.timer != nil {
		a.stream.timer.Stop()
	}
	a.stream.answered = time.Since(a.start)
}

// translate gives the end of a stream's attempt by its own clock the code that
// it has for a unary call: gRPC only sees a context that was cancelled. Where
// something else ended the attempt in the same moment, that is what counts.
func (a *attempt) translate(err error) error {
	if a.stream == nil || !a.stream.timedOut.Load() || status.Code(err) != codes.Canceled {
		return err
	}
	a.stream.cut = true
	return status.Error(codes.DeadlineExceeded, context.Cause(a.ctx).Error())
}
