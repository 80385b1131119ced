package breaker

import (
	"sync"
	"sync/atomic"
	"time"
)

// Outcome is what the end of a call says about the server.
type Outcome uint8

const (
	// Neutral says nothing about the server: the caller cancelled, or the call never left. It
	// frees a probe's place and counts nowhere, nor does it end a run of failures. It is the zero
	// Outcome, and values that are not declared here count as Neutral.
	Neutral Outcome = iota
	// Success says that the server works. An answer that refuses the request as wrong is one.
	Success
	// Failure says that the server does not.
	Failure
)

// String returns the outcome in lower case.
func (o Outcome) String() string {
	switch o {
	case Neutral:
		return "neutral"
	case Success:
		return "success"
	case Failure:
		return "failure"
	default:
		return unknownName
	}
}

// Permit is the right to make one call. Report its end with [Permit.Done] on every path, panics
// included: a defer that reports [Neutral] is enough, since only the first report counts.
//
// Permits are values and may be copied; the copies are one permit. The zero Permit may be
// reported and counts nothing.
type Permit struct {
	phase  *phase
	ticket *ticket
	seq    uint64
}

// Done reports how the call ended and how long it took, now. The first Done of a permit and its
// copies counts; the rest do nothing. The latency is looked at only when Config.SlowCall is set.
func (p Permit) Done(outcome Outcome, latency time.Duration) {
	if p.ticket == nil {
		return
	}
	p.DoneAt(outcome, latency, time.Now())
}

// DoneAt is [Permit.Done] for a caller that has read the clock already. The outcome is filed
// under now, the end of the call, so that a call longer than the window counts. See
// [Breaker.AllowAt] for what now must be.
func (p Permit) DoneAt(outcome Outcome, latency time.Duration, now time.Time) {
	if p.ticket == nil || !p.ticket.spend(p.seq) {
		return
	}
	p.phase.owner.done(p, outcome, latency, now)
}

// ticket makes "once" hold for permits, which are values: all copies point at one ticket, and the
// first to raise its seq has spent the permit. Then the ticket is used again with the new seq,
// which no older permit holds. A permit that is dropped leaves its ticket to the garbage
// collector.
type ticket struct {
	seq  atomic.Uint64
	lane uint32 // which shard of a window this ticket writes to; owned by whoever took or spent it

	// Tickets are allocated in a row and used by different processors: each fills its own pair of
	// cache lines.
	_ [112]byte
}

// tickets is shared by all breakers: a ticket belongs to a processor rather than to a breaker,
// and a pool in each of a thousand breakers would hold a thousand times as many.
//
//nolint:gochecknoglobals // a free list of interchangeable parts, without configuration
var tickets = sync.Pool{New: newTicket}

//nolint:gochecknoglobals // spreads new tickets over the lanes
var lastLane atomic.Uint32

func newTicket() any {
	return &ticket{lane: lastLane.Add(1)}
}

func takeTicket() *ticket {
	t, _ := tickets.Get().(*ticket) // the pool holds nothing else
	return t
}

// spend reports whether the permit with this seq is spent by this call rather than an earlier one.
func (t *ticket) spend(seq uint64) bool {
	return t.seq.CompareAndSwap(seq, seq+1)
}
