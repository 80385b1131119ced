package idempotency

import (
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
	exec Execution
	sent time.Time
}

// launch starts a flight. A store that never blocks is asked on the caller's own
// goroutine: a replay, the commonest answer to a duplicate, then needs no other.
func (e *Engine) launch(f *flight) {
	if !e.traits.Immediate {
		go e.lead(f)
		return
	}
	g, rec, err := e.begin(f)
	switch {
	case err != nil, g.exec == nil && rec.State == StateRunning && !rec.Mismatch:
		go e.lead(f) // to ask again, as the same owner (R6)
	case g.exec != nil:
		go func() {
			deepen(false)
			e.proceed(f, g)
		}()
	default:
		defer e.landed()
		e.publish(f, e.standing(f, rec))
	}
}

// lead takes a flight from claim to result, detached from every caller.
func (e *Engine) lead(f *flight) {
	deepen(false)
	g, res := e.claim(f)
	if res != nil {
		defer e.landed()
		e.publish(f, res)
		return
	}
	e.proceed(f, g)
}

// proceed makes the best of a grant.
func (e *Engine) proceed(f *flight, g grant) {
	defer e.landed()
	w := e.elect(f)
	if w == nil {
		// Everybody went while the store was asked, and nothing was started.
		x := f.execution(f.base, e, g)
		_ = x.release() // reported; a claim that could not be given back ends with its lease
		e.publish(f, &result{refusal: refuseInFlight(0)})
		return
	}
	e.execute(f, g, w)
}

// claim asks the store until it grants the claim or gives an answer. It returns
// a grant or a result.
func (e *Engine) claim(f *flight) (grant, *result) {
	poll, failures := firstPoll, 0
	for {
		g, rec, err := e.begin(f)
		switch {
		case err == nil && g.exec != nil:
			return g, nil
		case err == nil && rec.State == StateRunning && !rec.Mismatch:
			failures = 0
			e.meet(f, rec.RetryIn)
			if !e.pause(f, jitter(poll/2, poll)) {
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
			if !e.pause(f, jitter(firstPoll/2, firstPoll)<<failures) {
				e.orphan(f)
				return grant{}, &result{refusal: refuseStoreUnavailable(err, ExecutedNo)}
			}
		}
	}
}

func (e *Engine) begin(f *flight) (grant, *Record, error) {
	ctx, cancel := e.storeContext(f.base)
	defer cancel()
	sent := time.Now()
	exec, rec, err := e.store.Begin(ctx, f.claim)
	if err == nil && (exec == nil) == (rec == nil) {
		err = errors.New("idempotency: the store returned neither or both of an execution and a record")
	}
	if e.cfg.OnEvent != nil {
		ev := Event{Kind: EventClaim, Method: f.claim.Method, ID: f.claim.ID, Duration: time.Since(sent), Err: err}
		if err == nil && exec != nil {
			ev.Epoch = Epoch(exec.Context(ctx))
		}
		e.emit(ev)
	}
	return grant{exec: exec, sent: sent}, rec, err
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
func (e *Engine) pause(f *flight, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-e.deserted(f):
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
func (o *orphans) adopt(id ID) Owner {
	if orphan, ok := (*o)[id]; ok {
		delete(*o, id)
		if time.Now().Before(orphan.until) {
			return orphan.owner
		}
	}
	var owner Owner
	_, _ = rand.Read(owner[:]) // never fails: crypto/rand ends the program instead
	return owner
}
