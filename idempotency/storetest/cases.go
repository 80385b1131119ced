//nolint:thelper // the functions that take a store are the tests themselves: a failure is theirs
package storetest

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/belayrpc/belay/idempotency"
)

// Cases drives engines over a store through failures that were reported of
// other implementations. Several engines on one store stand for several
// processes: they share nothing else.
func Cases(t *testing.T, newStore func(t *testing.T) idempotency.Store, opts ...Option) {
	t.Helper()
	s := newSuite(newStore, opts)
	s.test(t, "B03/ManyAtOnce", s.caseManyAtOnce)
	s.test(t, "B03/LeadersCallerGoes", s.caseLeadersCallerGoes)
	s.test(t, "B17/OtherPayload", s.caseOtherPayload)
	s.test(t, "B25/KeyIsReal", s.caseKeyIsReal)
	s.test(t, "B31/TransientThenOK", s.caseTransientThenOK)
	s.test(t, "B31/FinalKeepsItsDetails", s.caseFinalKeepsItsDetails)
	s.test(t, "B31/ReplyIsNobodysToEdit", s.caseReplyIsNobodysToEdit)
	s.test(t, "B39/WithRenewal", func(t *testing.T, store idempotency.Store) {
		t.Helper()
		s.caseSlowRenewed(t, store, false)
	})
	s.test(t, "B39/WithRenewalFirstFails", func(t *testing.T, store idempotency.Store) {
		t.Helper()
		s.caseSlowRenewed(t, store, true)
	})
	s.test(t, "B39/OneProcess", s.caseSlowInOneProcess)
	if !s.noLease {
		s.test(t, "B39/WithoutRenewal", func(t *testing.T, store idempotency.Store) {
			t.Helper()
			s.caseSlowNotRenewed(t, store, false)
		})
		s.test(t, "B39/WithoutRenewalFirstFails", func(t *testing.T, store idempotency.Store) {
			t.Helper()
			s.caseSlowNotRenewed(t, store, true)
		})
	}
	s.test(t, "B49/MapOrder", s.caseMapOrder)
}

// process is an engine on the store, as one server process has it.
func (s *suite) process(t *testing.T, store idempotency.Store, change ...func(*idempotency.Config)) *idempotency.Engine {
	t.Helper()
	cfg := idempotency.Config{
		Scope:     idempotency.SingleTenant,
		Retention: time.Hour,
		Logger:    slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&cfg)
	}
	e, err := idempotency.NewEngine(store, cfg)
	if err != nil {
		t.Fatalf("NewEngine: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := e.Drain(ctx); err != nil {
			t.Errorf("Drain: %v", err)
		}
	})
	return e
}

type handler func(ctx context.Context) idempotency.Result

// handle adds the store's effect in front of a handler's answer.
func (s *suite) handle(answer handler) handler {
	return func(ctx context.Context) idempotency.Result {
		if err := s.effect(ctx); err != nil {
			return failed(code.Code_INTERNAL, err.Error())
		}
		return answer(ctx)
	}
}

func ok(text string) idempotency.Result { return idempotency.Result{Response: wrapperspb.String(text)} }

// statusError is an error with a status, as a gRPC handler returns it.
type statusError struct{ st *spb.Status }

func (e *statusError) Error() string { return e.st.GetMessage() }

func failed(c code.Code, message string, details ...proto.Message) idempotency.Result {
	st := &spb.Status{Code: int32(c), Message: message}
	for _, d := range details {
		packed, err := anypb.New(d)
		if err != nil {
			panic(err) // a test's own message
		}
		st.Details = append(st.Details, packed)
	}
	return idempotency.Result{Status: st, Err: &statusError{st}}
}

const method = "/storetest.Cases/Call"

func do(ctx context.Context, e *idempotency.Engine, key idempotency.Key, request proto.Message, h handler) idempotency.Reply {
	return e.Do(ctx, idempotency.Call{Method: method, Key: key, Request: request}, h)
}

// mustAnswer checks an OK reply.
func mustAnswer(t *testing.T, who string, r idempotency.Reply, text string, marks ...idempotency.Mark) {
	t.Helper()
	if r.Refusal != nil {
		t.Fatalf("%s was refused: %v", who, r.Refusal)
	}
	if r.Status != nil {
		t.Fatalf("%s got status %v", who, r.Status)
	}
	if got, _ := r.Response.(*wrapperspb.StringValue); got.GetValue() != text || got == nil {
		t.Errorf("%s got %v: want %q", who, r.Response, text)
	}
	mustMark(t, who, r, marks...)
}

