package interceptors

import (
	"sync/atomic"

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
