package probe

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// handlers is the generated services' side of a Server, kept off its API.
type handlers struct {
	probev1.UnimplementedProbeServiceServer
	probev1.UnimplementedKeyedServiceServer

	server *Server
}

func (h *handlers) Undeclared(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, Undeclared, req)
}

func (h *handlers) Read(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, Read, req)
}

func (h *handlers) Idempotent(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, Idempotent, req)
}

func (h *handlers) Keyed(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, Keyed, req)
}

func (h *handlers) KeyedOptional(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, KeyedOptional, req)
}

func (h *handlers) KeyedField(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, KeyedField, req)
}

func (h *handlers) Inherits(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, Inherits, req)
}

func (h *handlers) Reads(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, Reads, req)
}

func (h *handlers) Exempt(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
	return h.server.runUnary(ctx, Exempt, req)
}

func (h *handlers) ServerStream(req *probev1.Request, stream grpc.ServerStreamingServer[probev1.Response]) error {
	return h.server.runStream(ServerStream, stream, req)
}

func (h *handlers) ServerStreamUndeclared(req *probev1.Request, stream grpc.ServerStreamingServer[probev1.Response]) error {
	return h.server.runStream(ServerStreamUndeclared, stream, req)
}

func (h *handlers) ClientStream(stream grpc.ClientStreamingServer[probev1.Request, probev1.Response]) error {
	return h.server.runStream(ClientStream, stream, nil)
}

func (h *handlers) ClientStreamKeyed(stream grpc.ClientStreamingServer[probev1.Request, probev1.Response]) error {
	return h.server.runStream(ClientStreamKeyed, stream, nil)
}

func (h *handlers) Bidi(stream grpc.BidiStreamingServer[probev1.Request, probev1.Response]) error {
	return h.server.runStream(Bidi, stream, nil)
}

// metadataSetter is the half of [grpc.ServerStream] that sets metadata.
type metadataSetter interface {
	SetHeader(md metadata.MD) error
	SetTrailer(md metadata.MD)
}

// ambient sets a unary call's metadata, which hangs on its context. A handler
// that runs detached from its call has nowhere to put it by then; gRPC's error
// for that is the same as for a handler with no stream, and no test's business.
type ambient struct {
	ctx context.Context //nolint:containedctx // it lives for one call of begin
}

func (a ambient) SetHeader(md metadata.MD) error { return grpc.SetHeader(a.ctx, md) }

func (a ambient) SetTrailer(md metadata.MD) {
	_ = grpc.SetTrailer(a.ctx, md) // fails only without a stream
}