func mustMark(t *testing.T, who string, r idempotency.Reply, marks ...idempotency.Mark) {
	t.Helper()
	if !slices.Contains(marks, r.Mark) {
		t.Errorf("%s is marked %q: want one of %v", who, r.Mark, marks)
	}
}

func mustRefuse(t *testing.T, who string, r idempotency.Reply, c code.Code, reason idempotency.Reason) {
	t.Helper()
	if r.Refusal == nil {
		t.Fatalf("%s was answered %v, %v: want %v", who, r.Response, r.Status, reason)
	}
	if r.Refusal.Code != c || r.Refusal.Reason != reason {
		t.Errorf("%s was refused with %v %v (%v): want %v %v", who, r.Refusal.Code, r.Refusal.Reason, r.Refusal.Cause, c, reason)
	}
}

// settle waits until everybody who was started has come to where it waits.
func (s *suite) settle() {
	if s.fake {
		synctest.Wait()
		return
	}
	s.wait(100 * time.Millisecond)
}

// B03 (a): fifty calls with one key at once are one execution.
func (s *suite) caseManyAtOnce(t *testing.T, store idempotency.Store) {
	processes := []*idempotency.Engine{s.process(t, store), s.process(t, store)}
	key, request := idempotency.NewKey(), wrapperspb.String("p1")
	var exec atomic.Int32
	h := s.handle(func(context.Context) idempotency.Result {
		exec.Add(1)
		s.wait(100 * time.Millisecond)
		return ok("made once")
	})
	replies := make([]idempotency.Reply, 50)
	var wg sync.WaitGroup
	for i := range replies {
		wg.Go(func() { replies[i] = do(context.Background(), processes[i%2], key, request, h) })
	}
	wg.Wait()
	executed := 0
	for i, r := range replies {
		if r.Refusal != nil {
			mustRefuse(t, fmt.Sprintf("caller %d", i), r, code.Code_ABORTED, idempotency.ReasonInFlight)
			if r.Refusal.RetryAfter <= 0 {
				t.Errorf("caller %d was told to come back after %v: want a delay", i, r.Refusal.RetryAfter)
			}
			continue
		}
		mustAnswer(t, fmt.Sprintf("caller %d", i), r, "made once",
			idempotency.MarkExecuted, idempotency.MarkJoined, idempotency.MarkReplayed)
		if r.Mark == idempotency.MarkExecuted {
			executed++
		}
	}
	if executed != 1 {
		t.Errorf("%d replies are marked executed: want 1", executed)
	}
	for _, p := range processes {
		mustAnswer(t, "a later call", do(context.Background(), p, key, request, h), "made once", idempotency.MarkReplayed)
	}
	mustCount(t, &exec, 1)
}

func mustCount(t *testing.T, exec *atomic.Int32, want int32) {
	t.Helper()
	if n := exec.Load(); n != want {
		t.Errorf("the handler ran %d times: want %d", n, want)
	}
}

// B03 (b): the first caller goes; its execution, and those who joined, stay.
func (s *suite) caseLeadersCallerGoes(t *testing.T, store idempotency.Store) {
	e := s.process(t, store)
	key, request := idempotency.NewKey(), wrapperspb.String("p1")
	var exec atomic.Int32
	running, release := make(chan struct{}), make(chan struct{})
	h := s.handle(func(ctx context.Context) idempotency.Result {
		exec.Add(1)
		close(running)
		<-release
		if ctx.Err() != nil {
			return failed(code.Code_CANCELLED, "the handler's context ended with its caller's")
		}
		return ok("finished")
	})
	ctx, cancel := context.WithCancel(context.Background())
	leader := make(chan idempotency.Reply, 1)
	go func() { leader <- do(ctx, e, key, request, h) }()
	<-running

	followers := make(chan idempotency.Reply, 5)
	for range cap(followers) {
		go func() { followers <- do(context.Background(), e, key, request, h) }()
	}
	s.settle()
	cancel()
	mustRefuse(t, "the leader", <-leader, code.Code_CANCELLED, idempotency.ReasonCallerGone)
	close(release)
	for range cap(followers) {
		mustAnswer(t, "a follower", <-followers, "finished", idempotency.MarkJoined)
	}
	mustAnswer(t, "a later call", do(context.Background(), e, key, request, h), "finished", idempotency.MarkReplayed)
	mustCount(t, &exec, 1)
}

