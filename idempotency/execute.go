package idempotency

import (
	"bytes"
	"context"
	"errors"
	"runtime/debug"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	spb "google.golang.org/genproto/googleapis/rpc/status"
)

// execution is one run of a handler, from the grant to its settled result.
type execution struct {
	e     *Engine
	f     *flight
	g     grant
	base  context.Context //nolint:containedctx // values only: for what is written after the handler has returned
	lease leaseKeeper
	epoch uint64

	// What became of it, set once the handler has returned.
	res      Result
	end      error     // why the handler's context had ended when it returned; nil when it had not
	returned time.Time // when it did
	outcome  Outcome   // as it is stored
	out      result    // as it is published
}

// execution returns the one that a flight has room for: it has at most one.
func (f *flight) execution(base context.Context, e *Engine, g grant) *execution {
	f.exec = execution{e: e, f: f, g: g, base: base}
	return &f.exec
}

// execute runs the handler of w and publishes what became of it. The settling
// is deferred, so that a panic and runtime.Goexit are settled like a return.
func (e *Engine) execute(f *flight, g grant, w *waiter) {
	base := f.base
	if w != &f.first { // the handler sees the values of its own caller
		base = context.WithoutCancel(w.ctx)
	}
	x := f.execution(base, e, g)
	bounded, stop := context.WithDeadlineCause(x.base, g.sent.Add(e.cfg.MaxExecution-e.cfg.FinishReserve), ErrMaxExecution)
	defer stop()
	ctx, cancel := context.WithCancelCause(bounded)
	defer cancel(nil)

	returned := false
	defer func() {
		var panicked *PanicError
		if !returned {
			panicked = &PanicError{Value: recover(), Stack: debug.Stack()}
			if panicked.Value == nil {
				panicked.Value = ErrGoexit
			}
		}
		x.lease.stop()
		x.end, x.returned = context.Cause(ctx), time.Now()
		x.settle(panicked) //nolint:contextcheck // the handler's context may have ended; what is written has base
	}()
	seen := g.exec.Context(ctx)
	x.epoch = Epoch(seen)
	x.lease.start(x, cancel) // after epoch, which its events read
	x.res = w.run(seen)
	returned = true
}

// settle writes the verdict to the store and tells everybody who waits.
func (x *execution) settle(panicked *PanicError) {
	if x.returned.Sub(x.g.sent) > x.e.cfg.MaxExecution {
		x.emit(EventOverrun, 0, x.end)
	}
	if panicked == nil {
		x.e.publish(x.f, x.conclude())
		return
	}
	x.emit(EventPanic, 0, panicked)
	if !x.e.publish(x.f, x.concludePanic(panicked)) {
		// Nobody's goroutine is left to panic on. Not silence, and not a crash
		// of everybody else's calls either.
		x.e.cfg.Logger.Error("belay: idempotency: a handler panicked after its caller had gone",
			"method", x.f.claim.Method, "id", x.f.claim.ID.String(), "panic", panicked.Value, "stack", string(panicked.Stack))
	}
}

func (x *execution) concludePanic(panicked *PanicError) *result {
	if x.g.exec.Atomic() {
		// Undone: those who waited may try again.
		_ = x.release() // reported; without it the transaction ends with its connection
		return &result{panicked: panicked, refusal: refuseInFlight(0)}
	}
	_ = x.abandon() // reported; the lease's end does the same
	return &result{panicked: panicked, refusal: refuseOutcomeUnknown(x.f.claim.ID, x.e.cfg.UnknownRetryAfter)}
}

// conclude is the way of a handler that returned.
func (x *execution) conclude() *result {
	x.normalise()
	switch x.e.fateOf(x.g.exec.Atomic(), &x.res, x.end != nil) {
	case fateFinish:
		return x.finish()
	case fateRelease:
		return x.concludeRelease()
	default:
		return x.concludeAbandon()
	}
}

// normalise gives an error a status: a Go error without one is UNKNOWN, as is
// an error whose status claims to be OK.
func (x *execution) normalise() {
	if x.res.Err != nil && x.res.Status.GetCode() == 0 {
		x.res.Status = &spb.Status{Code: int32(code.Code_UNKNOWN), Message: x.res.Err.Error()}
	}
}

// fate is what a handler's return means for the record.
type fate uint8

const (
	fateFinish  fate = iota // the answer, for good
	fateRelease             // no effect: the key is free
	fateAbandon             // nobody knows
)

