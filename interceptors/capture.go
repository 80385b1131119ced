package interceptors

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/idempotency"
)

// capture records the response metadata that a handler sets, for replays. It
// stands between the handler and gRPC's stream only where an allow list asks
// for it: gRPC's SetSendCompressor needs its own stream to be the outermost. A
// nil capture records nothing.
type capture struct {
	grpc.ServerTransportStream

	mu              sync.Mutex // guards all below
	header, trailer metadata.MD
}

func captureFor(ctx context.Context, engine *idempotency.Engine) *capture {
	if len(engine.Config().ReplayMetadata) == 0 {
		return nil
	}
	stream := grpc.ServerTransportStreamFromContext(ctx)
	if stream == nil {
		return nil
	}
	return &capture{ServerTransportStream: stream}
}

func (c *capture) context(ctx context.Context) context.Context {
	if c == nil {
		return ctx
	}
	return grpc.NewContextWithServerTransportStream(ctx, c)
}

// SetHeader implements [grpc.ServerTransportStream].
func (c *capture) SetHeader(md metadata.MD) error {
	c.keep(&c.header, md)
	return c.ServerTransportStream.SetHeader(md)
}

// SendHeader implements [grpc.ServerTransportStream].
func (c *capture) SendHeader(md metadata.MD) error {
	c.keep(&c.header, md)
	return c.ServerTransportStream.SendHeader(md)
}

// SetTrailer implements [grpc.ServerTransportStream].
func (c *capture) SetTrailer(md metadata.MD) error {
	c.keep(&c.trailer, md)
	return c.ServerTransportStream.SetTrailer(md)
}

func (c *capture) keep(into *metadata.MD, md metadata.MD) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*into = metadata.Join(*into, md)
}

// result is what the handler returned, in the engine's terms.
func (c *capture) result(resp any, err error) idempotency.Result {
	r := idempotency.Result{Err: err}
	if err != nil {
		r.Status = statusOf(err).Proto()
	} else {
		r.Response, _ = resp.(proto.Message)
	}
	if c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		r.Header, r.Trailer = idempotency.Metadata(c.header), idempotency.Metadata(c.trailer)
	}
	return r
}