// B17: one key, another payload, while the first runs and after it.
func (s *suite) caseOtherPayload(t *testing.T, store idempotency.Store) {
	e, elsewhere := s.process(t, store), s.process(t, store)
	key, p1, p2 := idempotency.NewKey(), wrapperspb.String("p1"), wrapperspb.String("p2")
	var exec atomic.Int32
	running, release := make(chan struct{}), make(chan struct{})
	h := s.handle(func(context.Context) idempotency.Result {
		if exec.Add(1) == 1 {
			close(running)
		}
		<-release
		return ok("for p1")
	})
	first := make(chan idempotency.Reply, 1)
	go func() { first <- do(context.Background(), e, key, p1, h) }()
	<-running

	refuse := func(when string, e *idempotency.Engine) {
		t.Helper()
		r := do(context.Background(), e, key, p2, h)
		mustRefuse(t, when, r, code.Code_FAILED_PRECONDITION, idempotency.ReasonKeyReused)
		if r.Refusal.RetryAfter >= 0 || r.Executed != idempotency.ExecutedNo {
			t.Errorf("%s: retry after %v, executed %v: want never and no", when, r.Refusal.RetryAfter, r.Executed)
		}
	}
	refuse("while p1 runs", e)
	if !s.noLease { // there, another process waits for the row and then reads it
		refuse("while p1 runs in another process", elsewhere)
	}
	close(release)
	mustAnswer(t, "p1", <-first, "for p1", idempotency.MarkExecuted)
	refuse("after p1", e)
	refuse("after p1 in another process", elsewhere)
	mustAnswer(t, "p1 again", do(context.Background(), e, key, p1, h), "for p1", idempotency.MarkReplayed)
	mustAnswer(t, "p1 elsewhere", do(context.Background(), elsewhere, key, p1, h), "for p1", idempotency.MarkReplayed)
	mustCount(t, &exec, 1)
}

// B25 (b), (e), (f), as far as a server sees them: what is not a key is refused
// and never shares a record; what looks poor and is one passes.
func (s *suite) caseKeyIsReal(t *testing.T, store idempotency.Store) {
	e := s.process(t, store)
	var exec atomic.Int32
	h := s.handle(func(context.Context) idempotency.Result {
		return ok(strconv.Itoa(int(exec.Add(1))))
	})
	for _, value := range []string{"", " ", "  ", "kéy", "a b", "tab\t", "nul\x00", string(bytes.Repeat([]byte("k"), 256))} {
		for _, payload := range []string{"p1", "p2"} {
			r := do(context.Background(), e, idempotency.Key{Value: value}, wrapperspb.String(payload), h)
			mustRefuse(t, fmt.Sprintf("key %q", value), r, code.Code_INVALID_ARGUMENT, idempotency.ReasonKeyInvalid)
		}
	}
	mustCount(t, &exec, 0)

	key := idempotency.Key{Value: "k1"} // of a foreign client: no first-sent time
	mustAnswer(t, "k1", do(context.Background(), e, key, wrapperspb.String("p1"), h), "1", idempotency.MarkExecuted)
	mustAnswer(t, "k1 again", do(context.Background(), e, key, wrapperspb.String("p1"), h), "1", idempotency.MarkReplayed)
	key.Value = "K1"
	mustAnswer(t, "K1, another key", do(context.Background(), e, key, wrapperspb.String("p1"), h), "2", idempotency.MarkExecuted)
}

// B31 (a): a transient failure is no answer for good.
func (s *suite) caseTransientThenOK(t *testing.T, store idempotency.Store) {
	e := s.process(t, store)
	key, request := idempotency.NewKey(), wrapperspb.String("p1")
	var exec atomic.Int32
	h := s.handle(func(context.Context) idempotency.Result {
		switch exec.Add(1) {
		case 1:
			res := failed(code.Code_UNAVAILABLE, "a blip")
			if !s.releasesOnError(store) {
				res.Err = idempotency.NoEffect(res.Err)
			}
			return res
		case 2:
			return ok("second")
		default:
			return ok("different")
		}
	})
	r := do(context.Background(), e, key, request, h)
	if r.Refusal != nil || r.Status.GetCode() != int32(code.Code_UNAVAILABLE) || r.Status.GetMessage() != "a blip" {
		t.Fatalf("the first call got %v, %v: want the handler's own UNAVAILABLE", r.Refusal, r.Status)
	}
	mustAnswer(t, "the second call", do(context.Background(), e, key, request, h), "second", idempotency.MarkExecuted)
	mustAnswer(t, "the third call", do(context.Background(), e, key, request, h), "second", idempotency.MarkReplayed)
	mustCount(t, &exec, 2)
}

