package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// faultyStore is a store whose answers a test spoils. A nil function spoils nothing.
type faultyStore struct {
	idempotency.Store

	begin  func() error
	finish func() error
	atomic bool // its executions claim to be transactions
}

func (s *faultyStore) Begin(ctx context.Context, c idempotency.Claim) (idempotency.Execution, *idempotency.Record, error) {
	if s.begin != nil {
		if err := s.begin(); err != nil {
			return nil, nil, err
		}
	}
	exec, rec, err := s.Store.Begin(ctx, c)
	if exec != nil {
		exec = &faultyExecution{exec, s}
	}
	return exec, rec, err
}

type faultyExecution struct {
	idempotency.Execution

	store *faultyStore
}

func (x *faultyExecution) Atomic() bool { return x.store.atomic }

func (x *faultyExecution) Finish(ctx context.Context, o *idempotency.Outcome) (*idempotency.Record, error) {
	if x.store.finish != nil {
		if err := x.store.finish(); err != nil {
			if errors.Is(err, idempotency.ErrConflict) { // says that all is undone
				return nil, errors.Join(err, x.Release(ctx))
			}
			return nil, err
		}
	}
	return x.Execution.Finish(ctx, o)
}

// What stands in the trailer grpc-retry-pushback-ms.
type pushbackKind string

const (
	noPushback pushbackKind = "none"
	never      pushbackKind = "never"
	aDelay     pushbackKind = "a delay"
)

func pushbackOf(trailer metadata.MD) pushbackKind {
	switch v := trailer.Get(pushbackKey); {
	case len(v) == 0:
		return noPushback
	case len(v) == 1 && v[0] == "-1":
		return never
	case len(v) == 1 && !strings.HasPrefix(v[0], "-") && v[0] != "0":
		return aDelay
	default:
		return pushbackKind(fmt.Sprintf("nonsense %q", v))
	}
}

