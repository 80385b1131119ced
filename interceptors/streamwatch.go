package interceptors

import (
	"bytes"
	"errors"
	"runtime"
	"time"

	"google.golang.org/grpc/connectivity"

	"github.com/belayrpc/belay/interceptors/policy"
)

// An application may never ask a stream how it ended. What the stream holds
// (spans, a breaker's permit, a place in the bank) is given back all the same
// when the call's context ends, when the channel is closed, and when the
// attempt of a settled stream has run out of time.

// attemptFinished is told by gRPC that an attempt is over. Mostly the
// application hears it first.
func (s *clientStream) attemptFinished() {
	if s.isAbandoned() {
		go s.conclude() // not here: this may be the goroutine that is busy
	}
}

// isAbandoned reports whether the end of an attempt is the end of the stream,
// whoever asks.
func (s *clientStream) isAbandoned() bool {
	if s.ctx.Err() != nil || s.cc != nil && s.cc.GetState() == connectivity.Shutdown {
		return true
	}
	in := s.current.Load()
	return in != nil && s.settled.Load() && in.attempt.stream.timedOut.Load()
}

// contextEnded is told that the call's context has ended. gRPC ends the attempt
// for the same reason, and mostly a little later.
func (s *clientStream) contextEnded() {
	s.conclude()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		// An inner interceptor may have made a stream of its own, of which gRPC
		// never says that it is over.
		s.lost = time.AfterFunc(lostAfter, s.giveUp)
	}
}

// lostAfter is how long gRPC may take to end an attempt whose context has.
const lostAfter = time.Second

// conclude ends an abandoned stream by gRPC's word about its attempt. Where the
// application hears the same word at the same time it does not matter who is
// first. An attempt that is not over yet will say so: attemptFinished.
func (s *clientStream) conclude() {
	s.mu.Lock()
	if !s.takeTurnLocked() {
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	in := s.current.Load()
	switch {
	case in == nil || !in.attempt.stream.finished.Load() || !s.isAbandoned():
		s.giveUpTurn()
	case in.attempt.stream.endErr == nil:
		s.complete(in)
	default:
		s.off = true                                // nobody is there for another attempt
		_ = s.replace(in, in.attempt.stream.endErr) // kept: RecvMsg will return it
	}
}

// giveUp ends a stream whose context ended and whose attempt does not.
func (s *clientStream) giveUp() {
	s.mu.Lock()
	if !s.takeTurnLocked() {
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	_ = s.replace(s.current.Load(), statusOfContext(s.ctx).Err()) // kept: RecvMsg will return it
}

func (s *clientStream) elapsed() time.Duration { return time.Since(s.first.start) }

// touch notes that a message goes or came.
func (s *clientStream) touch() {
	if s.idle != nil {
		s.active.Store(int64(s.elapsed()))
	}
}

var errIdle = errors.New("belay: no message within the policy's MaxIdle")

// watchIdle ends an attempt on which no message went or came for MaxIdle. The
// timer is not moved by each message; it looks how long ago the last one was.
func (s *clientStream) watchIdle() {
	limit := s.rules.MaxIdle
	if limit == policy.Unlimited {
		return
	}
	// Set for good before it can fire: the function moves its own timer.
	s.active.Store(int64(s.elapsed()))
	s.idle = time.AfterFunc(policy.Unlimited, func() {
		quiet := s.elapsed() - time.Duration(s.active.Load())
		s.mu.Lock()
		in := s.current.Load()
		next := limit - quiet
		if s.busy || next <= 0 {
			next = limit
		}
		expired := !s.ended && !s.busy && quiet >= limit
		if !s.ended {
			s.idle.Reset(next)
		}
		s.mu.Unlock()
		if expired {
			in.attempt.stream.expire(errIdle)
		}
	})
	s.idle.Reset(limit)
}

// inBubble reports whether the caller runs in a bubble of testing/synctest.
//
// The runtime runs cleanups outside of every bubble, and closing a bubble's
// channel from there, as the cancelling of a context does, ends the process. So
// there is no cleanup for streams that are made in a bubble; one that is dropped
// there lives until its context ends, as without Belay. Only a clock that reads
// like a bubble's, which begin in the year 2000, is worth looking at the stack.
func inBubble() bool {
	if time.Now().Year() >= 2020 {
		return false
	}
	var stack [128]byte
	first, _, _ := bytes.Cut(stack[:runtime.Stack(stack[:], false)], []byte("\n"))
	return bytes.Contains(first, []byte("synctest bubble"))
}
