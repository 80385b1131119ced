package interceptors

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors/policy"
)

// storeRule gives the methods that a pattern names a store.
type storeRule struct {
	pattern string
	engine  *idempotency.Engine
	plain   transactional // nil where the store has no transactions to give
}

// transactional is a store whose handlers write through its transactions. A
// call without a key gets one too, so that the same handler serves both; finish
// commits it, or rolls it back for an error, and returns the call's error.
type transactional interface {
	Plain(ctx context.Context) (callCtx context.Context, finish func(err error) error)
}

// WithIdempotency makes the server honour the keys of methods that are declared
// keyed, with one store for all of them.
func WithIdempotency(store idempotency.Store, cfg idempotency.Config) ServerOption {
	return WithIdempotencyFor("*", store, cfg)
}

// WithIdempotencyFor is WithIdempotency for the methods that a pattern names:
// "pkg.Svc/Method", "pkg.Svc/*" or "*". The most specific pattern wins. A
// pattern that names one method has the server honour keys of that method even
// where its .proto declares nothing, as if it were declared OPTIONAL.
func WithIdempotencyFor(pattern string, store idempotency.Store, cfg idempotency.Config) ServerOption {
	return serverOption(func(c *serverConfig) {
		engine, err := idempotency.NewEngine(store, cfg)
		err = errors.Join(err, policy.Rule{Pattern: pattern}.Validate())
		for _, other := range c.stores {
			if other.pattern == pattern {
				err = errors.Join(err, fmt.Errorf("pattern %q: has a store already", pattern))
			}
		}
		if err != nil {
			c.errs = append(c.errs, fmt.Errorf("WithIdempotencyFor(%q): %w", pattern, err))
			return
		}
		plain, _ := store.(transactional)
		c.stores = append(slices.Clip(c.stores), storeRule{pattern, engine, plain})
	})
}

// sortStores puts the most specific pattern first: one method, one service, all.
func sortStores(rules []storeRule) []storeRule {
	rank := func(r storeRule) int {
		switch {
		case r.pattern == "*":
			return 2
		case strings.HasSuffix(r.pattern, "/*"):
			return 1
		default:
			return 0
		}
	}
	rules = slices.Clone(rules)
	slices.SortStableFunc(rules, func(a, b storeRule) int { return cmp.Compare(rank(a), rank(b)) })
	return rules
}

// keyedMethod is what dedupe knows of one method.
type keyedMethod struct {
	name     string
	declared policy.Declared
	engine   *idempotency.Engine // nil: keys are not honoured
	plain    transactional       // for calls without a key; may be nil
}

// honours reports whether keys of the method mean something here.
func (m *keyedMethod) honours() bool { return m.engine != nil }

// keyedMethodOf looks a method up, once. The table is bounded by what is
// registered: gRPC calls interceptors for known methods, except where an
// unknown-service handler is installed, whose methods are not kept.
func (s *Server) keyedMethodOf(full string) *keyedMethod {
	if m, ok := s.keyed.Load(full); ok {
		return m.(*keyedMethod) //nolint:forcetypeassert // the map holds nothing else
	}
	m := &keyedMethod{name: full, declared: policy.DeclaredFor(full)}
	name := strings.TrimPrefix(full, "/")
	for _, r := range s.stores {
		exact := strings.TrimPrefix(r.pattern, "/") == name
		if exact || r.pattern == "*" || strings.HasPrefix(name, strings.TrimSuffix(strings.TrimPrefix(r.pattern, "/"), "*")) && strings.HasSuffix(r.pattern, "/*") {
			if m.declared.Class == policy.Keyed || exact {
				m.engine = r.engine
			}
			m.plain = r.plain
			break
		}
	}
	if m.declared.Method != nil {
		s.keyed.Store(full, m)
	}
	return m
}