// Every answer that dedupe gives in the handler's place, as a client in any
// language sees it: code, reason, details, trailers, and what ran.
func TestEveryRefusal(t *testing.T) {
	const k = "k1"
	id := idempotency.IDOf("single-tenant", probe.Keyed, k)
	withKeys := func(keys ...string) func(context.Context) context.Context {
		return func(ctx context.Context) context.Context {
			for _, k := range keys {
				ctx = metadata.AppendToOutgoingContext(ctx, keyKey, k) //nolint:fatcontext // at most two
			}
			return ctx
		}
	}
	firstSent := func(at func() time.Time) func(context.Context) context.Context {
		return func(ctx context.Context) context.Context {
			return metadata.AppendToOutgoingContext(ctx, keyKey, k, "idempotency-first-sent", idempotency.FormatFirstSent(at()))
		}
	}
	// run makes a call with k and this text, whose handler does the step.
	run := func(t *testing.T, r *rig, text string, step probe.Step) error {
		t.Helper()
		r.srv.Script(probe.Keyed, step)
		_, err := probe.Call(withKeys(k)(t.Context()), r.conn, probe.Keyed, request(text))
		return err
	}
	type row struct {
		name    string
		method  string // default Keyed
		cfg     idempotency.Config
		memory  idempotency.MemoryConfig
		faults  faultyStore
		noStore bool
		before  func(t *testing.T, r *rig, store idempotency.Store)
		ctx     func(context.Context) context.Context // default: with k
		req     *probev1.Request
		timeout time.Duration

		code     codes.Code
		reason   idempotency.Reason // "": the handler's or gRPC's own answer
		meta     string             // key=value that the ErrorInfo has
		details  []string           // beside ErrorInfo
		executed string
		pushback pushbackKind
		ran      int // handler runs of the refused call itself
	}
	violation := "PreconditionFailure " + id.String()
	for _, c := range []row{
		{
			name: "key missing", ctx: withKeys(),
			code: codes.InvalidArgument, reason: "KEY_MISSING", details: []string{"BadRequest metadata.idempotency-key"}, executed: "no", pushback: noPushback,
		},
		{
			name: "key missing in its field", method: probe.KeyedField, ctx: withKeys(),
			code: codes.InvalidArgument, reason: "KEY_MISSING", details: []string{"BadRequest request_id"}, executed: "no", pushback: noPushback,
		},
		{
			name: "key malformed", ctx: withKeys("a b"),
			code: codes.InvalidArgument, reason: "KEY_INVALID", meta: "maxLength=255", details: []string{"BadRequest metadata.idempotency-key"}, executed: "no", pushback: noPushback,
		},
		{
			name: "key too long", ctx: withKeys(strings.Repeat("k", 256)),
			code: codes.InvalidArgument, reason: "KEY_INVALID", meta: "maxLength=255", details: []string{"BadRequest metadata.idempotency-key"}, executed: "no", pushback: noPushback,
		},
		{
			name: "key shorter than the server asks", cfg: idempotency.Config{MinKeyLength: 16},
			code: codes.InvalidArgument, reason: "KEY_INVALID", details: []string{"BadRequest metadata.idempotency-key"}, executed: "no", pushback: noPushback,
		},
		{
			name: "two keys", ctx: withKeys("k1", "k2"),
			code: codes.InvalidArgument, reason: "KEY_INVALID", details: []string{"BadRequest metadata.idempotency-key"}, executed: "no", pushback: noPushback,
		},
		{
			name: "first sent in the future", ctx: firstSent(func() time.Time { return time.Now().Add(time.Hour) }),
			code: codes.InvalidArgument, reason: "KEY_INVALID", details: []string{"BadRequest metadata.idempotency-key"}, executed: "no", pushback: noPushback,
		},
		{
			name: "first sent is no time",
			ctx: func(ctx context.Context) context.Context {
				return metadata.AppendToOutgoingContext(ctx, keyKey, k, "idempotency-first-sent", "yesterday")
			},
			code: codes.InvalidArgument, reason: "KEY_INVALID", details: []string{"BadRequest metadata.idempotency-key"}, executed: "no", pushback: noPushback,
		},
		{
			name: "metadata and field differ", method: probe.KeyedField, req: &probev1.Request{RequestId: "another"},
			code: codes.InvalidArgument, reason: "KEY_CONFLICT", details: []string{"BadRequest request_id"}, executed: "no", pushback: noPushback,
		},
		{
			name:   "another request, done",
			before: func(t *testing.T, r *rig, _ idempotency.Store) { wantOK(t, run(t, r, "another", probe.Step{})) },
			code:   codes.FailedPrecondition, reason: "KEY_REUSED", details: []string{violation}, executed: "no", pushback: noPushback,
		},
		{
			name: "in flight", cfg: idempotency.Config{WaitMax: 10 * time.Millisecond},
			before: func(t *testing.T, r *rig, _ idempotency.Store) {
				r.srv.Script(probe.Keyed, probe.Step{Delay: time.Second, Deaf: true})
				ctx := withKeys(k)(t.Context())
				go func() { _, _ = probe.Call(ctx, r.conn, probe.Keyed, request("x")) }()
				settle()
			},
			code: codes.Aborted, reason: "IN_FLIGHT", details: []string{"RetryInfo"}, executed: "maybe", pushback: aDelay,
		},
		{
			name: "in flight, and no time to wait", timeout: 20 * time.Millisecond,
			before: func(t *testing.T, r *rig, _ idempotency.Store) {
				r.srv.Script(probe.Keyed, probe.Step{Delay: time.Second, Deaf: true})
				ctx := withKeys(k)(t.Context())
				go func() { _, _ = probe.Call(ctx, r.conn, probe.Keyed, request("x")) }()
				settle()
			},
			code: codes.Aborted, reason: "IN_FLIGHT", details: []string{"RetryInfo"}, executed: "maybe", pushback: aDelay,
		},
		{
			name: "too many waiters", cfg: idempotency.Config{Waiters: 1},
			before: func(t *testing.T, r *rig, _ idempotency.Store) {
				r.srv.Script(probe.Keyed, probe.Step{Delay: time.Second, Deaf: true})
				ctx := withKeys(k)(t.Context())
				for range 2 {
					go func() { _, _ = probe.Call(ctx, r.conn, probe.Keyed, request("x")) }()
					settle()
				}
			},
			code: codes.ResourceExhausted, reason: "WAITERS_EXCEEDED", details: []string{"RetryInfo"}, executed: "maybe", pushback: aDelay,
		},
		{
			name: "the store is busy", faults: faultyStore{begin: func() error { return idempotency.ErrBusy }},
			code: codes.ResourceExhausted, reason: "WAITERS_EXCEEDED", details: []string{"RetryInfo"}, executed: "maybe", pushback: aDelay,
		},
		{
			name: "the store is full", memory: idempotency.MemoryConfig{MaxBytes: 400},
			before: func(t *testing.T, r *rig, _ idempotency.Store) {
				_, err := probe.Call(withKeys("k0")(t.Context()), r.conn, probe.Keyed, request("x"))
				wantOK(t, err)
			},
			code: codes.ResourceExhausted, reason: "STORE_FULL", executed: "no", pushback: never,
		},
		{
			name: "the caller's limit", cfg: idempotency.Config{Limit: func(context.Context, string, string) error { return errors.New("too many") }},
			code: codes.ResourceExhausted, reason: "SCOPE_LIMIT", executed: "no", pushback: never,
		},
		{
			name: "the store is down", faults: faultyStore{begin: func() error { return errors.New("dial tcp 10.0.0.7: refused") }},
			code: codes.Unavailable, reason: "STORE_UNAVAILABLE", meta: "executed=no", details: []string{"RetryInfo"}, executed: "no", pushback: aDelay,
		},
		{
			name: "the record cannot be read", faults: faultyStore{begin: func() error { return idempotency.ErrCorrupt }},
			code: codes.DataLoss, reason: "RECORD_CORRUPT", executed: "maybe", pushback: never,
		},
		{
			name: "an execution without a verdict",
			before: func(t *testing.T, r *rig, _ idempotency.Store) {
				wantCode(t, run(t, r, "x", probe.Step{Code: codes.Internal}), codes.Internal)
			},
			code: codes.FailedPrecondition, reason: "OUTCOME_UNKNOWN", meta: "newKeySafe=false", details: []string{violation}, executed: "maybe", pushback: noPushback,
		},
		{
			name: "an execution without a verdict, reconciled soon", cfg: idempotency.Config{UnknownRetryAfter: time.Second},
			before: func(t *testing.T, r *rig, _ idempotency.Store) {
				wantCode(t, run(t, r, "x", probe.Step{Code: codes.Internal}), codes.Internal)
			},
			code: codes.Aborted, reason: "OUTCOME_UNKNOWN", details: []string{"RetryInfo", violation}, executed: "maybe", pushback: aDelay,
		},
		{
			name: "too old to be sure", ctx: firstSent(func() time.Time { return time.Now().Add(-24 * time.Hour) }),
			code: codes.FailedPrecondition, reason: "KEY_EXPIRED", meta: "acceptWindow=23h57m30s", details: []string{violation}, executed: "maybe", pushback: noPushback,
		},
		{
			name: "cancelled by a person",
			before: func(t *testing.T, _ *rig, store idempotency.Store) {
				wantOK(t, store.Resolve(t.Context(), id, idempotency.Resolution{State: idempotency.StateCancelled}))
			},
			code: codes.FailedPrecondition, reason: "KEY_CANCELLED", details: []string{violation}, executed: "no", pushback: noPushback,
		},
		{
			name: "the reply was too large to keep", cfg: idempotency.Config{MaxReply: 1},
			before: func(t *testing.T, r *rig, _ idempotency.Store) { wantOK(t, run(t, r, "x", probe.Step{})) },
			code:   codes.FailedPrecondition, reason: "RESPONSE_NOT_RETAINED", meta: "originalCode=OK", details: []string{violation}, executed: "yes", pushback: noPushback,
		},
		{
			name: "no principal", cfg: idempotency.Config{Scope: func(context.Context) (string, error) { return "", errors.New("anonymous") }},
			code: codes.Unauthenticated, reason: "SCOPE_MISSING", executed: "no", pushback: noPushback,
		},
		{
			name: "an empty principal", cfg: idempotency.Config{Scope: func(context.Context) (string, error) { return "", nil }},
			code: codes.Unauthenticated, reason: "SCOPE_MISSING", executed: "no", pushback: noPushback,
		},
		{
			name: "no TLS, no principal", cfg: idempotency.Config{Scope: idempotency.ScopeFromTLS},
			code: codes.Unauthenticated, reason: "SCOPE_MISSING", executed: "no", pushback: noPushback,
		},
		{
			name: "no store", noStore: true,
			code: codes.FailedPrecondition, reason: "NO_STORE", executed: "no", pushback: noPushback,
		},
		{
			name: "no store and no key", noStore: true, ctx: withKeys(),
			code: codes.FailedPrecondition, reason: "NO_STORE", executed: "no", pushback: noPushback,
		},
		{
			name: "the transaction lost its claim", faults: faultyStore{atomic: true, finish: func() error { return idempotency.ErrLost }},
			code: codes.Aborted, reason: "LEASE_LOST", details: []string{"RetryInfo"}, executed: "maybe", pushback: aDelay, ran: 1,
		},
		{
			name: "the transaction conflicted", faults: faultyStore{atomic: true, finish: func() error { return idempotency.ErrConflict }},
			code: codes.Aborted, reason: "TX_CONFLICT", details: []string{"RetryInfo"}, executed: "no", pushback: aDelay, ran: 1,
		},
		{
			name: "the commit's fate is open", faults: faultyStore{atomic: true, finish: func() error { return idempotency.ErrInDoubt }},
			code: codes.Unavailable, reason: "OUTCOME_PENDING", meta: "executed=maybe", details: []string{"RetryInfo"}, executed: "maybe", pushback: aDelay, ran: 1,
		},
		{
			name: "the commit failed", faults: faultyStore{atomic: true, finish: func() error { return errors.New("down") }},
			code: codes.Unavailable, reason: "STORE_UNAVAILABLE", meta: "executed=no", details: []string{"RetryInfo"}, executed: "no", pushback: aDelay, ran: 1,
		},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			s := setup{plainClient: true}
			store := idempotency.NewMemoryStore(c.memory)
			faults := c.faults
			faults.Store = store
			if c.noStore {
				s.asShipped = true
			} else {
				s.server = []interceptors.ServerOption{stored(&faults, c.cfg)}
			}
			r := start(t, s)
			if c.before != nil {
				c.before(t, r, store)
			}
			if c.ctx == nil {
				c.ctx = withKeys(k)
			}
			if c.method == "" {
				c.method = probe.Keyed
			}
			if c.req == nil {
				c.req = request("x")
			}
			if c.timeout == 0 {
				c.timeout = 10 * time.Second
			}
			before := r.srv.Hits(c.method)
			ctx, cancel := context.WithTimeout(c.ctx(t.Context()), c.timeout)
			defer cancel()
			var header, trailer metadata.MD
			_, err := probe.Call(ctx, r.conn, c.method, c.req, grpc.Header(&header), grpc.Trailer(&trailer))

			wantReason(t, err, c.code, c.reason)
			if c.meta != "" {
				name, value, _ := strings.Cut(c.meta, "=")
				wantEqual(t, "ErrorInfo "+name, infoOf(err).GetMetadata()[name], value)
			}
			wantEqual(t, "details", strings.Join(detailNames(err), ", "), strings.Join(c.details, ", "))
			wantEqual(t, "executed", one(trailer, executedKey), c.executed)
			wantEqual(t, "reason", one(trailer, reasonKey), string(c.reason))
			wantEqual(t, "pushback", pushbackOf(trailer), c.pushback)
			wantEqual(t, "status", one(trailer, statusKey), "")
			wantEqual(t, "handler runs", r.srv.Hits(c.method)-before, c.ran)
			if len(header) > 0 {
				t.Errorf("header %v beside a refusal, which must be trailers only", header)
			}
			defer time.Sleep(2 * time.Second) // an execution outlives its callers, and the bubble must not end before it
			if strings.Contains(err.Error(), "10.0.0.7") || strings.Contains(err.Error(), k) {
				t.Errorf("error %v tells what is not the caller's to know", err)
			}
		})
	}
}

