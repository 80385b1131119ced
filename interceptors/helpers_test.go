package interceptors_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The trailers and headers by their names on the wire, as another
// implementation would have to write them.
const (
	pushbackKey = "grpc-retry-pushback-ms"
	attemptsKey = "grpc-previous-rpc-attempts"
	executedKey = "belay-executed"
	reasonKey   = "belay-reason"
	statusKey   = "idempotency-status"
	keyKey      = "idempotency-key"
)

const probeService = "belay.probe.v1.ProbeService"

// casePolicy is what the public failure cases assume unless they say otherwise.
func casePolicy() policy.Policy {
	return policy.Policy{
		MaxAttempts: 3,
		Backoff:     policy.Backoff{Base: 10 * time.Millisecond, Max: 100 * time.Millisecond},
	}
}

// fixed is a backoff that always waits d.
func fixed(d time.Duration) policy.Backoff {
	return policy.Backoff{Base: d, Max: d, Jitter: policy.JitterNone}
}

// plenty is a bank that never is the reason for anything.
func plenty() *budget.Budget { return budget.New(budget.Config{Initial: 1e6}) }

// setup says what a rig is made of. The zero value is what the failure cases
// assume: three attempts, a full bank, no breaker, a memory store.
type setup struct {
	// asShipped leaves the client and the server with their defaults instead.
	asShipped bool

	client  []interceptors.ClientOption
	server  []interceptors.ServerOption
	between []grpc.ServerOption // the user's interceptors between guard and dedupe
	inner   []grpc.DialOption   // after Belay's: the user's interceptors below
	dial    []grpc.DialOption   // before Belay's
	probe   []probe.Option

	// realTime is for tests outside of a bubble.
	realTime bool

	// plainServer and plainClient leave Belay out on one side.
	plainServer, plainClient bool
}

// rig is a server and a channel to it, with Belay on both ends.
type rig struct {
	conn    *grpc.ClientConn
	srv     *probe.Server
	client  *interceptors.Client
	server  *interceptors.Server
	counter *probe.Counter
	network *probe.Network
	log     *logLines
}

func start(t *testing.T, s setup) *rig {
	t.Helper()
	r := &rig{counter: new(probe.Counter), network: probe.NewNetwork(), log: new(logLines)}
	logger := slog.New(r.log)

	clientOpts := []interceptors.ClientOption{interceptors.WithLogger(logger)}
	serverOpts := []interceptors.ServerOption{interceptors.WithLogger(logger)}
	if !s.asShipped {
		clientOpts = append(clientOpts, interceptors.WithPolicy(casePolicy()),
			interceptors.WithBudget(plenty()), interceptors.WithoutBreaker())
		if !slices.ContainsFunc(s.server, givesStore) {
			serverOpts = append(serverOpts, memory(idempotency.Config{}))
		}
	}
	r.client = newClient(t, append(clientOpts, s.client...)...)
	r.server = newServer(t, append(serverOpts, s.server...)...)

	dial := slices.Clone(s.dial)
	if !s.plainClient {
		dial = append(dial, r.client.DialOptions()...)
	}
	dial = append(append(dial, s.inner...), r.counter.DialOptions()...)
	opts := []probe.Option{probe.On(r.network), probe.DialOptions(dial...)}
	if s.plainServer {
		opts = append(opts, probe.ServerOptions(s.between...))
	} else {
		opts = append(opts, probe.ServerOptions(r.server.ServerOptions(s.between...)...))
	}
	r.conn, r.srv = probe.Start(t, append(opts, s.probe...)...)
	if !s.realTime {
		settle() // a server that is stopped before it began to serve is an error, and some tests call nothing
	}
	return r
}

// call makes one call with the two seconds of the failure cases.
func (r *rig) call(t *testing.T, method string, req *probev1.Request, opts ...grpc.CallOption) (*probev1.Response, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	return probe.Call(ctx, r.conn, method, req, opts...)
}

// storeOption marks the options that give a server a store, so that a rig does
// not add its own.
type storeOption struct{ interceptors.ServerOption }

func givesStore(o interceptors.ServerOption) bool {
	_, ok := o.(storeOption)
	return ok
}

// memory is a fresh memory store for all methods, with one tenant unless cfg
// says otherwise.
func memory(cfg idempotency.Config) interceptors.ServerOption {
	return stored(idempotency.NewMemoryStore(idempotency.MemoryConfig{}), cfg)
}

func stored(store idempotency.Store, cfg idempotency.Config) interceptors.ServerOption {
	if cfg.Scope == nil {
		cfg.Scope = idempotency.SingleTenant
	}
	return storeOption{interceptors.WithIdempotency(store, cfg)}
}