// fateOf decides, in this order: success, what the handler says about its
// effect, what the code says, and what the store can undo.
//
//	                          | atomic store | other store
//	OK                        | finish       | finish
//	Final(err)                | finish, undo | finish
//	NoEffect(err)             | release      | release
//	UnknownEffect(err)        | abandon      | abandon
//	a final code              | finish, undo | finish
//	UNAVAILABLE, ABORTED,     | release      | Config.OnTransientError
//	  RESOURCE_EXHAUSTED,     |              | (abandon when the context had
//	  UNAUTHENTICATED         |              | ended)
//	any other code            | release      | abandon
//
// RESOURCE_EXHAUSTED is never an answer for good: a stored "too many requests"
// would be replayed for as long as the record lives.
func (e *Engine) fateOf(atomic bool, res *Result, ended bool) fate {
	c := code.Code(res.Status.GetCode())
	if c == code.Code_OK {
		return fateFinish
	}
	switch VerdictOf(res.Err) {
	case VerdictFinal:
		return fateFinish
	case VerdictNoEffect:
		return fateRelease
	case VerdictUnknown:
		return fateAbandon
	case VerdictNone:
	}
	switch {
	case finalCode(c):
		return fateFinish
	case atomic:
		return fateRelease
	case transientCode(c) && !ended && e.releasesTransient():
		return fateRelease
	default:
		return fateAbandon
	}
}

func (e *Engine) releasesTransient() bool {
	switch e.cfg.OnTransientError {
	case TransientRelease:
		return true
	case TransientUnknown:
		return false
	default:
		return e.traits.ReleaseOnError
	}
}

// finalCode reports whether the code is an application's verdict on the
// request, which repeating it does not change.
func finalCode(c code.Code) bool {
	switch c {
	case code.Code_INVALID_ARGUMENT, code.Code_NOT_FOUND, code.Code_ALREADY_EXISTS, code.Code_PERMISSION_DENIED,
		code.Code_FAILED_PRECONDITION, code.Code_OUT_OF_RANGE, code.Code_UNIMPLEMENTED:
		return true
	default:
		return false
	}
}

// transientCode reports whether the code says "not done, try again".
func transientCode(c code.Code) bool {
	switch c {
	case code.Code_UNAVAILABLE, code.Code_ABORTED, code.Code_RESOURCE_EXHAUSTED, code.Code_UNAUTHENTICATED:
		return true
	default:
		return false
	}
}

// finish records the outcome and says what everybody is answered.
func (x *execution) finish() *result {
	r := x.encode()
	start := x.begins()
	rec, err := x.record(&x.outcome)
	x.emitSince(EventFinish, start, err)

	atomic := x.g.exec.Atomic()
	switch {
	case err == nil && rec != nil && rec.Outcome != nil && !bytes.Equal(rec.Outcome.Data, x.outcome.Data):
		// Another execution was faster. Its outcome is the call's.
		return x.e.replay(x.f, rec)
	case err == nil:
		return x.answered(r, MarkExecuted, MarkJoined)
	case !atomic:
		// The effect has happened and the handler's word on it is true for those
		// who are here. The record becomes UNKNOWN with its lease.
		x.emit(EventUnrecorded, 0, err)
		return x.answered(r, MarkUnrecorded, MarkUnrecorded)
	case errors.Is(err, ErrLost):
		return &result{refusal: refuseLeaseLost(err)}
	case errors.Is(err, ErrConflict):
		return &result{refusal: refuseTxConflict(err)}
	case errors.Is(err, ErrInDoubt):
		return &result{refusal: refuseOutcomePending(err)}
	default:
		return &result{refusal: refuseStoreUnavailable(err, ExecutedNo)}
	}
}

// encode makes the outcome of what the handler returned. What cannot be encoded
// or sealed leaves a tombstone: the effect is done, and that much must be
// recorded.
func (x *execution) encode() *reply {
	r, err := newReply(x.res, x.e.cfg.ReplayMetadata)
	r.completed, r.epoch = x.returned, x.epoch
	if err == nil {
		x.outcome, err = r.encode(x.e.cfg.Sealer, x.f.claim.ID, x.e.cfg.MaxReply)
	}
	if err != nil {
		x.emit(EventUnrecorded, 0, err)
		r = r.buried()
		x.outcome, err = r.encode(nil, x.f.claim.ID, 0)
	}
	if err != nil { // numbers and a registered name: they always encode
		x.outcome = Outcome{Undo: r.code != code.Code_OK}
	}
	return r
}

func (x *execution) answered(r *reply, mark, shared Mark) *result {
	x.out = result{reply: r, live: &x.res, mark: mark, sharedMark: shared, executed: ExecutedMaybe}
	res := &x.out
	switch {
	case r.code == code.Code_OK:
		res.executed = ExecutedYes
	case x.g.exec.Atomic():
		res.executed = ExecutedNo
	}
	return res
}