// detailNames are an error's details without ErrorInfo, with their subject.
func detailNames(err error) []string {
	var names []string
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
		case *errdetails.RetryInfo:
			names = append(names, "RetryInfo")
		case *errdetails.BadRequest:
			names = append(names, "BadRequest "+d.GetFieldViolations()[0].GetField())
		case *errdetails.PreconditionFailure:
			names = append(names, "PreconditionFailure "+d.GetViolations()[0].GetSubject())
		default:
			names = append(names, fmt.Sprintf("%T", d))
		}
	}
	return names
}

// A client with Belay does with each refusal what it says.
func TestRefusalsAsTheClientTakesThem(t *testing.T) {
	failures := func(n int, err error) func() error {
		return func() error {
			if n--; n >= 0 {
				return err
			}
			return nil
		}
	}
	for _, c := range []struct {
		name     string
		faults   faultyStore
		code     codes.Code
		attempts int
		effects  int
	}{
		// Three claims per attempt.
		{"the store comes back", faultyStore{begin: failures(3, errors.New("down"))}, codes.OK, 2, 1},
		{"a conflict", faultyStore{atomic: true, finish: failures(1, idempotency.ErrConflict)}, codes.OK, 2, 0},
		{"corrupt", faultyStore{begin: failures(100, idempotency.ErrCorrupt)}, codes.DataLoss, 1, 0},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			faults := c.faults
			faults.Store = idempotency.NewMemoryStore(idempotency.MemoryConfig{})
			r := start(t, setup{server: []interceptors.ServerOption{stored(&faults, idempotency.Config{})}})
			_, err := r.call(t, probe.Keyed, request("x"))
			wantCode(t, err, c.code)
			wantEqual(t, "attempts", r.counter.Count(), c.attempts)
		})
	}

	// Asking about an execution under way is no attempt, costs nothing and ends
	// with its answer.
	bubbles(t, "in flight", func(t *testing.T) {
		seen := new(events)
		r := start(t, setup{
			asShipped: true,
			client:    []interceptors.ClientOption{interceptors.WithObserver(seen)},
			server:    []interceptors.ServerOption{memory(idempotency.Config{WaitMax: 10 * time.Millisecond})},
		})
		r.srv.Script(probe.Keyed, probe.Step{Delay: 5 * time.Second, Deaf: true})
		same := key("k1")
		first := make(chan error, 1)
		go func() {
			_, err := probe.Call(t.Context(), r.conn, probe.Keyed, request("x"), same)
			first <- err
		}()
		settle()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		// Not even where a single attempt is allowed.
		_, err := probe.Call(ctx, r.conn, probe.Keyed, request("x"), same, interceptors.Override(policy.Policy{MaxAttempts: 1}))
		wantOK(t, err)
		wantOK(t, <-first)
		for _, e := range seen.list() {
			if e.Kind == interceptors.EventCall {
				wantEqual(t, "attempts of a call", e.Attempt, 1)
			}
		}
		wantBetween(t, "elapsed", time.Since(began), 5*time.Second, 5600*time.Millisecond)
		if n := seen.count(interceptors.EventPoll); n < 8 {
			t.Errorf("%d polls in 5 s, want them about half a second apart", n)
		}
		wantEqual(t, "backoffs", seen.count(interceptors.EventBackoff), 0)
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
		if s := r.client.Budget(r.conn).Snapshot(); s.Withdrawals != 0 {
			t.Errorf("%d withdrawals for questions", s.Withdrawals)
		}
	})

	bubbles(t, "in flight until the deadline", func(t *testing.T) {
		r := start(t, setup{server: []interceptors.ServerOption{memory(idempotency.Config{WaitMax: 10 * time.Millisecond})}})
		r.srv.Script(probe.Keyed, probe.Step{Delay: 5 * time.Second, Deaf: true})
		same := key("k1")
		first := make(chan error, 1)
		go func() {
			_, err := probe.Call(t.Context(), r.conn, probe.Keyed, request("x"), same)
			first <- err
		}()
		settle()
		_, err := r.call(t, probe.Keyed, request("x"), same)
		wantReason(t, err, codes.Aborted, idempotency.ReasonInFlight)
		wantStop(t, err, interceptors.DeadlineTooShort, interceptors.Maybe)
		wantOK(t, <-first)
	})
}

