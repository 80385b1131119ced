package breaker

import "time"

// Snapshot is a breaker at one moment, for status pages and metrics.
type Snapshot struct {
	// Name is Config.Name.
	Name string
	// State is the state, and Since when it began. Since is zero for a breaker that is nil, zero
	// or misconfigured.
	State State
	Since time.Time
	// Last is the transition into State; zero in a breaker that never changed. Last.Counts is
	// what opened it.
	Last Transition
	// TimeLeft is as [Breaker.TimeLeft].
	TimeLeft time.Duration
	// Counts is what the window holds in Closed and ForcedClosed.
	Counts Counts
	// Run is the failures since the last success. It is counted in Closed, if
	// Config.ConsecutiveFailures is set.
	Run int
	// ProbesUnderWay and ProbesSucceeded are the probes of HalfOpen. Probes whose lease ran out are
	// not under way.
	ProbesUnderWay, ProbesSucceeded int
	// Opens is how many times in a row the breaker opened without closing in between; it makes the
	// open time grow.
	Opens int
	// Late is how many verdicts ever arrived after the state that they were for, and so were not
	// counted.
	Late uint64
}

// Snapshot returns the breaker as it is now. It changes nothing.
func (b *Breaker) Snapshot() Snapshot {
	if b.admitsAll() {
		if b == nil {
			return Snapshot{}
		}
		return Snapshot{Name: b.cfg.Name}
	}
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	ph := b.phase.Load()
	s := Snapshot{
		Name:  b.cfg.Name,
		State: ph.state,
		Since: ph.entered.At,
		Opens: b.opens,
		Late:  b.late.Load(),
		Run:   int(ph.run.Load()),
	}
	if ph.entered.Seq > 0 {
		s.Last = ph.entered
	}
	if ph.window != nil {
		s.Counts = ph.window.totals(ph.offset(now))
	}
	if ph.trial != nil {
		s.ProbesUnderWay = b.cfg.Probes - ph.trial.freeLocked(b.cfg.Probes, now)
		s.ProbesSucceeded = ph.trial.successes
	}
	if ph.err != nil {
		s.TimeLeft = ph.err.TimeLeft()
	}
	return s
}