// concludeRelease answers an error that left no effect.
func (x *execution) concludeRelease() *result {
	_ = x.release() // reported; a claim that could not be given back ends with its lease
	if errors.Is(x.end, ErrLeaseLost) {
		return &result{refusal: refuseLeaseLost(x.res.Err)}
	}
	res := x.failed(refuseInFlight(0))
	if x.g.exec.Atomic() || VerdictOf(x.res.Err) == VerdictNoEffect {
		res.executed = ExecutedNo
	}
	return res
}

// concludeAbandon answers an error that leaves the effect open.
func (x *execution) concludeAbandon() *result {
	_ = x.abandon() // reported; the lease's end does the same
	unknown := refuseOutcomeUnknown(x.f.claim.ID, x.e.cfg.UnknownRetryAfter)
	if errors.Is(x.end, ErrLeaseLost) {
		// The handler's error is then about our cancelling it, not about its work.
		unknown.Cause = x.res.Err
		return &result{refusal: unknown}
	}
	return x.failed(unknown)
}

// failed shares a handler's error that is not recorded with those who joined.
// CANCELLED and DEADLINE_EXCEEDED are about a context that they do not have:
// they get the refusal instead.
func (x *execution) failed(instead *Refusal) *result {
	res := &result{live: &x.res, mark: MarkExecuted, executed: ExecutedMaybe}
	c := code.Code(x.res.Status.GetCode())
	r, err := newReply(x.res, x.e.cfg.ReplayMetadata)
	if err != nil || c == code.Code_CANCELLED || c == code.Code_DEADLINE_EXCEEDED {
		res.refusal = instead
		return res
	}
	res.reply, res.sharedMark = r, MarkJoined
	return res
}

// record writes the outcome. Only a store that is not a transaction can be
// asked again: a transaction that failed is gone.
func (x *execution) record(outcome *Outcome) (*Record, error) {
	ctx, cancel := x.e.storeContext(x.base)
	defer cancel()
	var rec *Record
	err := x.persist(ctx, func() (err error) {
		rec, err = x.g.exec.Finish(ctx, outcome)
		return err
	})
	return rec, err
}

func (x *execution) release() error {
	ctx, cancel := x.e.storeContext(x.base)
	defer cancel()
	start := x.begins()
	err := x.persist(ctx, func() error { return x.g.exec.Release(ctx) })
	x.emitSince(EventRelease, start, err)
	return err
}

func (x *execution) abandon() error {
	ctx, cancel := x.e.storeContext(x.base)
	defer cancel()
	start := x.begins()
	err := x.persist(ctx, func() error { return x.g.exec.Abandon(ctx) })
	x.emitSince(EventAbandon, start, err)
	return err
}

// storeContext bounds one step of the store. Its parent is detached from the
// caller, who may be gone: the verdict is written all the same, and a store that
// hangs does not keep the execution for ever (R4).
func (e *Engine) storeContext(base context.Context) (context.Context, context.CancelFunc) {
	if e.traits.Immediate {
		return base, func() {}
	}
	return context.WithTimeout(base, e.cfg.StoreTimeout)
}

// persist repeats the last step of an execution whose reply may have been lost.
func (x *execution) persist(ctx context.Context, step func() error) error {
	const tries = 3
	wait := 20 * time.Millisecond
	for try := 1; ; try++ {
		err := step()
		if err == nil || try == tries || x.g.exec.Atomic() || ctx.Err() != nil ||
			errors.Is(err, ErrLost) || errors.Is(err, ErrConflict) {
			return err
		}
		timer := time.NewTimer(jitter(wait/2, wait))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
		wait *= 2
	}
}

func (x *execution) emit(kind EventKind, d time.Duration, err error) {
	if x.e.cfg.OnEvent == nil {
		return
	}
	x.e.emit(Event{Kind: kind, Method: x.f.claim.Method, ID: x.f.claim.ID, Epoch: x.epoch, Duration: d, Err: err})
}

// begins returns when a step begins whose duration is emitted, and reads the
// clock only when there is somebody to hear of it.
func (x *execution) begins() time.Time {
	if x.e.cfg.OnEvent == nil {
		return time.Time{}
	}
	return time.Now()
}

func (x *execution) emitSince(kind EventKind, start time.Time, err error) {
	if x.e.cfg.OnEvent != nil {
		x.emit(kind, time.Since(start), err)
	}
}
