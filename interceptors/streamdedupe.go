package interceptors

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/belayrpc/belay/idempotency"
)

// StreamDedupe returns the inner half for streaming calls; see
// [Server.UnaryDedupe].
//
// A keyed client stream is read to its end, within WithKeyedStreamLimit, before
// anything is claimed: only then is it known which request the key belongs to,
// and an upload that breaks off half-way claims nothing, so its retry runs. The
// handler then reads what was kept, detached from the caller like any keyed
// execution; the messages of a duplicate are read, compared and dropped.
//
// Streams of responses are not recorded: their handler runs, and
// idempotency-status says "ignored".
func (s *Server) StreamDedupe() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := ss.Context()
		m := s.keyedMethodOf(info.FullMethod)
		if info.IsServerStream || !m.honours() {
			return s.ignoreKey(ctx, m, srv, ss, handler)
		}
		key, has, refusal := m.keyOf(ctx, nil)
		switch {
		case refusal != nil:
			return s.refuse(ctx, m, refusal)
		case !has:
			return handler(srv, ss)
		}
		return s.deduplicateStream(m, key, srv, ss, handler)
	}
}

// ignoreKey runs the handler of a method whose keys mean nothing here, and says so.
func (s *Server) ignoreKey(ctx context.Context, m *keyedMethod, srv any, ss grpc.ServerStream, handler grpc.StreamHandler) error {
	if !m.honours() && m.declared.Required {
		return s.refuse(ctx, m, idempotency.RefuseNoStore())
	}
	if len(metadata.ValueFromIncomingContext(ctx, MetadataKey)) > 0 {
		md := metadata.Pairs(MetadataStatus, idempotency.MarkIgnored.String())
		_ = ss.SetHeader(md)
		ss.SetTrailer(md)
	}
	return handler(srv, ss)
}

func (s *Server) deduplicateStream(m *keyedMethod, key idempotency.Key, srv any, ss grpc.ServerStream, handler grpc.StreamHandler) error {
	ctx := ss.Context()
	rolling := m.engine.Rolling()
	spool := &spool{server: s}
	refusal, err := spool.fill(m, ss, rolling)
	switch {
	case refusal != nil:
		return s.refuse(ctx, m, refusal)
	case err != nil:
		return err
	}
	capture, messages := captureFor(ctx, m.engine), spool.messages
	// Released by the handler, which may outlive this call; by this call where no
	// handler of its own has started.
	var once sync.Once
	var started atomic.Bool
	defer func() {
		if !started.Load() {
			once.Do(spool.release)
		}
	}()
	reply := m.engine.Do(withTLS(ctx), idempotency.Call{
		Method: m.name, Key: key, Rolling: rolling, Retention: m.declared.Retention,
	}, func(ctx context.Context) idempotency.Result {
		started.Store(true)
		defer once.Do(spool.release)
		in := &spooledStream{ctx: capture.context(ctx), messages: messages}
		err := handler(srv, in)
		return capture.result(in.answer(err))
	})
	resp, err := s.answer(ctx, m, reply)
	if err != nil {
		return err
	}
	return ss.SendMsg(resp)
}

// spool holds the requests of one keyed stream.
type spool struct {
	server   *Server
	messages []proto.Message
	bytes    int
}

// fill reads the stream to its end.
func (p *spool) fill(m *keyedMethod, ss grpc.ServerStream, rolling *idempotency.Rolling) (refusal *idempotency.Refusal, err error) {
	defer func() {
		if refusal != nil || err != nil {
			p.release()
		}
	}()
	name := m.declared.Method.Input().FullName()
	request, err := protoregistry.GlobalTypes.FindMessageByName(name)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "belay: request type %s of a keyed stream: %v", name, err)
	}
	limit := p.server.config.streamLimit
	for {
		msg := request.New().Interface()
		switch err := ss.RecvMsg(msg); {
		case errors.Is(err, io.EOF):
			return nil, nil //nolint:nilnil // read to its end, and nothing against it
		case err != nil:
			return nil, err
		}
		size := proto.Size(msg)
		p.bytes += size
		all := p.server.spool.Add(int64(size))
		if p.bytes > limit {
			return refuseStream(fmt.Sprintf("a keyed stream may have %d bytes of requests", limit), -1), nil
		}
		if all > int64(limit)*spoolFactor {
			return refuseStream("too many keyed streams are being read", 500*time.Millisecond), nil
		}
		rolling.Add(msg)
		p.messages = append(p.messages, msg)
	}
}

func refuseStream(message string, retryAfter time.Duration) *idempotency.Refusal {
	return &idempotency.Refusal{
		Code: code.Code_RESOURCE_EXHAUSTED, Reason: idempotency.ReasonWaitersExceeded, Executed: idempotency.ExecutedNo,
		RetryAfter: retryAfter, Message: message,
	}
}

func (p *spool) release() {
	p.server.spool.Add(int64(-p.bytes))
	p.messages, p.bytes = nil, 0
}

// spooledStream is the stream that the handler of a keyed client stream sees.
// It may outlive the caller's.
type spooledStream struct {
	ctx      context.Context //nolint:containedctx // a stream is where gRPC keeps a handler's context
	messages []proto.Message
	response any
}

func (s *spooledStream) Context() context.Context        { return s.ctx }
func (s *spooledStream) SetHeader(md metadata.MD) error  { return grpc.SetHeader(s.ctx, md) }
func (s *spooledStream) SendHeader(md metadata.MD) error { return grpc.SendHeader(s.ctx, md) }
func (s *spooledStream) SetTrailer(md metadata.MD)       { _ = grpc.SetTrailer(s.ctx, md) }

// RecvMsg gives the handler the next kept request, and no longer keeps it.
func (s *spooledStream) RecvMsg(m any) error {
	if len(s.messages) == 0 {
		return io.EOF
	}
	into, ok := m.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "belay: a keyed stream is read into a protobuf message, not into a %T", m)
	}
	proto.Reset(into)
	proto.Merge(into, s.messages[0])
	s.messages = s.messages[1:]
	return nil
}

// SendMsg takes the handler's one answer.
func (s *spooledStream) SendMsg(m any) error {
	if s.response != nil {
		return status.Error(codes.Internal, "belay: a client stream has one answer, and the handler sent another")
	}
	s.response = m
	return nil
}

func (s *spooledStream) answer(err error) (any, error) {
	if err == nil && s.response == nil {
		err = status.Error(codes.Internal, "belay: the handler of a client stream returned without an answer")
	}
	return s.response, err
}
