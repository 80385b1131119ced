package interceptors

import (
	"sync"
	"time"
)

// WithDryRun decides and reports everything and enforces nothing, so that a
// suite can be put into a running system and looked at first. A client makes
// one attempt per call and refuses none; a server refuses no call for its
// deadline and sends no pushback of its own. What would have been done goes to
// the observer as EventDryRun, and to [Client.DryRunReport]. Keys are honoured
// all the same: a record that is kept for some calls only is worth nothing.
func WithDryRun() Option {
	return commonOption(func(c *commonConfig) { c.dryRun = true })
}

// DryRunReport says what enforcement would have changed for a client's calls.
type DryRunReport struct {
	// From is the beginning of what is counted: an hour ago, or later.
	From time.Time

	// Calls that ended, and those of them that failed.
	Calls, Failed int64

	// Retried is how many failed attempts would have been tried again. What the
	// retries would have met is not known; each is booked as one that failed.
	Retried int64

	// Withheld says why calls would have been refused, or their failures not
	// tried again.
	Withheld map[StopReason]int64
}

// DryRunReport returns what enforcement would have changed within the last
// hour. Without WithDryRun it counts nothing.
func (c *Client) DryRunReport() DryRunReport { return c.dry.report(time.Now()) }

const drySlots = 60 // of a minute

// dryRun counts what would have been done, in slots of a minute.
type dryRun struct {
	clock clock

	mu    sync.Mutex // guards all below
	slots [drySlots]drySlot
}

type drySlot struct {
	minute   int64 // on the clock
	calls    int64
	failed   int64
	retried  int64
	withheld [policyStops]int64
}

// policyStops is one more than the last StopReason.
const policyStops = int(Disabled) + 1

// slotLocked returns the slot of now, cleared when it was an older minute's.
func (d *dryRun) slotLocked(now time.Time) *drySlot {
	minute := d.clock.at(now) / int64(time.Minute)
	slot := &d.slots[minute%drySlots]
	if slot.minute != minute {
		*slot = drySlot{minute: minute}
	}
	return slot
}

func (d *dryRun) call(now time.Time, failed bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	slot := d.slotLocked(now)
	slot.calls++
	if failed {
		slot.failed++
	}
}

// would books what would have been done: a retry, or why none.
func (d *dryRun) would(now time.Time, stop StopReason) {
	d.mu.Lock()
	defer d.mu.Unlock()
	slot := d.slotLocked(now)
	if stop == NotStopped {
		slot.retried++
		return
	}
	slot.withheld[stop]++
}

func (d *dryRun) report(now time.Time) DryRunReport {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := DryRunReport{From: now.Add(-drySlots * time.Minute), Withheld: map[StopReason]int64{}}
	if r.From.Before(d.clock.made) {
		r.From = d.clock.made
	}
	oldest := d.clock.at(now)/int64(time.Minute) - drySlots + 1
	for i := range d.slots {
		slot := &d.slots[i]
		if slot.minute < oldest {
			continue
		}
		r.Calls += slot.calls
		r.Failed += slot.failed
		r.Retried += slot.retried
		for stop, n := range slot.withheld {
			if n > 0 {
				r.Withheld[StopReason(stop)] += n
			}
		}
	}
	return r
}

// would reports a decision that is not enforced.
func (c *call) would(stop StopReason, delay time.Duration) {
	if !c.client.config.dryRun {
		return // the kill switch reports nothing
	}
	c.client.dry.would(c.now, stop)
	c.client.config.observe(c.ctx, Event{
		Kind: EventDryRun, Method: c.method.full, Attempt: int(c.made), Stop: stop, Delay: delay,
	})
}
