package breaker

import (
	"sync"
	"sync/atomic"
	"time"
)

// Breaker stops calls to a server that fails most of them. Make one with [New], for each server or
// service that can fail by itself; [Group] keeps one per key.
//
// A Breaker may be used by any number of goroutines. A nil Breaker and the zero Breaker admit
// every call, count nothing, and cannot be forced; so does one whose configuration is invalid.
type Breaker struct {
	cfg         Config // complete: no zero stands for a default
	failureRate perBillion
	slowRate    perBillion
	err         error

	phase    atomic.Pointer[phase] // written under mu; nil in a breaker that admits everything
	late     atomic.Uint64
	notifier notifier

	mu    sync.Mutex
	opens int // times opened since it was last closed
}

// New returns a closed breaker. It does not fail: a breaker with an invalid configuration admits
// every call, since a mistake in a setting must not cost a service its server, and says what is
// wrong through [Breaker.Err].
func New(cfg Config) *Breaker {
	if err := cfg.Validate(); err != nil {
		return &Breaker{cfg: cfg, err: err}
	}
	cfg = cfg.withDefaults()
	b := &Breaker{
		cfg:         cfg,
		failureRate: toPerBillion(cfg.FailureRate),
		slowRate:    toPerBillion(cfg.SlowRate),
		notifier:    notifier{listener: cfg.OnTransition},
	}
	b.phase.Store(&phase{
		owner:   b,
		state:   Closed,
		entered: Transition{Name: cfg.Name, At: time.Now()},
		window:  newWindow(cfg.Window),
	})
	return b
}

// admitsAll reports whether b never has a state: it is nil, zero or misconfigured.
func (b *Breaker) admitsAll() bool {
	return b == nil || b.phase.Load() == nil
}

// Err returns what is wrong with the configuration that the breaker was made with, or nil. It is
// the error of [Config.Validate].
func (b *Breaker) Err() error {
	if b == nil {
		return nil
	}
	return b.err
}

// Allow asks whether a call may start. If so, report its end with [Permit.Done]. If not, the error
// is an [*OpenError], which errors.Is matches with [ErrOpen]; the permit is then zero.
func (b *Breaker) Allow() (Permit, error) {
	return b.AllowAt(time.Now())
}

// AllowAt is [Breaker.Allow] for a caller that has read the clock already: what it costs is less
// than the reading. now is a result of time.Now, or derived from one by Add; it should not go
// back from one call to the next by more than goroutines racing each other explain.
func (b *Breaker) AllowAt(now time.Time) (Permit, error) {
	if b.admitsAll() {
		return Permit{}, nil
	}
	return b.allow(now)
}

// Ready reports whether Allow would admit a call now. It takes no probe's place and changes no
// state, so it can be asked before work is done for a call that may come later; another call may
// be quicker to take the place.
func (b *Breaker) Ready() bool {
	return b.ReadyAt(time.Now())
}

// ReadyAt is [Breaker.Ready] for a caller that has read the clock already; see [Breaker.AllowAt].
func (b *Breaker) ReadyAt(now time.Time) bool {
	return b.admitsAll() || b.ready(now)
}

// State returns the state. Time alone does not change it: a breaker is Open until a call arrives
// after its open time.
func (b *Breaker) State() State {
	if b.admitsAll() {
		return Closed
	}
	return b.phase.Load().state
}

// TimeLeft returns how long an open breaker will refuse calls from now on: the time until the next
// probe. It is 0 when a call would be admitted, and when no clock can tell: half-open with all
// probes under way, or forced open.
func (b *Breaker) TimeLeft() time.Duration {
	if b.admitsAll() {
		return 0
	}
	err := b.phase.Load().err
	if err == nil {
		return 0
	}
	return err.TimeLeft()
}

// ForceOpen refuses every call until [Breaker.Resume] or [Breaker.ForceClose]. Calls under way are
// not touched; their results change nothing.
func (b *Breaker) ForceOpen() {
	if b.admitsAll() {
		return
	}
	b.force(ForcedOpen, CauseForced, func(from State) bool { return from != ForcedOpen })
}

// ForceClose admits every call until [Breaker.Resume] or [Breaker.ForceOpen].
func (b *Breaker) ForceClose() {
	if b.admitsAll() {
		return
	}
	b.force(ForcedClosed, CauseForced, func(from State) bool { return from != ForcedClosed })
}

// Resume ends ForceOpen and ForceClose: the breaker is Closed, with an empty window, and opens by
// itself again. It does nothing in any other state.
func (b *Breaker) Resume() {
	if b.admitsAll() {
		return
	}
	b.force(Closed, CauseResumed, func(from State) bool { return from == ForcedOpen || from == ForcedClosed })
}