func newClient(t *testing.T, opts ...interceptors.ClientOption) *interceptors.Client {
	t.Helper()
	c, err := interceptors.NewClient(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newServer(t *testing.T, opts ...interceptors.ServerOption) *interceptors.Server {
	t.Helper()
	s, err := interceptors.NewServer(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// bubble runs a test in fake time.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// bubbles runs each sub-test in a bubble of its own.
func bubbles(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func unavailable() probe.Step { return probe.Step{Code: codes.Unavailable} }

func request(text string) *probev1.Request { return &probev1.Request{Text: text} }

func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Fatalf("code %v (%v), want %v", got, err, want)
	}
}

func wantOK(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("error %v, want none", err)
	}
}

// wantCounts asserts attempts of the client and entries of the handler.
func (r *rig) wantCounts(t *testing.T, method string, attempts, hits int) {
	t.Helper()
	if got := r.counter.Count(); got != attempts {
		t.Errorf("%d attempts, want %d", got, attempts)
	}
	if got := r.srv.Hits(method); got != hits {
		t.Errorf("%d hits, want %d", got, hits)
	}
}

func wantEqual[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// wantBetween asserts low ≤ got ≤ high.
func wantBetween(t *testing.T, what string, got, low, high time.Duration) {
	t.Helper()
	if got < low || got > high {
		t.Errorf("%s: %v, want %v to %v", what, got, low, high)
	}
}

// callErrorOf finds the CallError in err, or fails.
func callErrorOf(t *testing.T, err error) *interceptors.CallError {
	t.Helper()
	ce, ok := errors.AsType[*interceptors.CallError](err)
	if !ok {
		t.Fatalf("error %v (%T) has no CallError", err, err)
	}
	return ce
}

// stopped is a CallError that a test has looked at. (It is not an error itself,
// or every assertion would have one to be checked.)
type stopped struct{ err *interceptors.CallError }

func (s stopped) Attempts() []interceptors.Attempt { return s.err.Attempts() }

// wantStop asserts a CallError with this reason and this word on the effect.
func wantStop(t *testing.T, err error, stop interceptors.StopReason, executed interceptors.Executed) stopped {
	t.Helper()
	ce := callErrorOf(t, err)
	if ce.Stop() != stop || ce.Executed() != executed {
		t.Errorf("stop %v, executed %v; want %v, %v (%v)", ce.Stop(), ce.Executed(), stop, executed, err)
	}
	return stopped{ce}
}

// wantBare asserts that the error came as it is, with nothing of Belay around it.
func wantBare(t *testing.T, err error) {
	t.Helper()
	if _, ok := errors.AsType[*interceptors.CallError](err); ok {
		t.Errorf("error %v is a CallError, want the server's own", err)
	}
}

// reaches looks through all that err wraps for a status with this code, and
// returns it.
func reaches(err error, code codes.Code) *status.Status {
	if err == nil {
		return nil
	}
	if s, ok := err.(interface{ GRPCStatus() *status.Status }); ok && s.GRPCStatus().Code() == code {
		return s.GRPCStatus()
	}
	switch u := err.(type) { //nolint:errorlint // it walks the tree itself
	case interface{ Unwrap() error }:
		return reaches(u.Unwrap(), code)
	case interface{ Unwrap() []error }:
		for _, e := range u.Unwrap() {
			if s := reaches(e, code); s != nil {
				return s
			}
		}
	}
	return nil
}

// infoOf returns the ErrorInfo of Belay's domain in an error, nil without one.
func infoOf(err error) *errdetails.ErrorInfo {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == idempotency.ErrorDomain {
			return info
		}
	}
	return nil
}

// detailBytes are an error's details as they came over the wire.
func detailBytes(err error) []string {
	var all []string
	for _, d := range status.Convert(err).Proto().GetDetails() {
		all = append(all, d.GetTypeUrl()+"\x00"+string(d.GetValue()))
	}
	return all
}

// one returns the only value of a key in metadata; "" for none, and several
// joined so that no test takes them for one.
func one(md metadata.MD, key string) string { return strings.Join(md.Get(key), " AND ") }

// key is an idempotency key of a test's own.
func key(value string) grpc.CallOption {
	return interceptors.WithKey(idempotency.Key{Value: value, FirstSent: time.Now()})
}

// sameRequest fails when a call has written to the caller's message.
func sameRequest(t *testing.T, before, after proto.Message) {
	t.Helper()
	if !proto.Equal(before, after) {
		t.Errorf("the request was changed: %v, was %v", after, before)
	}
}

// gaps are the times between the beginnings of attempts.
func gaps(attempts []probe.Attempt) []time.Duration {
	var all []time.Duration
	for i := 1; i < len(attempts); i++ {
		all = append(all, attempts[i].When.Sub(attempts[i-1].When))
	}
	return all
}

// logLines is a slog.Handler that keeps messages.
type logLines struct {
	mu    sync.Mutex // guards lines
	lines []string
}

func (l *logLines) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (l *logLines) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, r.Level.String()+" "+r.Message)
	return nil
}

func (l *logLines) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l *logLines) WithGroup(string) slog.Handler      { return l }

// count returns how many lines contain text.
func (l *logLines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.lines {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// events is an Observer that keeps what it is told.
type events struct {
	mu  sync.Mutex // guards all
	all []interceptors.Event
}

func (e *events) Observe(_ context.Context, ev interceptors.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

func (e *events) list() []interceptors.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.all)
}

// count returns how many events of a kind there were.
func (e *events) count(kind interceptors.EventKind) int {
	n := 0
	for _, ev := range e.list() {
		if ev.Kind == kind {
			n++
		}
	}
	return n
}

// onAttempt is an inner interceptor that runs f with the number of the attempt
// it sees, from 1, before it goes on.
func onAttempt(f func(ctx context.Context, n int) error) grpc.DialOption {
	var mu sync.Mutex
	n := 0
	return grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		mu.Lock()
		n++
		number := n
		mu.Unlock()
		if err := f(ctx, number); err != nil {
			return err
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	})
}

// settle waits until everything in the bubble waits.
func settle() { synctest.Wait() }

// brokenStore fails every claim.
type brokenStore struct{ idempotency.Store }

func (s *brokenStore) Begin(context.Context, idempotency.Claim) (idempotency.Execution, *idempotency.Record, error) {
	return nil, nil, errors.New("the store is down")
}