func (s *suite) releasesOnError(store idempotency.Store) bool {
	if s.atomic {
		return true
	}
	d, described := store.(idempotency.Described)
	return described && d.Traits().ReleaseOnError
}

// B31 (b): a final error is replayed with all it had.
func (s *suite) caseFinalKeepsItsDetails(t *testing.T, store idempotency.Store) {
	e := s.process(t, store)
	key, request := idempotency.NewKey(), wrapperspb.String("p1")
	var exec atomic.Int32
	h := s.handle(func(context.Context) idempotency.Result {
		exec.Add(1)
		return failed(code.Code_FAILED_PRECONDITION, "the account is frozen", &errdetails.PreconditionFailure{
			Violations: []*errdetails.PreconditionFailure_Violation{{Type: "ACCOUNT", Subject: "a-1", Description: "frozen"}},
		}, &errdetails.ErrorInfo{Reason: "FROZEN", Domain: "bank", Metadata: map[string]string{"a": "1", "b": "2", "c": "3"}})
	})
	first := do(context.Background(), e, key, request, h)
	second := do(context.Background(), e, key, request, h)
	mustMark(t, "the first call", first, idempotency.MarkExecuted)
	mustMark(t, "the second call", second, idempotency.MarkReplayed)
	a, b := first.Status, second.Status
	if a.GetCode() != int32(code.Code_FAILED_PRECONDITION) || a.GetCode() != b.GetCode() || a.GetMessage() != b.GetMessage() || len(a.GetDetails()) != len(b.GetDetails()) {
		t.Fatalf("the replay is %v: want %v", b, a)
	}
	for i := range a.GetDetails() {
		if a.GetDetails()[i].GetTypeUrl() != b.GetDetails()[i].GetTypeUrl() || !bytes.Equal(a.GetDetails()[i].GetValue(), b.GetDetails()[i].GetValue()) {
			t.Errorf("detail %d is %v: want %v, byte for byte", i, b.GetDetails()[i], a.GetDetails()[i])
		}
	}
	mustCount(t, &exec, 1)
}

// B31 (c): whoever gets a reply may edit it, and nobody else sees that.
func (s *suite) caseReplyIsNobodysToEdit(t *testing.T, store idempotency.Store) {
	e := s.process(t, store)
	key, request := idempotency.NewKey(), wrapperspb.String("p1")
	running, release := make(chan struct{}), make(chan struct{})
	h := s.handle(func(context.Context) idempotency.Result {
		close(running)
		<-release
		return ok("as the handler wrote it")
	})
	var wg sync.WaitGroup
	call := func() {
		r := do(context.Background(), e, key, request, h)
		mustAnswer(t, "a caller", r, "as the handler wrote it", idempotency.MarkExecuted, idempotency.MarkJoined, idempotency.MarkReplayed)
		r.Response.(*wrapperspb.StringValue).Value = "edited" //nolint:forcetypeassert // mustAnswer has seen it
	}
	wg.Go(call)
	<-running
	for range 4 {
		wg.Go(call)
	}
	s.settle()
	close(release)
	wg.Wait()
	call()
	call()
}

// timeline is the script of B39: four calls at their times since the first one's
// handler began, each in a process of its own. A busy machine is late, so what the
// script means by a time, that another call has ended by then, is waited for.
type timeline struct {
	handlers [4]handler
	after    map[int]int // a call, and which must have ended before it begins
	ended    [4]chan struct{}
}

func newTimeline() *timeline {
	return &timeline{ended: [4]chan struct{}{make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})}}
}

// play runs the calls and returns their replies.
func (s *suite) play(t *testing.T, store idempotency.Store, line *timeline, change func(*idempotency.Config)) [4]idempotency.Reply {
	t.Helper()
	at := [4]time.Duration{0, s.ms(320), s.ms(450), s.ms(720)}
	key, request := idempotency.NewKey(), wrapperspb.String("p1")
	var replies [4]idempotency.Reply
	var wg sync.WaitGroup
	begun := make(chan struct{})
	first := line.handlers[0]
	line.handlers[0] = func(ctx context.Context) idempotency.Result {
		close(begun)
		return first(ctx)
	}
	var start time.Time
	for i := range at {
		e := s.process(t, store, change)
		if i == 1 {
			select {
			case <-begun:
			case <-line.ended[0]: // refused, which the caller will find
			}
			start = time.Now()
		}
		if i > 0 {
			s.wait(time.Until(start.Add(at[i])))
		}
		if before, ok := line.after[i]; ok {
			<-line.ended[before]
		}
		wg.Go(func() {
			defer close(line.ended[i])
			replies[i] = do(context.Background(), e, key, request, s.handle(line.handlers[i]))
		})
	}
	wg.Wait()
	return replies
}

