package idempotency

import (
	"fmt"
	"time"
)

// EventKind says what an Event is about.
type EventKind uint8

// The kinds of events.
const (
	// EventReply: a keyed call was answered. One per Engine.Do; Duration is the
	// whole call. Mark and Refusal say how.
	EventReply EventKind = iota + 1
	// EventClaim: the store answered a claim. Duration is the claim's; Epoch is
	// above 0 when it was granted, and above 1 when somebody had it before.
	EventClaim
	// EventFinish: the outcome was recorded, or failed to be (Err). Duration is
	// the finish's.
	EventFinish
	// EventRelease: the key was freed (or not: Err).
	EventRelease
	// EventAbandon: the record became UNKNOWN (or failed to: Err).
	EventAbandon
	// EventRenewFailed: a renewal failed; the lease still runs. Err says why.
	EventRenewFailed
	// EventLeaseLost: the lease is gone and the handler's context was cancelled.
	EventLeaseLost
	// EventOverrun: the handler returned later than MaxExecution.
	EventOverrun
	// EventPanic: the handler panicked. Err is a *PanicError.
	EventPanic
	// EventUnrecorded: the effect happened and its record could not be written.
	EventUnrecorded
)

// String returns the kind's name, as it is used in metrics.
func (k EventKind) String() string {
	switch k {
	case EventReply:
		return "reply"
	case EventClaim:
		return "claim"
	case EventFinish:
		return "finish"
	case EventRelease:
		return "release"
	case EventAbandon:
		return "abandon"
	case EventRenewFailed:
		return "renew_failed"
	case EventLeaseLost:
		return "lease_lost"
	case EventOverrun:
		return "overrun"
	case EventPanic:
		return "panic"
	case EventUnrecorded:
		return "unrecorded"
	default:
		return fmt.Sprintf("EventKind(%d)", uint8(k))
	}
}

// Event is one thing that happened to a keyed call. It holds no key and no
// payload.
type Event struct {
	Kind     EventKind
	Method   string
	ID       ID
	Epoch    uint64        // of the execution; 0 where there is none
	Duration time.Duration // where the kind says so
	Mark     Mark          // EventReply
	Refusal  *Refusal      // EventReply; nil when the answer is an outcome
	Err      error
}

// emit tells the observer. A broken observer must not take calls with it.
func (e *Engine) emit(ev Event) {
	if e.cfg.OnEvent == nil {
		return
	}
	defer func() {
		if p := recover(); p != nil {
			e.cfg.Logger.Error("belay: idempotency: OnEvent panicked", "event", ev.Kind.String(), "method", ev.Method, "panic", p)
		}
	}()
	e.cfg.OnEvent(ev)
}
