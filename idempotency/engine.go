package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
)

// Causes of the end of a handler's context, for context.Cause.
var (
	// ErrLeaseLost: the store no longer respects this execution's claim, or it
	// could not be asked for too long. Nothing the handler does counts any more.
	ErrLeaseLost = errors.New("idempotency: the lease was lost")

	// ErrMaxExecution: the execution has taken Config.MaxExecution.
	ErrMaxExecution = errors.New("idempotency: the execution took too long")
)

// Mark says how a keyed call was answered: the value of the metadata
// idempotency-status.
type Mark uint8

// The marks.
const (
	// MarkNone: a refusal; there is no mark.
	MarkNone Mark = iota
	// MarkExecuted: this call's own handler ran.
	MarkExecuted
	// MarkReplayed: the recorded answer of an earlier execution.
	MarkReplayed
	// MarkJoined: the call waited for the execution of another.
	MarkJoined
	// MarkIgnored: the key was not honoured. The edge sets it where it has no
	// engine for a method; an Engine never does.
	MarkIgnored
	// MarkUnrecorded: the answer is true for this caller, and could not be
	// recorded for the next.
	MarkUnrecorded
)

// String returns the mark as it travels; MarkNone is empty.
func (m Mark) String() string {
	switch m {
	case MarkExecuted:
		return "executed"
	case MarkReplayed:
		return "replayed"
	case MarkJoined:
		return "joined"
	case MarkIgnored:
		return "ignored"
	case MarkUnrecorded:
		return "unrecorded"
	default:
		return ""
	}
}

// Call is one keyed call as it reached the server.
type Call struct {
	// Method is the full name, "/pkg.Service/Method".
	Method string

	// Key as it was received.
	Key Key

	// Request is what the fingerprint is taken of, before Do returns.
	Request proto.Message

	// Rolling, when set, is the fingerprint of a stream of requests, used
	// instead of Request. It must come from Engine.Rolling.
	Rolling *Rolling

	// NewResponse returns an empty response of the method's type, to decode a
	// replay into. Nil looks the stored type up among those linked in.
	NewResponse func() proto.Message

	// Retention is what the method's .proto promises. The longer of it and
	// Config.Retention holds.
	Retention time.Duration
}

// Result is what a handler returned.
type Result struct {
	// Response for OK.
	Response proto.Message

	// Status of the error. Nil with a nil Err is OK; nil with an Err is code
	// UNKNOWN with the error's text.
	Status *spb.Status

	// Err is the handler's error itself, in whose chain the verdict is found.
	Err error

	// Header and Trailer that the handler set, as far as they were captured.
	Header, Trailer Metadata
}

// Reply is the answer to one keyed call: a Refusal, or an outcome.
type Reply struct {
	// Refusal, when set, is the answer; of the fields below only ID and
	// Executed are set then.
	Refusal *Refusal

	// Mark says where the outcome comes from.
	Mark Mark

	// Response for OK: the handler's own message for the caller whose handler
	// ran, a message of its own for every other.
	Response proto.Message

	// Status of the error; nil for OK.
	Status *spb.Status

	// Err is the handler's own error, for the caller whose handler ran and for
	// those who joined it. Nil on a replay, where Status is all there is.
	Err error

	// Header and Trailer to set: the allow-listed metadata of a replayed or
	// joined outcome. Nil for the caller whose handler ran: it has set them.
	Header, Trailer Metadata

	// Executed says whether the effect of the call may have happened.
	Executed Executed

	// Completed is when the execution ended, on a replay; else zero.
	Completed time.Time

	// ID of the call, for logs. Zero when it was refused before it had one.
	ID ID
}

// PanicError is the panic of a handler. Do panics with it on the goroutine of
// the caller whose handler it was, so that recovery and crash reporting work as
// without Belay, though the handler ran on a goroutine of its own.
type PanicError struct {
	// Value is what the handler panicked with. It is ErrGoexit when the handler
	// ended its goroutine with runtime.Goexit, as testing's FailNow does.
	Value any

	// Stack of the handler's goroutine.
	Stack []byte
}

// ErrGoexit is the Value of a PanicError for a handler that called
// runtime.Goexit.
var ErrGoexit = errors.New("idempotency: the handler ended its goroutine")

// Error returns the value and the stack.
func (p *PanicError) Error() string { return fmt.Sprintf("%v [handler]\n\n%s", p.Value, p.Stack) }

// Unwrap returns the value when it is an error.
func (p *PanicError) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}

// Engine drives a store through keyed calls. It is safe for concurrent use; one
// Engine per store and configuration is shared by all methods of a server.
type Engine struct {
	store  Store
	traits Traits
	cfg    Config
	prints *Fingerprinter

	mu      sync.Mutex     // guards what follows; never held while user code or the store runs
	flights map[ID]*flight // calls at work in this process
	waiting int            // duplicates that wait, over all flights
	running int            // goroutines that lead a flight
	idle    chan struct{}  // closed when running falls to 0; nil when nobody asked
	orphans orphans        // owners of claims whose reply was lost
}

// NewEngine returns an engine on a store. Errors name the field, its value and
// its rule.
func NewEngine(store Store, cfg Config) (*Engine, error) {
	if store == nil {
		return nil, errors.New("idempotency: store is nil: must be set")
	}
	if v, ok := store.(interface{ Validate() error }); ok {
		if err := v.Validate(); err != nil {
			return nil, err
		}
	}
	var traits Traits
	if d, ok := store.(Described); ok {
		traits = d.Traits()
	}
	full, err := cfg.withDefaults(traits)
	if err != nil {
		return nil, err
	}
	prints, err := NewFingerprinter(full.FingerprintSecrets...)
	if err != nil {
		return nil, err
	}
	return &Engine{store: store, traits: traits, cfg: full, prints: prints, flights: make(map[ID]*flight)}, nil
}