// B39, no renewals, with a takeover declared safe: the second owner's record is
// not touched by the first's late end.
func (s *suite) caseSlowNotRenewed(t *testing.T, store idempotency.Store, firstFails bool) {
	var exec atomic.Int32
	work := func(d time.Duration, res idempotency.Result) handler {
		return func(context.Context) idempotency.Result {
			exec.Add(1)
			s.wait(d)
			return res
		}
	}
	first := ok("A")
	if firstFails {
		first = failed(code.Code_UNAVAILABLE, "A failed")
		first.Err = idempotency.NoEffect(first.Err)
	}
	line := newTimeline()
	line.handlers = [4]handler{work(s.ms(400), first), work(s.ms(250), ok("B")), work(0, ok("C")), work(0, ok("D"))}
	line.after = map[int]int{3: 1}
	r := s.play(t, store, line, func(cfg *idempotency.Config) {
		cfg.Lease, cfg.DisableRenewal, cfg.Rerun, cfg.WaitMax = s.ms(300), true, true, s.ms(30)
	})

	switch {
	case firstFails:
		if r[0].Refusal == nil && r[0].Status.GetCode() != int32(code.Code_UNAVAILABLE) {
			t.Errorf("A got %v, %v: want its own error, or a refusal", r[0].Response, r[0].Status)
		}
	case s.atomic:
		mustRefuse(t, "A", r[0], code.Code_ABORTED, idempotency.ReasonLeaseLost)
	default:
		mustAnswer(t, "A", r[0], "A", idempotency.MarkUnrecorded)
	}
	mustAnswer(t, "B", r[1], "B", idempotency.MarkExecuted)
	mustRefuse(t, "C", r[2], code.Code_ABORTED, idempotency.ReasonInFlight)
	mustAnswer(t, "D", r[3], "B", idempotency.MarkReplayed)
	mustCount(t, &exec, 2)
}

// B39, renewed: one execution, however slow.
func (s *suite) caseSlowRenewed(t *testing.T, store idempotency.Store, firstFails bool) {
	var exec atomic.Int32
	first := ok("A")
	if firstFails {
		first = failed(code.Code_UNAVAILABLE, "A failed")
		first.Err = idempotency.NoEffect(first.Err)
	}
	line := newTimeline()
	answer := func(res idempotency.Result) handler {
		return func(context.Context) idempotency.Result {
			exec.Add(1)
			return res
		}
	}
	slow := func(ctx context.Context) idempotency.Result {
		exec.Add(1)
		s.wait(s.ms(400))
		select {
		case <-line.ended[1]: // B comes while A works
		case <-ctx.Done(): // or waits for A, which it must not
		}
		return first
	}
	line.handlers = [4]handler{slow, answer(ok("B")), answer(ok("C")), answer(ok("D"))}
	line.after = map[int]int{2: 0, 3: 2}
	r := s.play(t, store, line, func(cfg *idempotency.Config) {
		cfg.Lease, cfg.Rerun, cfg.WaitMax = s.ms(300), true, s.ms(30)
	})

	if s.noLease && r[1].Refusal != nil && r[1].Refusal.Reason == idempotency.ReasonStoreUnavailable {
		// The claim waits for the row of A's transaction, longer than WaitMax here.
		mustRefuse(t, "B", r[1], code.Code_UNAVAILABLE, idempotency.ReasonStoreUnavailable)
	} else {
		mustRefuse(t, "B", r[1], code.Code_ABORTED, idempotency.ReasonInFlight)
	}
	if firstFails {
		if r[0].Status.GetCode() != int32(code.Code_UNAVAILABLE) {
			t.Errorf("A got %v, %v: want its own error", r[0].Refusal, r[0].Status)
		}
		mustAnswer(t, "C", r[2], "C", idempotency.MarkExecuted)
		mustAnswer(t, "D", r[3], "C", idempotency.MarkReplayed)
		mustCount(t, &exec, 2)
		return
	}
	mustAnswer(t, "A", r[0], "A", idempotency.MarkExecuted)
	mustAnswer(t, "C", r[2], "A", idempotency.MarkReplayed)
	mustAnswer(t, "D", r[3], "A", idempotency.MarkReplayed)
	mustCount(t, &exec, 1)
}