// The effect is done and its record is not: true for this caller, said so, and
// nobody runs it again.
func TestUnrecorded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		faults := &faultyStore{
			Store:  idempotency.NewMemoryStore(idempotency.MemoryConfig{}),
			finish: func() error { return errors.New("down") },
		}
		r := start(t, setup{server: []interceptors.ServerOption{stored(faults, idempotency.Config{})}})
		same := key("k1")
		var header, trailer metadata.MD
		resp, err := r.call(t, probe.Keyed, request("x"), same, grpc.Header(&header), grpc.Trailer(&trailer))
		wantOK(t, err)
		wantEqual(t, "execution", resp.GetExecution(), 1)
		wantEqual(t, "status", one(trailer, statusKey), "unrecorded")
		wantEqual(t, "status in the header", one(header, statusKey), "unrecorded")

		time.Sleep(idempotency.DefaultMaxExecution) // the lease
		_, err = r.call(t, probe.Keyed, request("x"), same)
		wantReason(t, err, codes.FailedPrecondition, idempotency.ReasonOutcomeUnknown)
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})
}

// A caller that goes leaves the execution to its retry.
func TestCallerGoneExecutionGoesOn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Keyed, probe.Step{Delay: time.Second})
		same := key("k1")
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Keyed, request("x"), same)
		wantCode(t, err, codes.DeadlineExceeded)

		began := time.Now()
		var trailer metadata.MD
		_, err = r.call(t, probe.Keyed, request("x"), same, grpc.Trailer(&trailer))
		wantOK(t, err)
		wantEqual(t, "status", one(trailer, statusKey), "joined")
		wantBetween(t, "elapsed", time.Since(began), 890*time.Millisecond, 910*time.Millisecond)
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
		e := r.srv.Seen(probe.Keyed)[0]
		if e.CtxErr != nil {
			t.Errorf("the execution was told to stop: %v", e.CtxErr)
		}
		// Bounded by MaxExecution, not by the caller.
		wantBetween(t, "told", e.Left, 29*time.Second, 30*time.Second)
	})
}

