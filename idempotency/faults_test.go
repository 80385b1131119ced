package idempotency_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/belayrpc/belay/idempotency"
)

// faultyStore is a memory store whose steps can be made to fail, to hang or to
// lose their reply, and whose executions can pass for atomic ones.
type faultyStore struct {
	*idempotency.MemoryStore

	traits idempotency.Traits
	atomic bool

	// Each is called instead of a step, with the step.
	begin   func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error)
	renew   func(ctx context.Context, step func(context.Context) (time.Duration, error)) (time.Duration, error)
	finish  func(ctx context.Context, o *idempotency.Outcome, step finishStep) (*idempotency.Record, error)
	release func(ctx context.Context, step func(context.Context) error) error
	abandon func(ctx context.Context, step func(context.Context) error) error
}

type (
	beginStep  func(context.Context, idempotency.Claim) (idempotency.Execution, *idempotency.Record, error)
	finishStep func(context.Context, *idempotency.Outcome) (*idempotency.Record, error)
)

func newFaulty() *faultyStore {
	return &faultyStore{MemoryStore: idempotency.NewMemoryStore(idempotency.MemoryConfig{})}
}

func (s *faultyStore) Traits() idempotency.Traits { return s.traits }

func (s *faultyStore) Begin(ctx context.Context, c idempotency.Claim) (idempotency.Execution, *idempotency.Record, error) {
	step := s.MemoryStore.Begin
	if s.begin != nil {
		step = func(ctx context.Context, c idempotency.Claim) (idempotency.Execution, *idempotency.Record, error) {
			return s.begin(ctx, c, s.MemoryStore.Begin)
		}
	}
	exec, rec, err := step(ctx, c)
	if exec != nil {
		exec = &faultyExecution{Execution: exec, s: s}
	}
	return exec, rec, err
}

type faultyExecution struct {
	idempotency.Execution

	s *faultyStore
}

func (x *faultyExecution) Atomic() bool { return x.s.atomic }

func (x *faultyExecution) Renew(ctx context.Context) (time.Duration, error) {
	if x.s.renew != nil {
		return x.s.renew(ctx, x.Execution.Renew)
	}
	return x.Execution.Renew(ctx)
}

func (x *faultyExecution) Finish(ctx context.Context, o *idempotency.Outcome) (*idempotency.Record, error) {
	if x.s.finish != nil {
		return x.s.finish(ctx, o, x.Execution.Finish)
	}
	return x.Execution.Finish(ctx, o)
}

func (x *faultyExecution) Release(ctx context.Context) error {
	if x.s.release != nil {
		return x.s.release(ctx, x.Execution.Release)
	}
	return x.Execution.Release(ctx)
}

func (x *faultyExecution) Abandon(ctx context.Context) error {
	if x.s.abandon != nil {
		return x.s.abandon(ctx, x.Execution.Abandon)
	}
	return x.Execution.Abandon(ctx)
}

// recorder is an observer and a log, both of which tests read.
type recorder struct {
	mu     sync.Mutex
	events []idempotency.Event
	logged []string
}

func (r *recorder) observe(ev idempotency.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, ev)
}

func (r *recorder) count(kind idempotency.EventKind) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, ev := range r.events {
		if ev.Kind == kind {
			n++
		}
	}
	return n
}

func (r *recorder) kinds() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	kinds := make([]string, 0, len(r.events))
	for _, ev := range r.events {
		kinds = append(kinds, ev.Kind.String())
	}
	return kinds
}

func (r *recorder) messages() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.logged...)
}

// Handler of the log.
func (r *recorder) Enabled(context.Context, slog.Level) bool { return true }
func (r *recorder) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *recorder) WithGroup(string) slog.Handler            { return r }

func (r *recorder) Handle(_ context.Context, rec slog.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.logged = append(r.logged, rec.Message)
	return nil
}

// newEngine returns an engine that is drained before the test ends.
func newEngine(t *testing.T, store idempotency.Store, change ...func(*idempotency.Config)) (*idempotency.Engine, *recorder) {
	t.Helper()
	rec := &recorder{}
	cfg := idempotency.Config{Scope: idempotency.SingleTenant, OnEvent: rec.observe, Logger: slog.New(rec)}
	for _, f := range change {
		f(&cfg)
	}
	e, err := idempotency.NewEngine(store, cfg)
	if err != nil {
		t.Fatalf("NewEngine: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		if err := e.Drain(ctx); err != nil {
			t.Errorf("Drain: %v", err)
		}
	})
	return e, rec
}

const method = "/test.Service/Call"

// do makes a call; its payload is the same for every call unless it says so.
func do(ctx context.Context, e *idempotency.Engine, key string, run func(context.Context) idempotency.Result) idempotency.Reply {
	return doWith(ctx, e, key, "payload", run)
}

func doWith(ctx context.Context, e *idempotency.Engine, key, payload string, run func(context.Context) idempotency.Result) idempotency.Reply {
	return e.Do(ctx, idempotency.Call{
		Method: method, Key: idempotency.Key{Value: key}, Request: wrapperspb.String(payload),
		NewResponse: func() proto.Message { return &wrapperspb.StringValue{} },
	}, run)
}

