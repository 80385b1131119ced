package breaker

import (
	"sync"
	"time"
)

// Cause is why a breaker changed its state.
type Cause uint8

const (
	// CauseNone is the cause of the state that a breaker starts in.
	CauseNone Cause = iota
	// CauseFailureRate opened the breaker: FailureRate was reached.
	CauseFailureRate
	// CauseConsecutiveFailures opened it: ConsecutiveFailures in a run.
	CauseConsecutiveFailures
	// CauseSlowRate opened it: SlowRate was reached.
	CauseSlowRate
	// CauseOpenTimeOver made it half-open: a call came after the open time.
	CauseOpenTimeOver
	// CauseProbeFailed opened it again: a probe failed.
	CauseProbeFailed
	// CauseProbeSlow opened it again: a probe succeeded, but took SlowCall or longer.
	CauseProbeSlow
	// CauseProbesSucceeded closed it: Probes probes succeeded.
	CauseProbesSucceeded
	// CauseForced is ForceOpen or ForceClose.
	CauseForced
	// CauseResumed is Resume.
	CauseResumed
)

// String returns the cause in words.
func (c Cause) String() string {
	switch c {
	case CauseNone:
		return "none"
	case CauseFailureRate:
		return "failure rate"
	case CauseConsecutiveFailures:
		return "consecutive failures"
	case CauseSlowRate:
		return "slow-call rate"
	case CauseOpenTimeOver:
		return "open time over"
	case CauseProbeFailed:
		return "probe failed"
	case CauseProbeSlow:
		return "probe slow"
	case CauseProbesSucceeded:
		return "probes succeeded"
	case CauseForced:
		return "forced"
	case CauseResumed:
		return "resumed"
	default:
		return unknownName
	}
}

// Transition is one change of state.
type Transition struct {
	// Name is Config.Name.
	Name string
	// Seq numbers the transitions of a breaker from 1. A gap means that OnTransition was too slow
	// and transitions were left out; see maxPending.
	Seq uint64
	// From and To are the states. They differ, always.
	From, To State
	// Cause is why.
	Cause Cause
	// At is when, on the clock of the call that caused it.
	At time.Time
	// OpenFor is how long the breaker refuses calls from At. Zero unless To is Open.
	OpenFor time.Duration
	// Counts is what the window of From held, when From is Closed or ForcedClosed.
	Counts Counts
}

// maxPending bounds the transitions that wait while OnTransition runs. It is reached only when one
// run of OnTransition outlasts as many transitions, and then the oldest are left out: what a
// listener must not miss is the state at the end.
const maxPending = 64

// notifier hands transitions to the listener one at a time and in order, with no lock held. They
// are pushed under the breaker's lock, which fixes the order, and delivered after it is released,
// by whichever goroutine comes first; the others leave theirs to it.
type notifier struct {
	listener func(Transition) // nil: nobody listens

	mu         sync.Mutex
	pending    []Transition
	delivering bool
}

// push queues t. The breaker's lock is held; user code is not run.
func (n *notifier) push(t Transition) {
	if n.listener == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.pending) == maxPending {
		n.pending = append(n.pending[:0], n.pending[1:]...)
	}
	n.pending = append(n.pending, t)
}

// deliver runs the listener for all that is pending, unless another goroutine, or a frame further
// up this one, is at it. The breaker's lock is not held.
func (n *notifier) deliver() {
	if n.listener == nil {
		return
	}
	for {
		t, ok := n.next()
		if !ok {
			return
		}
		n.run(t)
	}
}

func (n *notifier) next() (Transition, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.delivering || len(n.pending) == 0 {
		return Transition{}, false
	}
	t := n.pending[0]
	n.pending = append(n.pending[:0], n.pending[1:]...)
	n.delivering = true
	return t, true
}

// run calls the listener. If that panics, the rest is delivered before the panic goes on: nobody
// else would do it until the next transition.
func (n *notifier) run(t Transition) {
	returned := false
	defer func() {
		n.mu.Lock()
		n.delivering = false
		n.mu.Unlock()
		if !returned {
			n.deliver()
		}
	}()
	n.listener(t)
	returned = true
}