// UnaryDedupe returns the inner half for unary calls, for programs that build
// their own chain. It must be the last interceptor, behind authentication,
// authorisation and validation: what they refuse is not recorded, and a replay
// passes them first.
func (s *Server) UnaryDedupe() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		m := s.keyedMethodOf(info.FullMethod)
		key, has, refusal := m.keyOf(ctx, req)
		switch {
		case refusal != nil:
			return nil, s.refuse(ctx, m, refusal)
		case !has:
			return s.run(ctx, m, req, handler)
		case !m.honours():
			resp, err := s.run(ctx, m, req, handler)
			s.mark(ctx, idempotency.MarkIgnored, err == nil)
			return resp, err
		}
		return s.deduplicate(ctx, m, key, req, handler)
	}
}

// run runs the handler of a call that is not deduplicated, in a transaction of
// the store's where it asks for one. A panic rolls back and goes on.
func (s *Server) run(ctx context.Context, m *keyedMethod, req any, handler grpc.UnaryHandler) (resp any, err error) {
	if m.plain == nil {
		return handler(ctx, req)
	}
	callCtx, finish := m.plain.Plain(ctx)
	returned := false
	defer func() {
		if !returned {
			_ = finish(errHandlerPanicked)
		}
	}()
	resp, err = handler(callCtx, req)
	returned = true
	switch finished := finish(err); {
	case err != nil:
		return nil, err
	case finished != nil:
		return nil, s.refuse(ctx, m, uncommitted(finished))
	}
	return resp, nil
}

// uncommitted is the answer to a call without a key whose handler succeeded and
// whose transaction did not.
func uncommitted(err error) *idempotency.Refusal {
	if errors.Is(err, idempotency.ErrConflict) {
		return &idempotency.Refusal{
			Code: code.Code_ABORTED, Reason: idempotency.ReasonTxConflict, Executed: idempotency.ExecutedNo, Cause: err,
			RetryAfter: plainRetryAfter, Message: "the transaction conflicted with another and was rolled back",
		}
	}
	return &idempotency.Refusal{
		Code: code.Code_UNAVAILABLE, Reason: idempotency.ReasonOutcomePending, Executed: idempotency.ExecutedMaybe, Cause: err,
		RetryAfter: -1, Message: "the call's transaction may or may not have been committed, and no key tells which",
	}
}

const plainRetryAfter = 50 * time.Millisecond

var errHandlerPanicked = errors.New("belay: the handler panicked")

// keyOf finds the call's key in metadata and request. Without one the method's
// declaration says whether the call may run.
func (m *keyedMethod) keyOf(ctx context.Context, req any) (idempotency.Key, bool, *idempotency.Refusal) {
	keyed := m.honours() || m.declared.Class == policy.Keyed
	values := metadata.ValueFromIncomingContext(ctx, MetadataKey)
	if !keyed {
		// The key means nothing here, whatever it is; the caller is told so.
		return idempotency.Key{}, len(values) > 0, nil
	}
	if !m.honours() && m.declared.Required {
		return idempotency.Key{}, false, idempotency.RefuseNoStore()
	}
	key, has, refusal := idempotency.KeyFromMetadata(values, metadata.ValueFromIncomingContext(ctx, MetadataFirstSent))
	if refusal != nil {
		return key, false, refusal
	}
	if field := m.fieldKey(req); field != "" {
		if has && key.Value != field {
			return key, false, idempotency.RefuseKeyConflict(string(m.declared.KeyField))
		}
		key.Value, has = field, true
	}
	if !has && m.declared.Required {
		return key, false, idempotency.RefuseKeyMissing(string(m.declared.KeyField))
	}
	return key, has, nil
}

// fieldKey is the key that the request itself carries; empty for none.
func (m *keyedMethod) fieldKey(req any) string {
	msg, ok := req.(proto.Message)
	if m.declared.KeyField == "" || !ok {
		return ""
	}
	field := msg.ProtoReflect().Descriptor().Fields().ByName(m.declared.KeyField)
	if field == nil || field.Kind() != protoreflect.StringKind || field.Cardinality() == protoreflect.Repeated {
		return "" // Check and the linter report it
	}
	return msg.ProtoReflect().Get(field).String()
}

