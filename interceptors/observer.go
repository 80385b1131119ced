package interceptors

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
)

// Observer is told what was decided, one event per decision, in the order of
// one call, with no lock held. Observe runs on the call's own path, so it must
// be quick; a panic in it is a panic in the call. It may be called from many
// goroutines. Nothing is allocated where there is no observer.
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// ObserverFunc is a function as an [Observer].
type ObserverFunc func(ctx context.Context, e Event)

// Observe calls f.
func (f ObserverFunc) Observe(ctx context.Context, e Event) { f(ctx, e) }

// EventKind says what an [Event] is about.
type EventKind uint8

const (
	// EventAttempt: an attempt ended. Code, Attempt, Duration and Sent are set.
	EventAttempt EventKind = iota
	// EventBackoff: a retry will be made after Delay.
	EventBackoff
	// EventPoll: a running execution will be asked about again after Delay.
	EventPoll
	// EventCall: the call ended. Code, Stop, Duration and Attempt (their number) are set.
	EventCall
	// EventDemoted: a method declared keyed is treated as undeclared on this
	// channel from now on, because its server does not keep the promise.
	EventDemoted
	// EventMark: a server marks a failure so that nobody above retries it.
	EventMark
	// EventShed: a server refused before any work. Code says how.
	EventShed
	// EventDedupe: a keyed call was answered; Detail is its idempotency-status
	// or the reason of a refusal.
	EventDedupe
	// EventHedge: a second attempt is sent beside one that runs since Delay.
	EventHedge
	// EventLearned: a limit learned from latencies was applied; Delay is the
	// limit, Detail which one it is and the numbers behind it.
	EventLearned
	// EventDryRun: what would have been done, under WithDryRun: a retry after
	// Delay, or, with Stop, no call or no retry.
	EventDryRun
	// EventStacked: another layer of this program retries too; Detail says which.
	EventStacked
	// EventForeign: metadata from a peer was not as it must be; Detail names it.
	EventForeign
)

// Event is one decision. Fields that its kind does not name are zero.
type Event struct {
	Kind     EventKind
	Method   string
	Attempt  int
	Code     codes.Code
	Stop     StopReason
	Sent     bool
	Delay    time.Duration
	Duration time.Duration
	Detail   string
}

func (c *commonConfig) observe(ctx context.Context, e Event) {
	if c.observer != nil {
		c.observer.Observe(ctx, e)
	}
}
