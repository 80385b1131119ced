package interceptors

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors/policy"
)

// UnaryGuard returns the outer half for unary calls, for programs that build
// their own chain. It must be the first interceptor.
//
// On the way in: what is left of the deadline, less the reserve; a call with
// less than the floor is refused before any work. On the way out: whether
// retries were already spent behind a failure, what the server's bank says, and
// what the handler asked for, spoken as one pushback value.
func (s *Server) UnaryGuard() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if exempt(serviceOf(info.FullMethod)) {
			return handler(ctx, req)
		}
		in, ctx, err := s.enter(ctx, info.FullMethod)
		if err != nil {
			return nil, s.leave(in, ctx, err, grpc.SetTrailer)
		}
		defer in.close()
		resp, err := handler(ctx, req)
		err = s.leave(in, ctx, err, grpc.SetTrailer)
		if err != nil {
			return nil, err
		}
		return resp, nil
	}
}

// StreamGuard returns the outer half for streaming calls; see [Server.UnaryGuard].
func (s *Server) StreamGuard() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if exempt(serviceOf(info.FullMethod)) {
			return handler(srv, ss)
		}
		setTrailer := func(_ context.Context, md metadata.MD) error {
			ss.SetTrailer(md)
			return nil
		}
		in, ctx, err := s.enter(ss.Context(), info.FullMethod)
		if err != nil {
			return s.leave(in, ctx, err, setTrailer)
		}
		defer in.close()
		err = handler(srv, &guardedStream{ServerStream: ss, ctx: ctx})
		return s.leave(in, ctx, err, setTrailer)
	}
}

// guardedStream gives the handler the guard's context.
type guardedStream struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // a stream is where gRPC keeps a handler's context
}

func (s *guardedStream) Context() context.Context { return s.ctx }

// inbound is one call between the guard's way in and its way out. The halves
// meet in it: dedupe leaves its wishes here, and the guard speaks.
type inbound struct {
	method string
	bank   *serverBank
	retry  bool // the caller has tried this call before
	ledger ledger
	origin origin // what the handler's context carries of all this
	cancel context.CancelFunc
	span   trace.Span
	shed   bool // refused: its deadline is too near
	done   bool

	mu       sync.Mutex // guards all below: dedupe's execution may outlive the call
	wish     pushback
	executed string // what belay-executed will say; empty: nothing
	reason   string // what belay-reason will say: a refusal of Belay's own
	status   string // how dedupe answered, for the span
}

func inboundFrom(ctx context.Context) *inbound { return originOf(ctx).inbound }

// say leaves what a refusal of Belay's own has to tell the caller.
func (in *inbound) say(wish pushback, executed, reason string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.wish = in.wish.stronger(wish)
	in.executed, in.reason = executed, reason
}

func (in *inbound) marked(status string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.status = status
}

func (in *inbound) said() (wish pushback, executed, reason string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.wish, in.executed, in.reason
}

func (in *inbound) close() {
	if in.cancel != nil {
		in.cancel()
	}
	if !in.done && in.span != nil {
		endSpan(in.span, codes.Internal, "panic") // leave was never reached
	}
}

// enter is the way in. It returns an error when the call is refused.
func (s *Server) enter(ctx context.Context, method string) (*inbound, context.Context, error) {
	in := &inbound{method: method, bank: s.banks.get(serviceOf(method))}
	in.origin = origin{ledger: &in.ledger, inbound: in}
	in.retry = s.isRetry(ctx, method)
	ctx, in.span = s.startServerSpan(ctx, method)
	ctx = withOrigin(ctx, &in.origin)

	now := time.Now()
	deadline, has := ctx.Deadline()
	if !has {
		if s.config.deadline.Default == 0 {
			return in, ctx, nil
		}
		deadline = now.Add(s.config.deadline.Default)
	}
	left := deadline.Sub(now)
	if in.span != nil {
		in.span.SetAttributes(attribute.Float64("belay.server.deadline.remaining", left.Seconds()))
	}
	reserve := s.config.deadline.Reserve
	if reserve == 0 {
		reserve = min(maxReserve, max(left, 0)/reserveDivisor)
	}
	floor := s.config.deadline.Floor
	if floor == 0 {
		floor = defaultFloor
	}
	if left-reserve < floor && s.config.dryRun {
		if has {
			in.ledger.deadline = deadline
		}
		s.config.observe(ctx, Event{Kind: EventDryRun, Method: method, Code: codes.DeadlineExceeded, Stop: DeadlineTooShort})
		return in, ctx, nil
	}
	if left-reserve < floor {
		s.config.observe(ctx, Event{Kind: EventShed, Method: method, Code: codes.DeadlineExceeded, Detail: "deadline"})
		if in.span != nil {
			in.span.SetAttributes(attribute.String("belay.server.shed", "deadline"))
		}
		in.shed = true
		in.say(pushback{given: true, stop: true}, No.String(), "")
		return in, ctx, status.Error(codes.DeadlineExceeded,
			"not started: "+left.String()+" left of the deadline, less than the server's reserve and floor")
	}
	deadline = deadline.Add(-reserve)
	if has {
		in.ledger.deadline = deadline
	}
	ctx, in.cancel = context.WithDeadline(ctx, deadline)
	return in, ctx, nil
}

