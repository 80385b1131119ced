package probe

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// attemptsKey is the metadata in which a client says how many attempts of the
// call came before this one (gRFC A6).
const attemptsKey = "grpc-previous-rpc-attempts"

// Entry is one run of a handler: what it was told and how it went.
type Entry struct {
	// Method is the full name.
	Method string

	// When is the time at which the handler was entered.
	When time.Time

	// Left is the time from When to the deadline in the handler's context. Zero
	// and meaningless without HasDeadline.
	Left        time.Duration
	HasDeadline bool

	// Metadata is what came in; a copy.
	Metadata metadata.MD

	// Request is a copy of a unary call's or server stream's request.
	Request *probev1.Request

	// Received and Sent count a stream's messages; Texts are the texts of those
	// received that have one, in order.
	Received, Sent int
	Texts          []string

	// Ended is set once the handler has returned or panicked; the fields below
	// have no meaning before.
	Ended bool

	// Took is how long the handler ran.
	Took time.Duration

	// Err is what it returned.
	Err error

	// CtxErr is the error of the handler's context when it ended: not nil when
	// the handler was told to stop.
	CtxErr error
}

// PreviousAttempts returns the number in grpc-previous-rpc-attempts: 0 without
// the header, as gRFC A6 has it, and -1 for anything but one number.
func (e *Entry) PreviousAttempts() int {
	values := e.Metadata.Get(attemptsKey)
	if len(values) == 0 {
		return 0
	}
	n, err := strconv.Atoi(values[0])
	if err != nil || len(values) > 1 {
		return -1
	}
	return n
}

// history is every handler run so far.
type history struct {
	mu      sync.Mutex
	entries []*Entry
}

// enter adds an entry. The pointer is written to only through history's
// methods, as Seen may be reading.
func (h *history) enter(ctx context.Context, method string, req *probev1.Request) *Entry {
	e := &Entry{Method: method, When: time.Now()}
	if deadline, ok := ctx.Deadline(); ok {
		e.Left, e.HasDeadline = deadline.Sub(e.When), true
	}
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		e.Metadata = md
	}
	if req != nil {
		e.Request = proto.CloneOf(req)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.entries = append(h.entries, e)
	return e
}

func (h *history) received(e *Entry, req *probev1.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e.Received++
	if text := req.GetText(); text != "" {
		e.Texts = append(e.Texts, text)
	}
}

func (h *history) sent(e *Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e.Sent++
}

func (h *history) end(ctx context.Context, e *Entry, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e.Ended, e.Took, e.Err, e.CtxErr = true, time.Since(e.When), err, ctx.Err()
}

// Seen returns the handler runs of the given methods so far, of all methods
// when none is given, in the order of their entry.
func (s *Server) Seen(methods ...string) []Entry {
	for _, m := range methods {
		mustKnow("Seen", m)
	}
	s.history.mu.Lock()
	defer s.history.mu.Unlock()
	var seen []Entry
	for _, e := range s.history.entries {
		if len(methods) > 0 && !slices.Contains(methods, e.Method) {
			continue
		}
		snapshot := *e
		snapshot.Texts = slices.Clone(e.Texts)
		seen = append(seen, snapshot)
	}
	return seen
}