// ms is a time of B39's script: as the case has it in fake time, three times as
// long where a machine may be busy with other things.
func (s *suite) ms(n int) time.Duration {
	if !s.fake {
		n *= 3
	}
	return time.Duration(n) * time.Millisecond
}

// B39 in one process: a duplicate joins, whatever the lease says.
func (s *suite) caseSlowInOneProcess(t *testing.T, store idempotency.Store) {
	e := s.process(t, store, func(cfg *idempotency.Config) {
		cfg.Lease, cfg.DisableRenewal, cfg.Rerun = s.ms(300), true, true
	})
	key, request := idempotency.NewKey(), wrapperspb.String("p1")
	var exec atomic.Int32
	h := s.handle(func(context.Context) idempotency.Result {
		exec.Add(1)
		s.wait(s.ms(400))
		return ok("A")
	})
	first := make(chan idempotency.Reply, 1)
	go func() { first <- do(context.Background(), e, key, request, h) }()
	s.wait(s.ms(320))
	mustAnswer(t, "B", do(context.Background(), e, key, request, h), "A", idempotency.MarkJoined)
	mustAnswer(t, "A", <-first, "A", idempotency.MarkExecuted)
	mustAnswer(t, "C", do(context.Background(), e, key, request, h), "A", idempotency.MarkReplayed)
	mustCount(t, &exec, 1)
}

// B49: equal requests, whose map entries Go encodes in a new order every time.
func (s *suite) caseMapOrder(t *testing.T, store idempotency.Store) {
	processes := []*idempotency.Engine{s.process(t, store), s.process(t, store)}
	entries := make(map[string]string, 20)
	for i := range 20 {
		entries[fmt.Sprintf("key-%02d", i)] = fmt.Sprintf("value-%d", i)
	}
	for name, request := range map[string]func(map[string]string) proto.Message{
		"map": func(m map[string]string) proto.Message {
			return shuffled(t, &errdetails.ErrorInfo{Reason: "ORDER", Metadata: m})
		},
		"map in Any": func(m map[string]string) proto.Message {
			fields := make(map[string]*structpb.Value, len(m))
			for k, v := range m {
				fields[k] = structpb.NewStringValue(v)
			}
			return shuffled(t, &spb.Status{Details: []*anypb.Any{packed(t, &structpb.Struct{Fields: fields})}})
		},
	} {
		key := idempotency.NewKey()
		var exec atomic.Int32
		h := s.handle(func(context.Context) idempotency.Result {
			exec.Add(1)
			return ok("ordered")
		})
		calls := 500
		if !s.fake {
			calls = 50 // a database takes its time, and the store is not what is asked here
		}
		replays := 0
		for i := range calls {
			r := do(context.Background(), processes[i%2], key, request(entries), h)
			mustAnswer(t, name, r, "ordered", idempotency.MarkExecuted, idempotency.MarkReplayed)
			if r.Mark == idempotency.MarkReplayed {
				replays++
			}
		}
		if replays != calls-1 {
			t.Errorf("%s: %d replays: want %d", name, replays, calls-1)
		}
		changed, dropped := maps.Clone(entries), maps.Clone(entries)
		changed["key-07"] = "another"
		delete(dropped, "key-07")
		for what, m := range map[string]map[string]string{"a changed value": changed, "a dropped entry": dropped} {
			mustRefuse(t, name+", "+what, do(context.Background(), processes[0], key, request(m), h),
				code.Code_FAILED_PRECONDITION, idempotency.ReasonKeyReused)
		}
		mustCount(t, &exec, 1)
	}
}

// shuffled sends a message over the wire, where its maps lose their order.
func shuffled(t *testing.T, m proto.Message) proto.Message {
	t.Helper()
	out := m.ProtoReflect().New().Interface()
	if err := proto.Unmarshal(encoded(t, m), out); err != nil {
		t.Fatal(err)
	}
	return out
}

func packed(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	// Not anypb.New: it sorts, and a client in another language need not.
	return &anypb.Any{TypeUrl: "type.googleapis.com/" + string(m.ProtoReflect().Descriptor().FullName()), Value: encoded(t, m)}
}

func encoded(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
