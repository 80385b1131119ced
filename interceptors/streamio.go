package interceptors

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/emptypb"
)

// RecvMsg returns the next message. A failed attempt is replaced while the
// application has seen nothing.
func (s *clientStream) RecvMsg(m any) error {
	for first := true; ; first = false {
		if !first {
			reset(m)
		}
		if s.settled.Load() {
			return s.recvSettled(m)
		}
		if done, err := s.recvReplaceable(m); done {
			return err
		}
	}
}

// recvReplaceable is RecvMsg on an attempt that could be replaced. It reports
// false when the attempt was, and RecvMsg is to be called anew.
func (s *clientStream) recvReplaceable(m any) (done bool, _ error) {
	s.mu.Lock()
	for s.busy && !s.ended {
		s.turn.Wait()
	}
	if s.ended {
		defer s.mu.Unlock()
		return true, s.endErr
	}
	in := s.current.Load()
	s.receiving = true
	s.mu.Unlock()

	returned := false
	defer func() {
		if !returned { // a panic of an inner interceptor, on its way to the application
			s.stopReceiving()
		}
	}()
	err := in.RecvMsg(m)
	returned = true
	s.touch()
	return s.received(in, err)
}

func (s *clientStream) stopReceiving() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.receiving = false
	s.turn.Broadcast()
}

// received is what the result of recvReplaceable's RecvMsg means. Nobody can
// have replaced the attempt: who else learns of its end waits for receiving.
func (s *clientStream) received(in *innerStream, err error) (done bool, _ error) {
	s.mu.Lock()
	taken := s.takeTurnLocked()
	s.receiving = false
	s.turn.Broadcast()
	switch {
	case !taken:
		defer s.mu.Unlock()
		return true, s.resultLocked(err)
	case err == nil:
		s.commitLocked()
		if s.desc.ServerStreams {
			s.busy = false
			s.mu.Unlock()
			return true, nil
		}
	}
	s.mu.Unlock()
	switch {
	case err == nil: // one answer, and gRPC has read the status behind it
		s.complete(in)
		return true, nil
	case errors.Is(err, io.EOF):
		s.complete(in)
		return true, io.EOF
	}
	err = s.replace(in, err)
	return err != nil, err
}

// resultLocked is what RecvMsg returns on a stream that somebody else has ended
// while it was in the attempt's RecvMsg: the same end, seen by two.
func (s *clientStream) resultLocked(err error) error {
	if err == nil && errors.Is(s.endErr, io.EOF) {
		return nil
	}
	return s.endErr
}

// recvSettled is RecvMsg on a stream whose attempt stays. This is the path of
// every message of a long stream.
func (s *clientStream) recvSettled(m any) error {
	if s.over.Load() { // of which gRPC may still have messages
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.endErr
	}
	in := s.current.Load()
	err := in.RecvMsg(m)
	if err == nil && s.desc.ServerStreams {
		s.touch()
		if !s.seen.Load() {
			s.commit()
		}
		return nil
	}
	s.mu.Lock()
	if !s.takeTurnLocked() {
		defer s.mu.Unlock()
		return s.resultLocked(err)
	}
	if err == nil {
		s.commitLocked()
	}
	s.mu.Unlock()
	switch {
	case err == nil:
		s.complete(in)
		return nil
	case errors.Is(err, io.EOF):
		s.complete(in)
		return io.EOF
	}
	return s.replace(in, err) // which, settled, is never nil
}

// commit is for a stream that was settled before its first message.
func (s *clientStream) commit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.takeTurnLocked() {
		s.commitLocked()
		s.busy = false
		s.turn.Broadcast()
	}
}

// SendMsg keeps the message for a replay, while one is possible, and sends it.
func (s *clientStream) SendMsg(m any) error {
	s.touch()
	in := s.keep(m)
	if in == nil {
		return io.EOF // ended: RecvMsg says how
	}
	err := in.SendMsg(m)
	switch {
	case err == nil:
		if in.attempt.stream.timer != nil && !s.seen.Load() {
			in.attempt.stream.progress()
		}
		return nil
	case !errors.Is(err, io.EOF):
		return s.sendFailed(err)
	}
	return s.sendOnto(in)
}