func idOf(key string) idempotency.ID {
	scope, _ := idempotency.SingleTenant(context.Background())
	return idempotency.IDOf(scope, method, key)
}

func ok(text string) idempotency.Result { return idempotency.Result{Response: wrapperspb.String(text)} }

func answering(res idempotency.Result) func(context.Context) idempotency.Result {
	return func(context.Context) idempotency.Result { return res }
}

// never is the handler of a call that must not run.
func never(t *testing.T) func(context.Context) idempotency.Result {
	t.Helper()
	return func(context.Context) idempotency.Result {
		t.Error("the handler ran")
		return ok("never")
	}
}

type statusError struct{ st *spb.Status }

func (e *statusError) Error() string { return e.st.GetMessage() }

func failing(c code.Code, mark func(error) error) idempotency.Result {
	st := &spb.Status{Code: int32(c), Message: "the handler's own " + c.String()}
	var err error = &statusError{st}
	if mark != nil {
		err = mark(err)
	}
	return idempotency.Result{Status: st, Err: err}
}

func wantOK(t *testing.T, r idempotency.Reply, text string, mark idempotency.Mark) {
	t.Helper()
	if r.Refusal != nil || r.Status != nil {
		t.Fatalf("the call got %v, %v: want %q", r.Refusal, r.Status, text)
	}
	if got := r.Response.(*wrapperspb.StringValue).GetValue(); got != text || r.Mark != mark || r.Executed != idempotency.ExecutedYes { //nolint:forcetypeassert // a wrong type is a failure too
		t.Errorf("the call got %q, %q, executed %v: want %q, %q, yes", got, r.Mark, r.Executed, text, mark)
	}
}

func wantError(t *testing.T, r idempotency.Reply, c code.Code, mark idempotency.Mark, executed idempotency.Executed) {
	t.Helper()
	if r.Refusal != nil {
		t.Fatalf("the call was refused: %v: want the handler's %v", r.Refusal, c)
	}
	if got := code.Code(r.Status.GetCode()); got != c || r.Mark != mark || r.Executed != executed {
		t.Errorf("the call got %v, %q, executed %v: want %v, %q, %v", got, r.Mark, r.Executed, c, mark, executed)
	}
}

func wantRefusal(t *testing.T, r idempotency.Reply, reason idempotency.Reason) {
	t.Helper()
	if r.Refusal == nil {
		t.Fatalf("the call got %v, %v: want %v", r.Response, r.Status, reason)
	}
	if r.Refusal.Reason != reason {
		t.Errorf("the call was refused with %v (%v): want %v", r.Refusal.Reason, r.Refusal, reason)
	}
	if want := codeOf[reason]; r.Refusal.Code != want {
		t.Errorf("%v has code %v: want %v", reason, r.Refusal.Code, want)
	}
	if r.Mark != idempotency.MarkNone || r.Executed != r.Refusal.Executed {
		t.Errorf("the refused call is marked %q, executed %v: want no mark, %v", r.Mark, r.Executed, r.Refusal.Executed)
	}
}

// codeOf is the table of codes, as the documentation has it.
var codeOf = map[idempotency.Reason]code.Code{
	idempotency.ReasonKeyMissing:          code.Code_INVALID_ARGUMENT,
	idempotency.ReasonKeyInvalid:          code.Code_INVALID_ARGUMENT,
	idempotency.ReasonKeyConflict:         code.Code_INVALID_ARGUMENT,
	idempotency.ReasonKeyReused:           code.Code_FAILED_PRECONDITION,
	idempotency.ReasonInFlight:            code.Code_ABORTED,
	idempotency.ReasonWaitersExceeded:     code.Code_RESOURCE_EXHAUSTED,
	idempotency.ReasonStoreFull:           code.Code_RESOURCE_EXHAUSTED,
	idempotency.ReasonScopeLimit:          code.Code_RESOURCE_EXHAUSTED,
	idempotency.ReasonStoreUnavailable:    code.Code_UNAVAILABLE,
	idempotency.ReasonOutcomePending:      code.Code_UNAVAILABLE,
	idempotency.ReasonOutcomeUnknown:      code.Code_FAILED_PRECONDITION,
	idempotency.ReasonKeyExpired:          code.Code_FAILED_PRECONDITION,
	idempotency.ReasonKeyCancelled:        code.Code_FAILED_PRECONDITION,
	idempotency.ReasonResponseNotRetained: code.Code_FAILED_PRECONDITION,
	idempotency.ReasonRecordCorrupt:       code.Code_DATA_LOSS,
	idempotency.ReasonScopeMissing:        code.Code_UNAUTHENTICATED,
	idempotency.ReasonLeaseLost:           code.Code_ABORTED,
	idempotency.ReasonTxConflict:          code.Code_ABORTED,
	idempotency.ReasonNoStore:             code.Code_FAILED_PRECONDITION,
}