// Config returns the configuration with every default filled in.
func (e *Engine) Config() Config { return e.cfg }

// Check verifies the store: see Store.Check.
func (e *Engine) Check(ctx context.Context) error { return e.store.Check(ctx) }

// Rolling returns the fingerprint of a stream of requests for Call.Rolling.
func (e *Engine) Rolling() *Rolling { return e.prints.Rolling() }

// Drain waits until no execution is at work, or ctx ends. A server calls it
// after it has stopped taking calls: an execution outlives its caller, and a
// process that exits under it leaves a record that nobody may run again.
func (e *Engine) Drain(ctx context.Context) error {
	for {
		e.mu.Lock()
		if e.running == 0 {
			e.mu.Unlock()
			return nil
		}
		if e.idle == nil {
			e.idle = make(chan struct{})
		}
		idle := e.idle
		e.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Do answers one keyed call. It runs the handler, through run, at most once,
// and not at all when the answer is a replay, a joined execution or a refusal.
//
// Run is called on a goroutine of its own with a context that has ctx's values
// but not its end: it ends after Config.MaxExecution, or when the lease is
// lost. When ctx ends first, Do returns CALLER_GONE and the handler goes on.
//
// Do panics with a *PanicError when run panicked and ctx has not ended.
func (e *Engine) Do(ctx context.Context, c Call, run func(ctx context.Context) Result) Reply {
	start := time.Now()
	reply := e.do(ctx, &c, run, start)
	if e.cfg.OnEvent != nil {
		e.emit(Event{Kind: EventReply, Method: c.Method, ID: reply.ID, Duration: time.Since(start), Mark: reply.Mark, Refusal: reply.Refusal})
	}
	return reply
}

func (e *Engine) do(ctx context.Context, c *Call, run func(context.Context) Result, now time.Time) Reply {
	claim, refusal := e.newClaim(ctx, c, now)
	if refusal != nil {
		return refused(claim.ID, refusal)
	}
	f, w, refusal := e.join(ctx, run, &claim, c.Method)
	if refusal != nil {
		return refused(claim.ID, refusal)
	}
	res, refusal := e.wait(ctx, f, w)
	if refusal != nil {
		return refused(claim.ID, refusal)
	}
	return e.answer(c, f, w, res)
}

func refused(id ID, r *Refusal) Reply { return Reply{ID: id, Refusal: r, Executed: r.Executed} }

// newClaim checks what the peer sent and works out whose call this is.
func (e *Engine) newClaim(ctx context.Context, c *Call, now time.Time) (Claim, *Refusal) {
	scope, err := e.cfg.Scope(ctx)
	if err == nil && scope == "" {
		err = errors.New("idempotency: Config.Scope returned an empty scope")
	}
	if err != nil {
		return Claim{}, refuseScopeMissing(err)
	}
	if err := e.checkKey(c.Key, now); err != nil {
		return Claim{}, refuseKeyInvalid(err)
	}
	claim := Claim{
		ID:        IDOf(scope, c.Method, c.Key.Value),
		Scope:     scope,
		Method:    c.Method,
		Lease:     e.cfg.Lease,
		Retention: max(e.cfg.Retention, c.Retention),
		Rerun:     e.cfg.Rerun,
	}
	if !c.Key.FirstSent.IsZero() {
		claim.Late = now.Sub(c.Key.FirstSent) > e.cfg.window(claim.Retention)
	}
	if c.Rolling != nil {
		claim.Fingerprint, claim.Alternates = c.Rolling.Sum()
	} else {
		claim.Fingerprint, claim.Alternates = e.prints.Of(c.Request)
	}
	return claim, nil
}

func (e *Engine) checkKey(k Key, now time.Time) error {
	if err := k.Validate(); err != nil {
		return err
	}
	if len(k.Value) < e.cfg.MinKeyLength {
		return fmt.Errorf("idempotency: key has %d characters: must have at least %d", len(k.Value), e.cfg.MinKeyLength)
	}
	if ahead := k.FirstSent.Sub(now); !k.FirstSent.IsZero() && ahead > e.cfg.Skew {
		return fmt.Errorf("idempotency: key was first sent %v in the future: must be at most %v", ahead.Round(time.Millisecond), e.cfg.Skew)
	}
	return nil
}

// answer turns the flight's result into this caller's reply.
func (e *Engine) answer(c *Call, f *flight, w *waiter, res *result) Reply {
	own := f.runner == w // settled: the flight is over
	if res.panicked != nil && own {
		panic(res.panicked)
	}
	if own && res.live != nil {
		return Reply{
			ID: f.claim.ID, Mark: res.mark, Response: res.live.Response, Status: res.live.Status, Err: res.live.Err, Executed: res.executed,
		}
	}
	if res.refusal != nil {
		return refused(f.claim.ID, res.refusal)
	}
	r := res.reply
	reply := Reply{ID: f.claim.ID, Mark: res.sharedMark, Header: r.header, Trailer: r.trailer, Executed: res.executed}
	if res.live != nil {
		reply.Err = res.live.Err
	} else {
		reply.Completed = r.completed
	}
	var err error
	switch {
	case r.tombstone:
		return refused(f.claim.ID, refuseNotRetained(f.claim.ID, r.code))
	case r.code != code.Code_OK:
		reply.Status, err = r.decodeStatus()
	default:
		reply.Response, err = r.decodeResponse(c.NewResponse)
	}
	if err != nil {
		return refused(f.claim.ID, refuseRecordCorrupt(err))
	}
	return reply
}
