package probe

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// Attempt is one call of the innermost invoker or streamer.
type Attempt struct {
	// Method is the full name.
	Method string

	// When is the time at which the attempt began.
	When time.Time

	// Left is the time from When to the deadline in the attempt's context. Zero
	// and meaningless without HasDeadline.
	Left        time.Duration
	HasDeadline bool

	// Metadata is the outgoing metadata; a copy.
	Metadata metadata.MD

	// Ended is set once the attempt has ended: a stream by its last message, its
	// error or its context, not by being opened. Took and Err have no meaning
	// before.
	Ended bool
	Took  time.Duration
	Err   error
}

// Counter counts attempts. Its interceptors go LAST in the client's chain, so
// that they see what the wire would. The zero value is ready. Safe for
// concurrent use; one Counter may serve several channels.
type Counter struct {
	mu       sync.Mutex
	attempts []*Attempt
}

// DialOptions returns the counter as the last options of a channel.
func (c *Counter) DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(c.Unary()),
		grpc.WithChainStreamInterceptor(c.Stream()),
	}
}

// Unary returns the interceptor for unary calls.
func (c *Counter) Unary() grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		a := c.begin(ctx, method)
		err := invoke(ctx, method, req, reply, cc, opts...)
		c.end(a, err)
		return err
	}
}

// Stream returns the interceptor for streams.
func (c *Counter) Stream() grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		a := c.begin(ctx, method)
		// A stream's end is told by OnFinish alone: the caller may never read to
		// it. grpc calls it for a stream that could not be opened as well.
		opts = append(slices.Clip(opts), grpc.OnFinish(func(err error) { c.end(a, err) }))
		return streamer(ctx, desc, cc, method, opts...)
	}
}

func (c *Counter) begin(ctx context.Context, method string) *Attempt {
	a := &Attempt{Method: method, When: time.Now()}
	if deadline, ok := ctx.Deadline(); ok {
		a.Left, a.HasDeadline = deadline.Sub(a.When), true
	}
	if md, ok := metadata.FromOutgoingContext(ctx); ok {
		a.Metadata = md
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts = append(c.attempts, a)
	return a
}

func (c *Counter) end(a *Attempt, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a.Ended, a.Took, a.Err = true, time.Since(a.When), err
}

// Count returns how many attempts were begun.
func (c *Counter) Count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.attempts)
}

// Attempts returns the attempts so far in the order they began.
func (c *Counter) Attempts() []Attempt {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]Attempt, 0, len(c.attempts))
	for _, a := range c.attempts {
		all = append(all, *a)
	}
	return all
}

// Reset forgets the attempts so far.
func (c *Counter) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts = nil
}