// deduplicate answers a keyed call: by its handler, or by what is on record.
func (s *Server) deduplicate(ctx context.Context, m *keyedMethod, key idempotency.Key, req any, handler grpc.UnaryHandler) (any, error) {
	msg, ok := req.(proto.Message)
	if !ok {
		return nil, s.refuse(ctx, m, &idempotency.Refusal{
			Code: code.Code_FAILED_PRECONDITION, Reason: idempotency.ReasonNoStore, Executed: idempotency.ExecutedNo, RetryAfter: -1,
			Message: fmt.Sprintf("a keyed request must be a protobuf message, not %T", req),
		})
	}
	capture := captureFor(ctx, m.engine)
	reply := m.engine.Do(withTLS(ctx), idempotency.Call{
		Method: m.name, Key: key, Request: msg, Retention: m.declared.Retention,
	}, func(ctx context.Context) idempotency.Result {
		resp, err := handler(capture.context(ctx), req)
		return capture.result(resp, err)
	})
	return s.answer(ctx, m, reply)
}

// answer turns the engine's reply into gRPC's, with what has to be said in
// metadata. An error stays trailers-only, or native clients could not retry it.
func (s *Server) answer(ctx context.Context, m *keyedMethod, reply idempotency.Reply) (any, error) {
	if reply.Refusal != nil {
		return nil, s.refuse(ctx, m, reply.Refusal)
	}
	s.config.observe(ctx, Event{Kind: EventDedupe, Method: m.name, Detail: reply.Mark.String()})
	failed := reply.Err != nil || reply.Status != nil
	s.mark(ctx, reply.Mark, !failed)
	if len(reply.Trailer) > 0 {
		_ = grpc.SetTrailer(ctx, metadata.MD(reply.Trailer))
	}
	if !failed {
		if len(reply.Header) > 0 {
			_ = grpc.SetHeader(ctx, metadata.MD(reply.Header))
		}
		return reply.Response, nil
	}
	s.say(ctx, pushback{}, reply.Executed.String(), "")
	if reply.Err != nil {
		// The handler's own error, so that the guard finds in its chain what a
		// status cannot carry.
		return nil, idempotency.Unmark(reply.Err)
	}
	return nil, status.ErrorProto(reply.Status)
}

// refuse answers in place of the handler.
func (s *Server) refuse(ctx context.Context, m *keyedMethod, r *idempotency.Refusal) error {
	s.config.observe(ctx, Event{Kind: EventDedupe, Method: m.name, Detail: string(r.Reason)})
	if r.Cause != nil {
		s.config.logger.DebugContext(ctx, "belay: keyed call refused", "method", m.name, "reason", r.Reason, "cause", r.Cause)
	}
	wish := pushback{given: r.RetryAfter != 0, stop: r.RetryAfter < 0, delay: max(r.RetryAfter, 0)}
	if policy.IsVerdict(codes.Code(r.Code)) { //nolint:gosec // gRPC's codes are small
		wish = pushback{} // about the request: there is nothing to come back for
	}
	s.say(ctx, wish, r.Executed.String(), string(r.Reason))
	return status.ErrorProto(r.Status())
}

// say tells the guard, which speaks for the server; without one it is said here.
func (s *Server) say(ctx context.Context, wish pushback, executed, reason string) {
	if in := inboundFrom(ctx); in != nil {
		in.say(wish, executed, reason)
		return
	}
	trailer := metadata.Pairs(MetadataExecuted, executed)
	if reason != "" {
		trailer.Set(MetadataReason, reason)
	}
	if wish.given {
		trailer.Set(metadataPushback, wish.value())
	}
	_ = grpc.SetTrailer(ctx, trailer)
}

// mark sets idempotency-status: in the header too when the call succeeded.
func (s *Server) mark(ctx context.Context, mark idempotency.Mark, ok bool) {
	md := metadata.Pairs(MetadataStatus, mark.String())
	if ok {
		_ = grpc.SetHeader(ctx, md) // fails only when the handler has sent its header; the trailer says it too
	}
	_ = grpc.SetTrailer(ctx, md)
	if in := inboundFrom(ctx); in != nil {
		in.marked(mark.String())
	}
}

// withTLS hands the connection's TLS state to idempotency.ScopeFromTLS, which
// knows no gRPC.
func withTLS(ctx context.Context) context.Context {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ctx
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return ctx
	}
	return idempotency.ContextWithTLS(ctx, &info.State)
}
