package breaker

import (
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// State is what a breaker does with calls.
type State uint8

const (
	// Closed admits every call and watches how they end. A breaker starts Closed.
	Closed State = iota
	// Open refuses every call until its time is over. It stays Open after that until a call
	// arrives, which makes it HalfOpen.
	Open
	// HalfOpen admits a few calls as probes; their success closes the breaker, the failure of one
	// opens it again.
	HalfOpen
	// ForcedOpen refuses every call until Resume.
	ForcedOpen
	// ForcedClosed admits every call until Resume. It counts how they end, to be seen in a
	// Snapshot, and does nothing about it.
	ForcedClosed
)

// unknownName is what a value that is not declared is called.
const unknownName = "unknown"

// String returns the state in lower case, words joined by underscores.
func (s State) String() string {
	switch s {
	case Closed:
		return "closed"
	case Open:
		return "open"
	case HalfOpen:
		return "half_open"
	case ForcedOpen:
		return "forced_open"
	case ForcedClosed:
		return "forced_closed"
	default:
		return unknownName
	}
}

// phase is one stay in one state, with all that belongs to it. A permit remembers the phase that
// admitted it, so a late result is one whose phase is over; what it would change is a window or a
// trial that nobody reads any more. That also makes the common path free of the breaker's lock:
// it reads the current phase and nothing else.
//
// The breaker's lock guards trial; the rest is fixed, or synchronised in itself.
type phase struct {
	owner   *Breaker
	state   State
	entered Transition // how the breaker came here; At is set for the first phase too

	window *window      // Closed and ForcedClosed
	run    atomic.Int64 // Closed: failures since the last success
	trial  *trial       // HalfOpen
	err    *OpenError   // Open, HalfOpen, ForcedOpen
}

// offset is a time as windows count it.
func (ph *phase) offset(now time.Time) time.Duration {
	return now.Sub(ph.entered.At)
}

// admit makes a permit for a call of this phase.
func (ph *phase) admit() Permit {
	t := takeTicket()
	return Permit{phase: ph, ticket: t, seq: t.seq.Load()}
}

// allow decides on a call. The first two cases are the paths of a healthy and of a dead server
// and take no lock.
func (b *Breaker) allow(now time.Time) (Permit, error) {
	ph := b.phase.Load()
	switch ph.state {
	case Closed, ForcedClosed:
		return ph.admit(), nil
	case ForcedOpen:
		return Permit{}, ph.err
	case Open:
		if now.Before(ph.err.until) {
			return Permit{}, ph.err
		}
	case HalfOpen:
	}

	b.mu.Lock()
	permit, err := b.allowLocked(now)
	b.mu.Unlock()
	b.notifier.deliver()
	return permit, err
}

// allowLocked decides on a call that may be a probe.
func (b *Breaker) allowLocked(now time.Time) (Permit, error) {
	ph := b.phase.Load()
	if ph.state == Open && !now.Before(ph.err.until) {
		ph = b.halfOpenLocked(now)
	}
	switch ph.state {
	case Closed, ForcedClosed: // somebody closed it while we waited for the lock
		return ph.admit(), nil
	case HalfOpen:
		if ph.trial.freeLocked(b.cfg.Probes, now) > 0 {
			permit := ph.admit()
			ph.trial.holdLocked(permit, now.Add(b.cfg.ProbeLease))
			return permit, nil
		}
	case Open, ForcedOpen:
	}
	return Permit{}, ph.err
}

// ready is allow without taking anything.
func (b *Breaker) ready(now time.Time) bool {
	ph := b.phase.Load()
	switch ph.state {
	case Closed, ForcedClosed:
		return true
	case Open:
		return !now.Before(ph.err.until)
	case HalfOpen:
		b.mu.Lock()
		defer b.mu.Unlock()
		return ph.trial.freeLocked(b.cfg.Probes, now) > 0
	case ForcedOpen:
	}
	return false
}

// done files the end of a call whose permit was spent by the caller just now.
func (b *Breaker) done(p Permit, outcome Outcome, latency time.Duration, now time.Time) {
	ph := p.phase
	if ph.state == HalfOpen {
		b.doneProbe(p, outcome, b.isSlow(latency), now)
		tickets.Put(p.ticket)
		return
	}

	var opened bool
	if outcome == Success || outcome == Failure {
		opened = b.doneClosed(p, outcome == Failure, b.isSlow(latency), now)
	}
	tickets.Put(p.ticket)
	if opened {
		b.notifier.deliver()
	}
}

func (b *Breaker) isSlow(latency time.Duration) bool {
	return b.cfg.SlowCall > 0 && latency >= b.cfg.SlowCall
}

// doneClosed counts the end of a call that a closed phase admitted, and opens the breaker if that
// is one too many. Only a failed or slow call can: a call that just worked is no reason to stop
// calling, and so the sum over the window is not needed on the path that matters.
func (b *Breaker) doneClosed(p Permit, failed, slow bool, now time.Time) (opened bool) {
	ph := p.phase
	if b.phase.Load() != ph {
		b.late.Add(1)
		return false
	}

	call := Counts{Calls: 1}
	if slow {
		call.Slow = 1
	}
	if failed {
		call.Failures = 1
	}
	at := ph.offset(now)
	ph.window.file(p.ticket, at, call)

	if b.cfg.ConsecutiveFailures > 0 {
		switch {
		case failed:
			ph.run.Add(1)
		case ph.run.Load() != 0: // look first: the line stays shared while all is well
			ph.run.Store(0)
		}
	}

	if !failed && !slow || ph.state == ForcedClosed {
		return false
	}
	counts := ph.window.totals(at)
	cause := b.judge(counts, ph.run.Load())
	if cause == CauseNone {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.phase.Load() != ph {
		return false // another call opened it, and this one counted towards that
	}
	b.openLocked(cause, counts, now)
	return true
}

// judge returns why a closed breaker with these counts must open, or CauseNone.
func (b *Breaker) judge(c Counts, run int64) Cause {
	if b.cfg.ConsecutiveFailures > 0 && run >= int64(b.cfg.ConsecutiveFailures) {
		return CauseConsecutiveFailures
	}
	if c.Calls < uint64(b.cfg.MinCalls) { //nolint:gosec // validated, not negative
		return CauseNone
	}
	if b.failureRate.reached(c.Failures, c.Calls) {
		return CauseFailureRate
	}
	if b.cfg.SlowCall > 0 && b.slowRate.reached(c.Slow, c.Calls) {
		return CauseSlowRate
	}
	return CauseNone
}

// doneProbe gives a probe's place back and acts on its verdict. A probe whose lease ran out still
// has a say: the phase is the one that it was asked in.
func (b *Breaker) doneProbe(p Permit, outcome Outcome, slow bool, now time.Time) {
	b.mu.Lock()
	ph := p.phase
	switch {
	case b.phase.Load() != ph:
		if outcome == Success || outcome == Failure {
			b.late.Add(1)
		}
	case outcome == Failure:
		b.openLocked(CauseProbeFailed, Counts{}, now)
	case outcome == Success && slow:
		b.openLocked(CauseProbeSlow, Counts{}, now)
	default:
		ph.trial.releaseLocked(p)
		if outcome == Success {
			ph.trial.successes++
		}
		if ph.trial.successes >= b.cfg.Probes {
			b.closedLocked(Closed, CauseProbesSucceeded, Counts{}, now)
		}
	}
	b.mu.Unlock()
	b.notifier.deliver()
}

// force is ForceOpen, ForceClose and Resume: it enters the state to, unless from says that there
// is nothing to do.
func (b *Breaker) force(to State, cause Cause, applies func(from State) bool) {
	now := time.Now()
	b.mu.Lock()
	if ph := b.phase.Load(); applies(ph.state) {
		var counts Counts
		if ph.window != nil {
			counts = ph.window.totals(ph.offset(now))
		}
		if to == ForcedOpen {
			b.enterLocked(&phase{state: ForcedOpen}, Transition{Cause: cause, At: now, Counts: counts})
		} else {
			b.closedLocked(to, cause, counts, now)
		}
	}
	b.mu.Unlock()
	b.notifier.deliver()
}

// openLocked enters Open, for longer each time in a row.
func (b *Breaker) openLocked(cause Cause, counts Counts, now time.Time) {
	longest := b.cfg.openTime(b.opens)
	b.opens++
	openFor := longest - rand.N(longest/2+1) //nolint:gosec // spreads clients out, guards nothing
	b.enterLocked(&phase{state: Open}, Transition{Cause: cause, At: now, OpenFor: openFor, Counts: counts})
}

// halfOpenLocked enters HalfOpen with no probe under way.
func (b *Breaker) halfOpenLocked(now time.Time) *phase {
	return b.enterLocked(&phase{state: HalfOpen, trial: &trial{}}, Transition{Cause: CauseOpenTimeOver, At: now})
}

// closedLocked enters Closed or ForcedClosed with an empty window. The next opening is short
// again.
func (b *Breaker) closedLocked(to State, cause Cause, counts Counts, now time.Time) {
	b.opens = 0
	b.enterLocked(&phase{state: to, window: newWindow(b.cfg.Window)}, Transition{Cause: cause, At: now, Counts: counts})
}

// enterLocked is the one place where the state changes. A phase is complete before it is
// published, since most of its readers take no lock.
func (b *Breaker) enterLocked(ph *phase, how Transition) *phase {
	from := b.phase.Load()
	how.Name = b.cfg.Name
	how.Seq = from.entered.Seq + 1
	how.From = from.state
	how.To = ph.state

	ph.owner = b
	ph.entered = how
	if ph.window == nil {
		ph.err = &OpenError{name: how.Name, state: how.To, cause: how.Cause}
		if how.OpenFor > 0 {
			ph.err.until = how.At.Add(how.OpenFor)
		}
	}
	b.phase.Store(ph)
	b.notifier.push(how)
	return ph
}
