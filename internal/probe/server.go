package probe

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// Server is the scripted service. Make one with [NewServer], or let [Start] do
// it. All methods may be called at any time, concurrently, also while handlers
// run.
type Server struct {
	scripts scripts
	history history
	hits    Exec
	effects Exec

	// scripted counts the panics that steps asked for: more than these at the
	// edge are bugs.
	scripted Exec
}

// NewServer returns a server that succeeds in everything.
func NewServer() *Server {
	return &Server{scripts: scripts{byMethod: map[string][]Step{}}}
}

// Register adds the probe's services to a grpc server, for tests that build
// their own. [Start] does it for everyone else.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	h := &handlers{server: s}
	probev1.RegisterProbeServiceServer(r, h)
	probev1.RegisterKeyedServiceServer(r, h)
}

// Hits returns how often the method's handler was entered.
func (s *Server) Hits(method string) int {
	mustKnow("Hits", method)
	return s.hits.Count(method)
}

// TotalHits returns how often any handler was entered.
func (s *Server) TotalHits() int { return s.hits.Total() }

// Effects returns how often the method's handler did its work: it returned no
// error, whether or not the reply was then lost.
func (s *Server) Effects(method string) int {
	mustKnow("Effects", method)
	return s.effects.Count(method)
}

// runUnary is the handler of every unary method.
func (s *Server) runUnary(ctx context.Context, method string, req *probev1.Request) (resp *probev1.Response, err error) {
	run := s.enter(ctx, method, req)
	defer func() { s.leave(run, err) }()

	resp, err = run.answer(req)
	run.returned = true
	return resp, err
}

// runStream is the handler of every streaming method. req is a server stream's
// one request, nil for the other kinds.
func (s *Server) runStream(method string, stream grpc.ServerStream, req *probev1.Request) (err error) {
	run := s.enter(stream.Context(), method, req)
	defer func() { s.leave(run, err) }()

	err = run.serve(&streamRun{run: run, stream: stream, unread: req})
	run.returned = true
	return err
}

// run is one run of a handler. Used by one goroutine.
type run struct {
	ctx       context.Context //nolint:containedctx // it lives exactly as long as the handler's call
	server    *Server
	method    string
	kind      kind
	step      Step
	entry     *Entry
	execution uint64 // which run of the method this is, from 1
	returned  bool   // false while running and after a panic
}

func (s *Server) enter(ctx context.Context, method string, req *probev1.Request) *run {
	return &run{
		ctx:       ctx,
		server:    s,
		method:    method,
		kind:      kinds[method],
		execution: uint64(s.hits.Add(method)), //nolint:gosec // a count
		step:      s.scripts.next(method),
		entry:     s.history.enter(ctx, method, req),
	}
}

// leave records how the run ended. A panic is noticed and not recovered: who
// catches it further out must find the stack it was thrown from.
func (s *Server) leave(r *run, err error) {
	switch {
	case !r.returned:
		err = ErrPanicked
	case err == nil:
		s.effects.Add(r.method)
	}
	s.history.end(r.ctx, r.entry, err)
}

// ErrPanicked is the Err of an [Entry] whose handler panicked, or ended its
// goroutine.
var ErrPanicked = errors.New("probe: the handler panicked")

// answer does the step of a unary method.
func (r *run) answer(req *probev1.Request) (*probev1.Response, error) {
	if err := r.begin(ambient{r.ctx}); err != nil {
		return nil, err
	}

	var resp *probev1.Response
	var err error
	if r.step.Do != nil {
		resp, err = r.step.Do(r.ctx, req)
	} else {
		resp, err = r.response(req, 1, 1), r.conclude()
	}
	if err != nil {
		return nil, err
	}

	return resp, r.lose()
}

// serve does the step of a streaming method.
func (r *run) serve(stream *streamRun) error {
	if err := r.begin(stream.stream); err != nil {
		return err
	}

	ops := r.step.Ops
	if ops == nil && r.step.succeeds() {
		ops = usualOps(r.kind, stream.unread)
	}
	for _, op := range ops {
		if err := op.run(stream); err != nil {
			return err
		}
	}
	if err := r.conclude(); err != nil {
		return err
	}

	// A client stream that succeeds without its response is an error of gRPC's
	// own, which no script asks for.
	if !r.kind.serverStreams && stream.sent == 0 {
		if err := stream.send(); err != nil {
			return err
		}
	}
	return r.lose()
}

// usualOps is what a stream of this kind does when nobody says otherwise.
func usualOps(k kind, req *probev1.Request) []Op {
	switch {
	case !k.clientStreams:
		return []Op{Recv(1), Send(int(req.GetNumber()))}
	case !k.serverStreams:
		return []Op{RecvAll()}
	default:
		return []Op{Echo()}
	}
}

// begin sets the metadata and waits.
func (r *run) begin(md metadataSetter) error {
	// Steps of ScriptAll and Default meet their method only here.
	if err := r.step.check(r.kind); err != nil {
		return status.Errorf(codes.Internal, "probe: the step for %s %v", r.method, err)
	}
	if r.step.Header != nil {
		if err := md.SetHeader(r.step.Header); err != nil {
			return fmt.Errorf("probe: set header: %w", err)
		}
	}
	if trailer := r.step.trailer(); trailer != nil {
		md.SetTrailer(trailer)
	}
	return r.step.wait(r.ctx)
}

// conclude ends the run as the step says; nil is success.
func (r *run) conclude() error {
	switch {
	case r.step.Panic:
		r.server.scripted.Add(r.method)
		panic("probe: scripted panic in " + r.method)
	case r.step.Hang:
		return hang(r.ctx)
	default:
		return r.step.err()
	}
}

// lose asks for the reply of a run that has succeeded to be lost.
func (r *run) lose() error {
	if !r.step.LoseReply {
		return nil
	}
	return loseReply(r.ctx)
}

// response is what the run answers: its index-th message, after received
// requests of which req, which may be nil, was the last.
func (r *run) response(req *probev1.Request, index, received uint64) *probev1.Response {
	return &probev1.Response{
		Text:      req.GetText(),
		Execution: r.execution,
		Index:     index,
		Received:  received,
		Payload:   req.GetPayload(),
		Labels:    req.GetLabels(),
	}
}
