package probe

import (
	"context"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// LostReply is the message of the UNAVAILABLE that stands for a lost reply.
const LostReply = "probe: the reply was lost"

// lossKey finds, in a handler's context, the mark by which a step asks for its
// reply to be lost.
type lossKey struct{}

// LoseReplies returns the interceptors that make [Step].LoseReply work. They go
// first in the server's chain, outside of any dedupe: what is lost is the
// reply, after everything inside was sure that it had answered. [Start]
// installs them.
//
// Metadata that the layers inside have set stays: a server cannot take it back.
func LoseReplies() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			lost := new(atomic.Bool)
			resp, err := next(context.WithValue(ctx, lossKey{}, lost), req)
			if lost.Load() {
				return nil, status.Error(codes.Unavailable, LostReply)
			}
			return resp, err
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			lost := new(atomic.Bool)
			err := next(srv, &lossyStream{stream, context.WithValue(stream.Context(), lossKey{}, lost)})
			if lost.Load() {
				return status.Error(codes.Unavailable, LostReply)
			}
			return err
		}),
	}
}

type lossyStream struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // the stream's own, as gRPC hands it out
}

func (s *lossyStream) Context() context.Context { return s.ctx }

// loseReply asks for the reply of the handler with this context to be lost.
func loseReply(ctx context.Context) error {
	lost, ok := ctx.Value(lossKey{}).(*atomic.Bool)
	if !ok {
		return status.Error(codes.Internal, "probe: a step has LoseReply and the server has no LoseReplies interceptors")
	}
	lost.Store(true)
	return nil
}

// panics is the panics that left a server's chain of interceptors.
type panics struct {
	mu     sync.Mutex
	values []any
}

func (p *panics) all() []any {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]any(nil), p.values...)
}

// serverOptions returns the outermost interceptors, which turn a panic into
// INTERNAL. Without them a scripted panic would take the test's process down.
func (p *panics) serverOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (_ any, err error) {
			defer p.recoverInto(&err)
			return next(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
			defer p.recoverInto(&err)
			return next(srv, stream)
		}),
	}
}

func (p *panics) recoverInto(err *error) {
	value := recover()
	if value == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.values = append(p.values, value)
	*err = status.Errorf(codes.Internal, "probe: the server panicked: %v", value)
}
