package interceptors

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// maxChannelReplay bounds what all streams of one channel keep together.
const maxChannelReplay = 16 << 20

// maxReplayMessages bounds the messages of one stream: many empty ones weigh
// nothing by their bytes.
const maxReplayMessages = 1024

// replayBuffer is what one stream has sent and may have to send again.
type replayBuffer struct {
	limit    int
	channel  *atomic.Int64 // bytes of all buffers of the channel
	messages []any
	bytes    int
}

// add keeps a copy of a message, so that an application which uses its message
// again cannot change what is replayed. It reports false, and keeps nothing,
// when there is no room, or for messages that it cannot copy.
func (b *replayBuffer) add(m any) bool {
	msg, ok := m.(proto.Message)
	if !ok {
		return false
	}
	size := proto.Size(msg)
	if b.bytes+size > b.limit || len(b.messages) >= maxReplayMessages {
		return false
	}
	if b.channel.Add(int64(size)) > maxChannelReplay {
		b.channel.Add(-int64(size))
		return false
	}
	b.messages = append(b.messages, proto.Clone(msg))
	b.bytes += size
	return true
}

// release forgets everything.
func (b *replayBuffer) release() {
	if b.bytes > 0 {
		b.channel.Add(-int64(b.bytes))
	}
	b.messages, b.bytes = nil, 0
}

// startReplay makes an attempt the current one and sends it what was sent
// before. The caller is busy.
//
// Where the client streams, that is done beside the application and not before
// it goes on: a server that answers as it reads stops reading when nobody takes
// its answers, and a replay of more than the windows hold would wait for ever
// for a RecvMsg that waits for it. SendMsg waits until the replay is through.
func (s *clientStream) startReplay(in *innerStream) error {
	s.mu.Lock()
	messages, closed := s.buffer.messages, s.closed
	in.replaying.Store(len(messages) > 0 || closed)
	s.current.Store(in)
	s.mu.Unlock()
	s.touch()
	switch {
	case !in.replaying.Load():
		return nil
	case s.desc.ClientStreams && len(messages) > 0:
		go func() {
			err := in.resendRecovered(messages, closed)
			s.replayed(in)
			if err != nil {
				s.replayFailed(in, err)
			}
		}()
		return nil
	}
	defer s.replayed(in)
	return in.resend(messages, closed)
}

// resend sends messages again. That the attempt has ended meanwhile is no error
// here: RecvMsg, or the next SendMsg, will learn how.
func (in *innerStream) resend(messages []any, closed bool) error {
	for _, m := range messages {
		if err := in.SendMsg(m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if in.attempt.stream.timer != nil {
			in.attempt.stream.progress()
		}
	}
	if closed {
		return in.CloseSend()
	}
	return nil
}

// resendRecovered is resend on a goroutine of ours, where a panic of an inner
// interceptor could not be recovered by the application whose call it is.
func (in *innerStream) resendRecovered(messages []any, closed bool) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.Error(codes.Internal, fmt.Sprintf("belay: an inner interceptor panicked in SendMsg: %v", p))
		}
	}()
	return in.resend(messages, closed)
}

func (s *clientStream) replayed(in *innerStream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	in.replaying.Store(false)
	s.turn.Broadcast()
}

// replayFailed is sendFailed for an error that a replay met. An attempt that was
// replaced meanwhile is nobody's business any more.
func (s *clientStream) replayFailed(in *innerStream, err error) {
	s.mu.Lock()
	if !s.takeTurnLocked() {
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	if s.current.Load() != in {
		s.giveUpTurn()
		return
	}
	_ = s.fail(in, err) // kept: RecvMsg will return it
}