// A key on a method that does not honour it: the call runs and says so.
func TestKeyIgnored(t *testing.T) {
	for name, c := range map[string]struct {
		method    string
		asShipped bool // no store
	}{
		"undeclared":         {probe.Undeclared, false},
		"optional, no store": {probe.KeyedOptional, true},
	} {
		bubbles(t, name, func(t *testing.T) {
			r := start(t, setup{asShipped: c.asShipped})
			var header, trailer metadata.MD
			_, err := r.call(t, c.method, request("x"), key("k1"), grpc.Header(&header), grpc.Trailer(&trailer))
			wantOK(t, err)
			wantEqual(t, "status", one(trailer, statusKey), "ignored")
			wantEqual(t, "status in the header", one(header, statusKey), "ignored")
		})
	}
}

// A promise that the server does not keep is not relied on twice.
func TestDemotion(t *testing.T) {
	for name, plain := range map[string]bool{"a server without Belay": true, "a server without a store": false} {
		bubbles(t, name, func(t *testing.T) {
			seen := new(events)
			r := start(t, setup{
				asShipped: true, plainServer: plain,
				client: []interceptors.ClientOption{
					interceptors.WithPolicy(casePolicy()), interceptors.WithObserver(seen),
				},
			})
			// Until it is known, the declaration counts.
			r.srv.Script(probe.KeyedOptional, unavailable())
			_, err := r.call(t, probe.KeyedOptional, request("x"))
			wantOK(t, err)
			wantEqual(t, "hits", r.srv.Hits(probe.KeyedOptional), 2)

			for range 3 {
				r.srv.Script(probe.KeyedOptional, unavailable())
				_, err = r.call(t, probe.KeyedOptional, request("x"))
				wantStop(t, err, interceptors.NotDeclared, interceptors.Maybe)
				_, err = r.call(t, probe.KeyedOptional, request("x"))
				wantOK(t, err)
			}
			wantEqual(t, "events", seen.count(interceptors.EventDemoted), 1)
			wantEqual(t, "log lines", r.log.count("ERROR belay: the server does not honour"), 1)
			e := r.client.Explain(r.conn, probe.KeyedOptional)
			if !e.Demoted {
				t.Error("Explain does not tell of the demotion")
			}
			if r.client.Explain(nil, probe.KeyedOptional).Demoted {
				t.Error("the demotion has left its channel")
			}
			for _, a := range r.counter.Attempts() {
				wantEqual(t, "keys", len(a.Metadata.Get(keyKey)), 1) // sent all the same
			}
		})
	}
	bubbles(t, "a server that keeps it", func(t *testing.T) {
		r := start(t, setup{})
		for range 2 {
			_, err := r.call(t, probe.KeyedOptional, request("x"))
			wantOK(t, err)
		}
		if r.client.Explain(r.conn, probe.KeyedOptional).Demoted {
			t.Error("demoted")
		}
	})
}

