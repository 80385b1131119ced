package idempotency

import (
	"context"
	"errors"
	"sync"
	"time"
)

// leaseKeeper renews the lease of one execution and cancels the handler when
// the lease is gone. It has a timer and no goroutine of its own: most handlers
// return long before the first renewal is due.
type leaseKeeper struct {
	x      *execution
	cancel context.CancelCauseFunc

	mu      sync.Mutex // guards what follows
	timer   *time.Timer
	ends    time.Time          // when the handler must stop unless renewed before
	stopped bool               // no tick starts any more
	abort   context.CancelFunc // of the renewal under way
	renewal sync.WaitGroup     // of the renewal under way; added to under mu only
}

// start begins to look after the lease of x. Stop must be called.
func (k *leaseKeeper) start(x *execution, cancel context.CancelCauseFunc) {
	k.x, k.cancel = x, cancel
	e := x.e
	if e.traits.NoLease || e.cfg.DisableRenewal {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	// From when the claim was SENT, less what is needed to record the outcome:
	// the store cannot have started the lease before that (R5).
	k.ends = x.g.sent.Add(e.cfg.Lease - e.cfg.FinishReserve)
	k.timer = time.AfterFunc(min(e.cfg.RenewEvery, time.Until(k.ends)), k.tick)
}

// stop ends renewing and returns when no renewal is under way, so that none
// comes after the verdict.
func (k *leaseKeeper) stop() {
	k.mu.Lock()
	k.stopped = true
	if k.timer != nil {
		k.timer.Stop()
	}
	if k.abort != nil {
		k.abort()
	}
	k.mu.Unlock()
	k.renewal.Wait()
}

// tick renews the lease, or gives it up when it is over.
func (k *leaseKeeper) tick() {
	ctx, ends, ok := k.startRenewal()
	if !ok {
		return
	}
	defer k.renewal.Done()
	if ctx == nil {
		k.lose(errors.New("idempotency: the lease could not be renewed in time"))
		return
	}
	sent := time.Now()
	left, err := k.x.g.exec.Renew(ctx)
	switch {
	case errors.Is(err, ErrLost):
		k.lose(err)
	case err != nil:
		k.x.emit(EventRenewFailed, time.Since(sent), err)
		k.schedule(ends, k.x.e.cfg.RenewEvery/4)
	case left > 0:
		k.schedule(sent.Add(left-k.x.e.cfg.FinishReserve), min(k.x.e.cfg.RenewEvery, left/3))
	}
	// Nothing left and no error: this execution has no lease to look after.
}

// startRenewal returns the context of the next renewal, nil when the lease is
// over, and false when there is nothing to do.
func (k *leaseKeeper) startRenewal() (context.Context, time.Time, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	cfg := &k.x.e.cfg
	now := time.Now()
	// Past MaxExecution the handler has been told to stop. A claim that is
	// renewed for as long as it does not listen would never be anybody else's.
	if k.stopped || now.Sub(k.x.g.sent) >= cfg.MaxExecution {
		return nil, k.ends, false
	}
	k.renewal.Add(1)
	if !now.Before(k.ends) {
		return nil, k.ends, true
	}
	ctx, abort := context.WithDeadline(k.x.base, earlier(k.ends, now.Add(cfg.StoreTimeout)))
	k.abort = abort
	return ctx, k.ends, true
}

// schedule sets the end of the lease and the next tick, at the latest then.
func (k *leaseKeeper) schedule(ends time.Time, next time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.abort()
	k.ends = ends
	if !k.stopped {
		k.timer.Reset(max(0, min(next, time.Until(ends))))
	}
}

func (k *leaseKeeper) lose(err error) {
	k.mu.Lock()
	stopped := k.stopped
	if k.abort != nil {
		k.abort()
	}
	k.mu.Unlock()
	if stopped { // the handler has returned: the verdict will find out itself
		return
	}
	k.x.emit(EventLeaseLost, 0, err)
	k.cancel(ErrLeaseLost)
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
