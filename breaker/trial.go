package breaker

import (
	"slices"
	"time"
)

// trial is the half-open state's account of its probes. The breaker's lock guards it.
type trial struct {
	leases    []lease // of the probes under way
	successes int
}

// lease is a probe's hold on its place.
type lease struct {
	ticket *ticket // names the probe: nobody else gets it before the probe is done
	until  time.Time
}

// freeLocked drops the leases that ran out and returns how many of places are free.
func (t *trial) freeLocked(places int, now time.Time) int {
	t.leases = slices.DeleteFunc(t.leases, func(l lease) bool { return !now.Before(l.until) })
	return places - len(t.leases)
}

// holdLocked gives the permit a place until then.
func (t *trial) holdLocked(p Permit, until time.Time) {
	t.leases = append(t.leases, lease{ticket: p.ticket, until: until})
}

// releaseLocked gives the permit's place back, unless its lease ran out before.
func (t *trial) releaseLocked(p Permit) {
	t.leases = slices.DeleteFunc(t.leases, func(l lease) bool { return l.ticket == p.ticket })
}