// isRetry reads how often the caller has tried this call before: gRFC A6.
func (s *Server) isRetry(ctx context.Context, method string) bool {
	if s.config.trustBoundary {
		return false
	}
	values := metadata.ValueFromIncomingContext(ctx, metadataAttempts)
	if len(values) == 0 {
		// A hedge is no first try either: it earns nothing, and costs if it fails.
		return len(metadata.ValueFromIncomingContext(ctx, MetadataHedge)) > 0
	}
	if len(values) > 1 {
		// Two layers of the client retry: ours and gRPC's own, or another's.
		s.config.observe(ctx, Event{Kind: EventForeign, Method: method, Detail: metadataAttempts})
		if s.warned.first("attempts", method) {
			s.config.logger.WarnContext(ctx, "belay: a caller retries at two layers, which multiplies", "method", method)
		}
	}
	for _, v := range values {
		if n, err := strconv.ParseInt(v, 10, 32); err == nil && n > 0 {
			return true
		}
	}
	return false
}

// leave is the way out: it makes the error that the caller sees and sets the
// trailers. It returns nil for success.
func (s *Server) leave(in *inbound, ctx context.Context, err error, setTrailer func(context.Context, metadata.MD) error) error { //nolint:revive // ctx belongs to in
	in.done = true
	wish, executed, reason := in.said()
	if err == nil {
		in.bank.succeeded(in.retry)
		endSpan(in.span, codes.OK, "")
		return nil // what trailers say of an effect or a refusal is said of errors only
	}
	trailer := metadata.MD{}
	if executed != "" {
		trailer[MetadataExecuted] = []string{executed}
	}
	if reason != "" {
		trailer[MetadataReason] = []string{reason}
	}

	st := statusOf(err)
	if st.Code() == codes.OK {
		// An error that calls itself OK is still one. Without a code its end
		// here would be nil, and the caller would be told of a success.
		st = status.New(codes.Unknown, err.Error())
	}
	if reason == "" {
		st = markForwarded(st)
		if in.outOfTime(ctx, st.Code()) {
			trailer[MetadataReason] = []string{reasonDeadline}
		}
	}
	// A verdict is about the request, and a call that its caller gave up is no
	// failure of anybody's: neither carries pushback.
	if !policy.IsVerdict(st.Code()) && st.Code() != codes.Canceled {
		wish, st = s.judge(in, ctx, err, st, wish, reason)
		if wish.given {
			trailer[metadataPushback] = []string{wish.value()}
		}
	}
	s.send(ctx, trailer, setTrailer)
	endSpan(in.span, st.Code(), st.Message())
	return st.Err()
}

// judge finds what is to be said about retrying a failure.
func (s *Server) judge(in *inbound, ctx context.Context, err error, st *status.Status, wish pushback, reason string) (pushback, *status.Status) { //nolint:revive // ctx belongs to in
	if asked, ok := errors.AsType[*retryAfterError](err); ok {
		wish = wish.stronger(asked.wish)
	}
	if who, stop, spent := in.spent(err); spent {
		if s.config.dryRun {
			s.config.observe(ctx, Event{Kind: EventDryRun, Method: in.method, Code: st.Code(), Stop: Pushback, Detail: who})
			return wish, st
		}
		wish = wish.stronger(pushback{given: true, stop: true})
		st = s.withMark(st, who, stop)
		s.config.observe(ctx, Event{Kind: EventMark, Method: in.method, Code: st.Code(), Stop: stop, Detail: who})
		spanEvent(in.span, "retries spent below", attribute.String("belay.stop", stop.String()))
	}
	// Dedupe's refusals name a delay of their own: they are about one key and
	// not about the server's health.
	if reason == "" && in.bank.failed(in.retry) && !s.config.dryRun {
		wish = wish.stronger(pushback{given: true, stop: true})
	}
	return wish, st
}

