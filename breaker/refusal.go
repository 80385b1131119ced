package breaker

import (
	"errors"
	"fmt"
	"time"
)

// ErrOpen is matched by errors.Is for every refusal of [Breaker.Allow]. The refusal itself is an
// [OpenError].
var ErrOpen = errors.New("breaker: open")

// OpenError is what [Breaker.Allow] refuses a call with. One value is made when the breaker enters
// a state and returned for every call refused in it, so that a refusal costs nothing; it cannot
// be changed.
type OpenError struct {
	name  string
	state State
	cause Cause
	until time.Time
}

// Name returns Config.Name of the breaker that refused.
func (e *OpenError) Name() string { return e.name }

// State returns the state that refused: [Open], [ForcedOpen], or [HalfOpen] while all its probes
// are under way.
func (e *OpenError) State() State { return e.state }

// Cause returns why the breaker is in that state.
func (e *OpenError) Cause() Cause { return e.cause }

// Until returns when the next probe may start. It is zero when no clock can tell: in [HalfOpen] it
// depends on the probes under way, in [ForcedOpen] on whoever forced it.
func (e *OpenError) Until() time.Time { return e.until }

// TimeLeft returns how long it is, from now, until the next probe may start. It is never negative,
// and 0 when no clock can tell.
func (e *OpenError) TimeLeft() time.Duration {
	if e.until.IsZero() {
		return 0
	}
	return max(0, time.Until(e.until))
}

// Error names the breaker, its state, the cause, and the time left if there is one.
func (e *OpenError) Error() string {
	text := "breaker: "
	if e.name != "" {
		text = fmt.Sprintf("breaker %q: ", e.name)
	}
	switch e.state {
	case Open:
		text += fmt.Sprintf("open (%v), next probe in %v", e.cause, e.TimeLeft())
	case HalfOpen:
		text += "half-open, all probes are under way"
	case ForcedOpen:
		text += "forced open"
	case Closed, ForcedClosed: // these refuse nothing
	}
	return text
}

// Is reports whether target is [ErrOpen].
func (e *OpenError) Is(target error) bool { return target == ErrOpen }
