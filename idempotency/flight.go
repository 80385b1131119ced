package idempotency

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
)

// flight is one call at work in this process and everybody who waits for it.
// Duplicates meet here before they reach the store, so that a thousand of them
// cost the store what one costs.
type flight struct {
	claim Claim
	base  context.Context //nolint:containedctx // the first caller's values, without its end
	done  chan struct{}   // closed when res is set
	away  chan struct{}   // closed when an execution elsewhere was met

	// Most flights have one caller and one execution: room for them.
	first waiter // who started the flight; base has its values
	room  [1]*waiter
	exec  execution // set by the goroutine that leads the flight

	// Guarded by Engine.mu until done is closed; then they do not change.
	waiters []*waiter     // in the order of their coming; whoever leaves is taken out
	joined  int           // how many of them are duplicates
	runner  *waiter       // whose handler runs; nil until a claim is granted
	remote  time.Duration // lease left of an execution that was met elsewhere
	met     bool          // an execution elsewhere was met
	quit    chan struct{} // closed when nobody waits any more; nil when nobody asked
	decided chan struct{} // closed when runner or res is set; nil when nobody asked
	res     *result
}

// waiter is one caller of a flight.
type waiter struct {
	ctx    context.Context //nolint:containedctx // of one call, and dropped with it
	run    func(context.Context) Result
	joined bool // counts against the limits; the first caller does not
	left   bool // guarded by Engine.mu
}

// result is how a flight ended.
type result struct {
	refusal    *Refusal    // for everybody without a live result
	reply      *reply      // for those whose handler did not run
	live       *Result     // for the caller whose handler ran
	mark       Mark        // with live
	sharedMark Mark        // with reply
	executed   Executed    // with live or reply
	panicked   *PanicError // for the caller whose handler ran
}

// join finds the flight of a claim or starts one, and returns it with the place
// that the caller has in it.
func (e *Engine) join(ctx context.Context, run func(context.Context) Result, claim *Claim, method string) (*flight, *waiter, *Refusal) {
	limited := e.cfg.Limit == nil
	for {
		e.mu.Lock()
		f := e.flights[claim.ID]
		switch {
		case f == nil && !limited:
			// The limit is the user's code: never under the lock. Whoever is at
			// work by the time it has answered is joined as usual.
			e.mu.Unlock()
			if err := e.cfg.Limit(ctx, claim.Scope, method); err != nil {
				return nil, nil, refuseScopeLimit(err)
			}
			limited = true
			continue
		case f == nil:
			f = e.foundLocked(ctx, run, claim)
			e.mu.Unlock()
			e.launch(f) //nolint:contextcheck // a flight outlives the caller that starts it
			return f, &f.first, nil
		case f.claim.Fingerprint == claim.Fingerprint:
			w, refusal := e.joinLocked(ctx, f, run)
			e.mu.Unlock()
			return f, w, refusal
		case f.runner != nil:
			e.mu.Unlock()
			return nil, nil, refuseKeyReused(claim.ID)
		}
		// Another request with this key is asking the store at this moment, and
		// only the answer tells which of the two is the one that was there first.
		if f.decided == nil {
			f.decided = make(chan struct{})
		}
		decided := f.decided
		e.mu.Unlock()
		select {
		case <-decided:
		case <-f.done:
		case <-ctx.Done():
			return nil, nil, refuseCallerGone(ctx)
		}
	}
}

func (e *Engine) foundLocked(ctx context.Context, run func(context.Context) Result, claim *Claim) *flight {
	f := &flight{claim: *claim, base: context.WithoutCancel(ctx), done: make(chan struct{}), away: make(chan struct{})}
	f.first = waiter{ctx: ctx, run: run}
	f.waiters = append(f.room[:0], &f.first)
	f.claim.Owner = e.orphans.adopt(claim.ID)
	e.flights[claim.ID] = f
	e.running++
	return f
}

func (e *Engine) joinLocked(ctx context.Context, f *flight, run func(context.Context) Result) (*waiter, *Refusal) {
	deadline, ok := ctx.Deadline()
	switch {
	case ok && time.Until(deadline) <= e.cfg.FinishReserve, f.joined >= e.cfg.WaitersPerKey:
		return nil, refuseInFlight(f.remote)
	case e.waiting >= e.cfg.Waiters:
		return nil, refuseWaitersExceeded(errors.New("idempotency: Config.Waiters is reached"))
	}
	w := &waiter{ctx: ctx, run: run, joined: true}
	f.joined++
	e.waiting++
	f.waiters = append(f.waiters, w)
	return w, nil
}

