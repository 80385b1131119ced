package idempotency

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"
)

const (
	// claimTries is how often a claim is sent whose reply did not come.
	claimTries = 3

	// Polls of an execution in another process start close together, because
	// most executions are short, and spread out.
	firstPoll = 20 * time.Millisecond
	lastPoll  = 500 * time.Millisecond

	// maxOrphans bounds the owners that are remembered after a lost reply.
	maxOrphans = 1024
)

// grant is a claim that was granted, and when it was sent: the holder counts
// its lease from before the store can have started it (R5).
type grant struct {
	exec  Execution
	sent  time.Time
	epoch uint64
}

// lead takes a flight from claim to result, detached from every caller.
func (e *Engine) lead(ctx context.Context, f *flight) {
	defer e.landed()
	g, res := e.claim(ctx, f)
	if res != nil {
		e.publish(f, res)
		return
	}
	w := e.elect(f)
	if w == nil {
		// Everybody went while the store was asked, and nothing was started.
		e.release(ctx, f, g)
		e.publish(f, &result{refusal: refuseInFlight(0)})
		return
	}
	e.execute(f, g, w)
}

// claim asks the store until it grants the claim or gives an answer. It returns
// a grant or a result.
func (e *Engine) claim(ctx context.Context, f *flight) (grant, *result) {
	poll, failures := firstPoll, 0
	for {
		g, rec, err := e.begin(ctx, f)
		switch {
		case err == nil && g.exec != nil:
			return g, nil
		case err == nil && rec.State == StateRunning && !rec.Mismatch:
			failures = 0
			e.meet(f, rec.RetryIn)
			if !pause(f, jitter(poll/2, poll)) {
				return grant{}, &result{refusal: refuseInFlight(rec.RetryIn)}
			}
			poll = min(poll*3/2, lastPoll)
		case err == nil:
			return grant{}, e.standing(f, rec)
		default:
			failures++
			if res := e.claimFailed(f, err, failures); res != nil {
				return grant{}, res
			}
			// With the same owner, or a claim that did land would be a stranger's
			// (R6).
			if !pause(f, jitter(firstPoll/2, firstPoll)<<failures) {
				e.orphan(f)
				return grant{}, &result{refusal: refuseStoreUnavailable(err, ExecutedNo)}
			}
		}
	}
}

func (e *Engine) begin(ctx context.Context, f *flight) (grant, *Record, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.StoreTimeout)
	defer cancel()
	sent := time.Now()
	exec, rec, err := e.store.Begin(ctx, f.claim)
	if err == nil && (exec == nil) == (rec == nil) {
		err = errors.New("idempotency: the store returned neither or both of an execution and a record")
	}
	g := grant{sent: sent}
	if err == nil && exec != nil {
		g.exec, g.epoch = exec, Epoch(exec.Context(ctx))
	}
	if e.cfg.OnEvent != nil {
		e.emit(Event{Kind: EventClaim, Method: f.claim.Method, ID: f.claim.ID, Epoch: g.epoch, Duration: time.Since(sent), Err: err})
	}
	return g, rec, err
}

// claimFailed returns the result of a claim that ended in an error, or nil when
// it should be sent again.
func (e *Engine) claimFailed(f *flight, err error, failures int) *result {
	switch {
	case errors.Is(err, ErrBusy):
		return &result{refusal: refuseWaitersExceeded(err)}
	case errors.Is(err, ErrFull):
		return &result{refusal: refuseStoreFull(err)}
	case errors.Is(err, ErrCorrupt):
		return &result{refusal: refuseRecordCorrupt(err)}
	case failures < claimTries:
		return nil
	}
	e.orphan(f)
	return &result{refusal: refuseStoreUnavailable(err, ExecutedNo)}
}

// standing turns a record that stands in the way into a result.
func (e *Engine) standing(f *flight, rec *Record) *result {
	id := f.claim.ID
	if rec.Mismatch {
		if !e.prints.comparable(rec.Fingerprint) {
			return &result{refusal: refuseRecordCorrupt(
				errors.New("idempotency: the record's fingerprint was made by another version or with a secret that this server does not have"))}
		}
		return &result{refusal: refuseKeyReused(id)}
	}
	switch rec.State {
	case StateDone:
		return e.replay(f, rec)
	case StateUnknown:
		return &result{refusal: refuseOutcomeUnknown(id, e.cfg.UnknownRetryAfter)}
	case StateCancelled:
		return &result{refusal: refuseKeyCancelled(id)}
	case StateAbsent:
		return &result{refusal: refuseKeyExpired(id, e.cfg.window(f.claim.Retention))}
	default:
		return &result{refusal: refuseRecordCorrupt(fmt.Errorf("idempotency: the store returned a record in state %v", rec.State))}
	}
}

func (e *Engine) replay(f *flight, rec *Record) *result {
	r, err := decodeReply(rec.Outcome, e.cfg.Sealer, f.claim.ID)
	if err != nil {
		return &result{refusal: refuseRecordCorrupt(err)}
	}
	res := &result{reply: r, sharedMark: MarkReplayed, executed: ExecutedMaybe}
	if r.code == 0 {
		res.executed = ExecutedYes
	}
	if f.met { // written by this goroutine only
		res.sharedMark = MarkJoined
	}
	return res
}

// pause waits between two claims, and reports false when nobody waits any more.
func pause(f *flight, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-f.quit:
		return false
	}
}

// orphan remembers the owner of a claim that may have landed. The next call
// with the key claims as this owner and so gets what its predecessor could not
// take; without that, a lost reply would lock the key until the lease ends, and
// leave UNKNOWN behind in a store that is not atomic.
func (e *Engine) orphan(f *flight) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.orphans.add(f.claim.ID, f.claim.Owner, time.Now().Add(e.cfg.Lease))
}

// orphans are owners by identity, at most maxOrphans.
type orphans map[ID]orphanedOwner

type orphanedOwner struct {
	owner Owner
	until time.Time
}

func (o *orphans) add(id ID, owner Owner, until time.Time) {
	if *o == nil {
		*o = make(orphans)
	}
	if len(*o) >= maxOrphans {
		for other := range *o { // any one: forgetting costs a wait, not safety
			delete(*o, other)
			break
		}
	}
	(*o)[id] = orphanedOwner{owner, until}
}

// adopt returns the orphaned owner of id, or a new one.
func (o orphans) adopt(id ID) Owner {
	if orphan, ok := o[id]; ok {
		delete(o, id)
		if time.Now().Before(orphan.until) {
			return orphan.owner
		}
	}
	var owner Owner
	_, _ = rand.Read(owner[:]) // never fails: crypto/rand ends the program instead
	return owner
}