// keep puts a message into the buffer and returns the attempt to send it on;
// nil when the stream has ended.
func (s *clientStream) keep(m any) *innerStream {
	if s.over.Load() {
		return nil
	}
	if s.settled.Load() {
		if in := s.current.Load(); !in.replaying.Load() {
			return in
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.awaitSendLocked() {
		return nil
	}
	// A message too many is an error that the attempt knows of.
	if !s.settled.Load() && !s.sentAll && !s.buffer.add(m) {
		s.overflow = true
		spanEvent(s.span, "replay buffer full")
		s.settleLocked()
	}
	s.sentAll = s.sentAll || !s.desc.ClientStreams
	return s.current.Load()
}

// awaitSendLocked waits until the application may send: what was sent before is
// sent again first. It reports false when the stream has ended.
func (s *clientStream) awaitSendLocked() bool {
	for !s.ended && (s.busy || s.current.Load().replaying.Load()) {
		s.turn.Wait()
	}
	return !s.ended
}

// sendFailed ends the stream on an error that this side made of a message. gRPC
// has ended the attempt already.
func (s *clientStream) sendFailed(err error) error {
	s.mu.Lock()
	taken := s.takeTurnLocked()
	s.mu.Unlock()
	if !taken {
		return err
	}
	return s.fail(s.current.Load(), err)
}

// sendOnto is for a SendMsg whose attempt has ended. It returns nil when the
// message is, or will be, sent on another one, and io.EOF when RecvMsg has the
// last word.
func (s *clientStream) sendOnto(in *innerStream) error {
	s.mu.Lock()
	for !s.ended && !s.settled.Load() && s.current.Load() == in && (s.busy || s.receiving) {
		s.turn.Wait() // who is busy, or in RecvMsg, is about to learn the same
	}
	switch {
	case s.ended:
		s.mu.Unlock()
		return io.EOF
	case s.current.Load() != in:
		s.mu.Unlock()
		return nil // the replay has it
	case s.settled.Load():
		s.mu.Unlock()
		return io.EOF
	}
	s.busy = true
	s.mu.Unlock()

	header, err := in.Header()
	if header != nil {
		return s.sendToTheDead(in)
	}
	if s.learn(in, err) != nil {
		return io.EOF
	}
	return nil
}

// sendToTheDead is for a SendMsg whose attempt has ended with something to
// receive before its status, and only RecvMsg knows the type of that. The
// message is kept in case that a failure follows, so to the application it was
// sent; but not for long, or one that only sends would never be told. The caller
// is busy, and is not any more afterwards.
func (s *clientStream) sendToTheDead(in *innerStream) error {
	defer s.giveUpTurn()
	now := s.elapsed() + 1 // 0 is never
	if in.deadSince == 0 {
		in.deadSince = now
	}
	if now-in.deadSince < deadFor {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.overflow = true
	s.settleLocked()
	return io.EOF
}

// deadFor is how long messages are taken for an attempt that is known to have
// ended.
const deadFor = time.Second

// learn finds out how an attempt ended that has no header, and does what follows
// from it: nil means another attempt is open. Such an attempt has only a status,
// which RecvMsg returns without ever decoding into its argument. The caller is
// busy, and is not any more afterwards.
func (s *clientStream) learn(in *innerStream, err error) error {
	if err == nil {
		err = in.RecvMsg(&emptypb.Empty{})
	}
	if err == nil || errors.Is(err, io.EOF) {
		s.complete(in)
		return io.EOF
	}
	return s.replace(in, err)
}

// CloseSend says that no more is sent, to this attempt and to those after it.
func (s *clientStream) CloseSend() error {
	s.mu.Lock()
	if !s.awaitSendLocked() || s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed, s.sentAll = true, true
	in := s.current.Load()
	s.mu.Unlock()
	err := in.CloseSend()
	if in.attempt.stream.timer != nil && !s.seen.Load() {
		in.attempt.stream.progress()
	}
	return err
}

// Header returns the header of the attempt that stays. It drives a retry, like
// RecvMsg, and what it returns commits. A stream that failed has none; RecvMsg
// says why.
func (s *clientStream) Header() (metadata.MD, error) {
	for {
		in := s.current.Load()
		md, err := in.Header()
		if done, md, err := s.headed(in, md, err); done {
			return md, err
		}
	}
}

// headed is what the result of an attempt's Header means. It reports false when
// the attempt was replaced and Header is to be called anew.
func (s *clientStream) headed(in *innerStream, md metadata.MD, err error) (done bool, _ metadata.MD, _ error) {
	s.mu.Lock()
	for !s.ended && s.current.Load() == in && (s.busy || md == nil && s.receiving) {
		s.turn.Wait()
	}
	switch {
	case s.ended:
		defer s.mu.Unlock()
		if s.decided != in { // an attempt that is not the one RecvMsg speaks of
			return true, nil, nil
		}
		return true, md, err
	case s.current.Load() != in:
		s.mu.Unlock()
		return false, nil, nil
	case md != nil:
		defer s.mu.Unlock()
		s.commitLocked()
		return true, md, nil
	case s.settled.Load():
		// Its status is RecvMsg's to read, which may be doing so. Whoever calls
		// neither that nor anything else is noticed by his context.
		s.mu.Unlock()
		return true, nil, err
	}
	s.busy = true
	s.mu.Unlock()
	if s.learn(in, err) != nil {
		return true, nil, nil
	}
	return false, nil, nil
}

// Trailer returns the deciding attempt's trailer once the stream has ended, and
// nil before: gRPC says to ask when RecvMsg has returned an error.
func (s *clientStream) Trailer() metadata.MD {
	s.mu.Lock()
	in := s.decided
	s.mu.Unlock()
	if in == nil {
		return nil
	}
	return in.Trailer()
}

// Context returns the call's own context. The inner stream's is never asked
// for: gRPC would take that as the application's commitment.
func (s *clientStream) Context() context.Context { return s.ctx }