// Whose keys they are decides whose replies are shown.
func TestScopes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scope := func(ctx context.Context) (string, error) {
			return one(metadata.MD{"t": metadata.ValueFromIncomingContext(ctx, "tenant")}, "t"), nil
		}
		r := start(t, setup{server: []interceptors.ServerOption{memory(idempotency.Config{Scope: scope})}})
		same := key("k1")
		for _, tenant := range []string{"a", "b", "a", "b"} {
			ctx := metadata.AppendToOutgoingContext(t.Context(), "tenant", tenant)
			resp, err := probe.Call(ctx, r.conn, probe.Keyed, request(tenant), same)
			wantOK(t, err)
			wantEqual(t, "answer", resp.GetText(), tenant)
		}
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 2)
	})
}

// Stores by pattern: the most specific one's is used, and one that names a
// method makes it keyed.
func TestIdempotencyForPattern(t *testing.T) {
	bubble(t, func(t *testing.T) {
		all := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		one := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		service := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		cfg := idempotency.Config{Scope: idempotency.SingleTenant}
		server := newServer(t,
			interceptors.WithIdempotency(all, cfg),
			interceptors.WithIdempotencyFor("belay.probe.v1.ProbeService/Undeclared", one, cfg),
			interceptors.WithIdempotencyFor("belay.probe.v1.KeyedService/*", service, cfg),
		)
		r := start(t, setup{plainServer: true, plainClient: true, probe: []probe.Option{probe.ServerOptions(server.ServerOptions()...)}})
		for _, method := range []string{probe.Keyed, probe.Undeclared, probe.Inherits, probe.Read} {
			for range 2 {
				ctx := metadata.AppendToOutgoingContext(t.Context(), keyKey, "k1")
				_, err := probe.Call(ctx, r.conn, method, request("x"))
				wantOK(t, err)
			}
		}
		wantEqual(t, "records of all", all.Stats().Records, 1)
		wantEqual(t, "records of the method's", one.Stats().Records, 1)
		wantEqual(t, "records of the service's", service.Stats().Records, 1)
		wantEqual(t, "runs of Undeclared", r.srv.Hits(probe.Undeclared), 1)
		wantEqual(t, "runs of Read", r.srv.Hits(probe.Read), 2)
	})
}