// wait returns the flight's result, or why this caller does not wait for it.
func (e *Engine) wait(ctx context.Context, f *flight, w *waiter) (*result, *Refusal) {
	if !w.joined {
		// Its own handler runs, most likely, and that takes as long as it takes:
		// no timer until an execution elsewhere is met.
		select {
		case <-f.done:
			return f.res, nil
		case <-ctx.Done():
			return e.callerGone(ctx, f, w)
		case <-f.away:
		}
	}
	limit := e.cfg.WaitMax
	if deadline, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(deadline)-e.cfg.FinishReserve)
	}
	start := time.Now()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case <-f.done:
			return f.res, nil
		case <-ctx.Done():
			return e.callerGone(ctx, f, w)
		case <-timer.C:
			switch more, refusal := e.overdue(f, w, time.Since(start)); {
			case refusal != nil:
				return nil, refusal
			case more > 0:
				timer.Reset(more)
			}
			// Else this caller's handler runs, or the flight is over: no timer.
		}
	}
}

// callerGone takes a caller whose context has ended out of its flight, unless
// the result has come at the same moment.
func (e *Engine) callerGone(ctx context.Context, f *flight, w *waiter) (*result, *Refusal) {
	if e.leave(f, w) {
		return nil, refuseCallerGone(ctx)
	}
	return f.res, nil
}

// overdue decides about a caller whose time to wait for others is over.
func (e *Engine) overdue(f *flight, w *waiter, waited time.Duration) (time.Duration, *Refusal) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case f.res != nil, f.runner == w:
		return 0, nil
	case f.runner != nil, f.met:
		e.leaveLocked(f, w)
		return 0, refuseInFlight(f.remote)
	case waited < e.cfg.WaitMax:
		// A short deadline, and the store has not answered yet: the answer may
		// still be that this very call runs. Its own context ends the wait.
		return e.cfg.WaitMax - waited, nil
	default:
		e.leaveLocked(f, w)
		return 0, refuseStoreUnavailable(errors.New("idempotency: the claim took longer than Config.WaitMax"), ExecutedMaybe)
	}
}

// leave takes a caller out of its flight, and reports false when the flight is
// over and its result should be taken instead.
func (e *Engine) leave(f *flight, w *waiter) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if f.res != nil {
		return false
	}
	e.leaveLocked(f, w)
	return true
}

func (e *Engine) leaveLocked(f *flight, w *waiter) {
	w.left = true
	if w.joined {
		f.joined--
		e.waiting--
	}
	if i := slices.Index(f.waiters, w); i >= 0 {
		f.waiters = slices.Delete(f.waiters, i, i+1)
	}
	// Nobody is left and nothing runs: stop asking. The next caller starts a
	// flight of its own; should this one's claim still land, it is released.
	if f.runner == nil && len(f.waiters) == 0 && e.flights[f.claim.ID] == f {
		delete(e.flights, f.claim.ID)
		if f.quit != nil {
			close(f.quit)
		}
	}
}

// elect picks the caller whose handler runs: the first that still waits. The
// one that started the flight may have gone while the store was asked.
func (e *Engine) elect(f *flight) *waiter {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range f.waiters {
		if w.ctx.Err() == nil {
			f.runner = w
			f.decideLocked()
			return w
		}
	}
	return nil
}

func (f *flight) decideLocked() {
	if f.decided != nil {
		close(f.decided)
		f.decided = nil
	}
}

// meet notes that the call is at work in another process.
func (e *Engine) meet(f *flight, left time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f.remote = left
	if !f.met {
		f.met = true
		close(f.away)
	}
}

// deserted returns a channel that is closed when nobody waits any more.
func (e *Engine) deserted(f *flight) <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if f.quit == nil {
		f.quit = make(chan struct{})
		if len(f.waiters) == 0 {
			close(f.quit)
		}
	}
	return f.quit
}

// publish ends the flight and reports whether the caller whose handler ran is
// still there to hear of it.
func (e *Engine) publish(f *flight, res *result) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	f.res = res
	e.waiting -= f.joined
	heard := f.runner != nil && !f.runner.left
	if e.flights[f.claim.ID] == f {
		delete(e.flights, f.claim.ID)
	}
	f.decideLocked()
	close(f.done)
	return heard
}

// landed counts the end of a goroutine that led a flight.
func (e *Engine) landed() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running--
	if e.running == 0 && e.idle != nil {
		close(e.idle)
		e.idle = nil
	}
}

func refuseCallerGone(ctx context.Context) *Refusal {
	r := &Refusal{
		Code: code.Code_CANCELLED, Reason: ReasonCallerGone, Executed: ExecutedMaybe, Cause: context.Cause(ctx),
		Message: "the caller cancelled while it waited",
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		r.Code, r.Message = code.Code_DEADLINE_EXCEEDED, "the caller's deadline passed while it waited"
	}
	return r
}