// outOfTime reports whether a failure is the work of the deadline that the call
// came with: it was refused for it, it passed in the handler, or a call made
// under the handler's context had too little of it. A deadline of this server's
// own (DeadlineConfig.Default) is nothing that its caller is short of.
func (in *inbound) outOfTime(ctx context.Context, code codes.Code) bool {
	if code != codes.DeadlineExceeded {
		return false
	}
	passed := !in.ledger.deadline.IsZero() && errors.Is(ctx.Err(), context.DeadlineExceeded)
	return in.shed || passed || in.ledger.outOfTime()
}

// spent looks for retries that were already spent behind a failure: in the
// error's own chain, and among the calls made under the handler's context.
func (in *inbound) spent(err error) (who string, stop StopReason, ok bool) {
	if ce, found := asCallError(err); found && ce.stop.Spent() {
		return ce.method, ce.stop, true
	}
	return in.ledger.spent()
}

// withMark adds, for people, who has already retried. What clients obey is the
// trailer.
func (s *Server) withMark(st *status.Status, who string, stop StopReason) *status.Status {
	info := &errdetails.ErrorInfo{
		Reason: "RETRIES_SPENT", Domain: idempotency.ErrorDomain, Metadata: map[string]string{"stop": stop.String()},
	}
	if !s.config.trustBoundary {
		info.Metadata["who"] = who
	}
	with, err := st.WithDetails(info)
	if err != nil {
		return st
	}
	return with
}

// markForwarded labels ErrorInfo details of Belay's domain that a handler
// returned: they came from another hop, and a client must not take them for
// this server's word.
func markForwarded(st *status.Status) *status.Status {
	const key, value = "via", "downstream"
	p := st.Proto() // a copy
	changed := false
	for i, d := range p.GetDetails() {
		var info errdetails.ErrorInfo
		if !d.MessageIs(&info) || d.UnmarshalTo(&info) != nil || info.GetDomain() != idempotency.ErrorDomain || info.GetMetadata()[key] == value {
			continue
		}
		if info.Metadata == nil {
			info.Metadata = map[string]string{}
		}
		info.Metadata[key] = value
		if packed, err := anypb.New(&info); err == nil {
			p.Details[i] = packed
			changed = true
		}
	}
	if !changed {
		return st
	}
	return status.FromProto(p)
}

// send sets the trailers; never a header, which would stop native retries. If
// the handler has set a pushback of its own by hand, there is one value already,
// and a second would be read as "stop" by every client (gRFC A6): the handler's
// stands, unless stop is what we say too.
//
// A handler that passes a downstream answer's trailers on passes on what that
// server said of its own execution, and this one's handler did run. A trailer
// cannot be taken back, but with a second value it is nobody's word any more.
func (s *Server) send(ctx context.Context, trailer metadata.MD, setTrailer func(context.Context, metadata.MD) error) {
	if t, ok := grpc.ServerTransportStreamFromContext(ctx).(interface{ Trailer() metadata.MD }); ok {
		handlers := t.Trailer()
		if v := trailer[metadataPushback]; v != nil && v[0] != "-1" && len(handlers[metadataPushback]) > 0 {
			delete(trailer, metadataPushback)
		}
		for _, key := range [...]string{MetadataExecuted, MetadataReason} {
			if len(handlers[key]) > 0 {
				trailer[key] = append(trailer[key], forwarded)
			}
		}
	}
	if len(trailer) == 0 {
		return
	}
	if err := setTrailer(ctx, trailer); err != nil {
		s.config.logger.DebugContext(ctx, "belay: trailer not set", "error", err)
	}
}

// forwarded is the value beside one that the handler itself has set.
const forwarded = "forwarded"

// startServerSpan starts a SERVER span where nobody else has: a stats handler's
// is in the context already.
func (s *Server) startServerSpan(ctx context.Context, method string) (context.Context, trace.Span) {
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() && !sc.IsRemote() {
		return ctx, nil
	}
	if !s.tracer.enabled(time.Now()) {
		return ctx, nil
	}
	if !s.config.trustBoundary {
		ctx = s.tracer.extract(ctx)
	}
	names := newSpanNames(method)
	//nolint:spancheck // the guard ends it on the way out
	return s.tracer.get().Start(ctx, names.attempt, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(names.attributes...))
}