// Metadata on the allow list comes again with a replay; the rest does not.
func TestReplayMetadata(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{server: []interceptors.ServerOption{
			memory(idempotency.Config{ReplayMetadata: []string{"etag", "cost"}}),
		}})
		r.srv.Script(probe.Keyed, probe.Step{
			Header:  metadata.Pairs("etag", "v1", "request-cost", "7"),
			Trailer: metadata.Pairs("cost", "3", "debug", "on"),
		})
		same := key("k1")
		for i, want := range []struct{ etag, cost, debug, requestCost string }{{"v1", "3", "on", "7"}, {"v1", "3", "", ""}} {
			var header, trailer metadata.MD
			_, err := r.call(t, probe.Keyed, request("x"), same, grpc.Header(&header), grpc.Trailer(&trailer))
			wantOK(t, err)
			got := struct{ etag, cost, debug, requestCost string }{
				one(header, "etag"), one(trailer, "cost"), one(trailer, "debug"), one(header, "request-cost"),
			}
			wantEqual(t, fmt.Sprintf("metadata of call %d", i+1), got, want)
		}
	})
}

// The handler's own word on its effect.
func TestHandlerVerdicts(t *testing.T) {
	mark := func(f func(error) error, code codes.Code) probe.Step {
		return probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			return nil, f(status.Error(code, "the handler's words"))
		}}
	}
	for _, c := range []struct {
		name   string
		step   probe.Step
		first  codes.Code
		exec1  string // belay-executed of the first answer
		second codes.Code
		reason string
		runs   int
	}{
		{"Final", mark(idempotency.Final, codes.Unavailable), codes.Unavailable, "maybe", codes.Unavailable, "", 1},
		{"NoEffect", mark(idempotency.NoEffect, codes.Internal), codes.Internal, "no", codes.OK, "", 2},
		{"UnknownEffect", mark(idempotency.UnknownEffect, codes.NotFound), codes.NotFound, "maybe", codes.FailedPrecondition, "OUTCOME_UNKNOWN", 1},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(probe.Keyed, c.step)
			same := key("k1")
			var trailer metadata.MD
			_, err := r.call(t, probe.Keyed, request("x"), same, interceptors.NoRetry(), grpc.Trailer(&trailer))
			wantCode(t, err, c.first)
			wantEqual(t, "message", status.Convert(err).Message(), "the handler's words")
			wantEqual(t, "executed", one(trailer, executedKey), c.exec1)
			_, err = r.call(t, probe.Keyed, request("x"), same, interceptors.NoRetry())
			wantCode(t, err, c.second)
			wantEqual(t, "reason", infoOf(err).GetReason(), c.reason)
			wantEqual(t, "runs", r.srv.Hits(probe.Keyed), c.runs)
		})
	}
}

// A person has found out how a call ended: later ones are answered so.
func TestResolvedOutcome(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		r := start(t, setup{server: []interceptors.ServerOption{stored(store, idempotency.Config{})}})
		r.srv.Script(probe.Keyed, probe.Step{Code: codes.Internal})
		same := key("k1")
		_, err := r.call(t, probe.Keyed, request("x"), same)
		wantCode(t, err, codes.Internal)

		outcome, err := idempotency.NewOutcome(nil, &spb.Status{Code: int32(codes.NotFound), Message: "by hand"})
		wantOK(t, err)
		id := idempotency.IDOf("single-tenant", probe.Keyed, "k1")
		wantOK(t, store.Resolve(t.Context(), id, idempotency.Resolution{State: idempotency.StateDone, Outcome: outcome}))
		_, err = r.call(t, probe.Keyed, request("x"), same)
		wantCode(t, err, codes.NotFound)
		wantEqual(t, "message", status.Convert(err).Message(), "by hand")
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})
}
