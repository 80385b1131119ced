package interceptors

import (
	"math"
	"math/bits"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// latencies is how long a method's attempts took on a channel lately: what
// hedges and learned limits go by. Kept only where a policy asks for it.
//
// A sample goes into one of 216 buckets, eight to an octave from 1 µs to 69 s,
// so a quantile is right to an eighth. Samples of the last two to three slots
// of 5 s count.
type latencies struct {
	clock clock

	mu    sync.Mutex // guards slots
	slots [latencySlots]latencySlot

	seen  atomic.Pointer[latencyView]
	added atomic.Uint64 // samples so far, whatever has become of them
}

const (
	latencySlots   = 3
	latencySlotFor = 5 * time.Second
	latencyBuckets = 27 * subBuckets
	subBuckets     = 8
	lowestExponent = 10 // 2^10 ns ≈ 1 µs

	// viewFor is how old a view may be: long enough that quantiles cost a call
	// next to nothing, short enough to follow a change.
	viewFor = 100 * time.Millisecond
)

type latencySlot struct {
	number int64 // of 5 s on the clock
	counts [latencyBuckets]uint32
	least  time.Duration
}

// latencyView is what the slots hold at one time, added up.
type latencyView struct {
	at         time.Time
	added      uint64 // of latencies, when it was made
	cumulative [latencyBuckets]uint64
	total      uint64
	least      time.Duration
}

func newLatencies() *latencies { return &latencies{clock: newClock()} }

func (l *latencies) add(d time.Duration, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	number := l.clock.at(now) / int64(latencySlotFor)
	slot := &l.slots[number%latencySlots]
	if slot.number != number || slot.least == 0 {
		*slot = latencySlot{number: number, least: d}
	}
	slot.counts[bucketOf(d)]++
	l.added.Add(1)
	slot.least = max(min(slot.least, d), 1)
}

// view returns the distribution, at most viewFor old; nil when it has fewer than
// the least samples. A view of too few is made anew once there may be enough:
// nothing is to be decided on too few, nor to be let pass when there are enough.
func (l *latencies) view(now time.Time, least int) *latencyView {
	enough := uint64(least) //nolint:gosec // validated: not negative
	v := l.seen.Load()
	if v == nil || now.Sub(v.at) >= viewFor || v.total < enough && v.total+l.added.Load()-v.added >= enough {
		v = l.look(now)
	}
	if v.total < enough {
		return nil
	}
	return v
}

// look adds the slots up.
func (l *latencies) look(now time.Time) *latencyView {
	v := &latencyView{at: now, added: l.added.Load(), least: math.MaxInt64}
	oldest := l.clock.at(now)/int64(latencySlotFor) - latencySlots + 1
	l.mu.Lock()
	for i := range l.slots {
		slot := &l.slots[i]
		if slot.least == 0 || slot.number < oldest {
			continue
		}
		v.least = min(v.least, slot.least)
		for b, n := range slot.counts {
			v.cumulative[b] += uint64(n)
		}
	}
	l.mu.Unlock()
	for b := 1; b < latencyBuckets; b++ {
		v.cumulative[b] += v.cumulative[b-1]
	}
	v.total = v.cumulative[latencyBuckets-1]
	l.seen.Store(v)
	return v
}

// quantile returns the upper edge of the bucket in which the q-th latency lies.
// The edge, not a point within: a hedge at the 0.98 that its bank of 0.02 earns would
// now and then find that empty, and leave the worst tail as it is (lab, TAIL).
func (v *latencyView) quantile(q float64) time.Duration {
	if v.total == 0 {
		return 0
	}
	want := uint64(math.Ceil(q * float64(v.total)))
	b := sort.Search(latencyBuckets, func(b int) bool { return v.cumulative[b] >= want })
	return edgeOf(min(b, latencyBuckets-1))
}

// chance returns the share of latencies that were within d.
func (v *latencyView) chance(d time.Duration) float64 {
	if v.total == 0 {
		return 1
	}
	if d <= 0 || d < v.least {
		return 0
	}
	return float64(v.cumulative[bucketOf(d)]) / float64(v.total)
}

func bucketOf(d time.Duration) int {
	n := uint64(max(d, 1))
	exponent := bits.Len64(n) - 1
	if exponent < lowestExponent {
		return 0
	}
	sub := int(n>>(exponent-3)) & (subBuckets - 1) //nolint:gosec // three bits
	return min((exponent-lowestExponent)*subBuckets+sub, latencyBuckets-1)
}

// edgeOf is the least latency above a bucket.
func edgeOf(bucket int) time.Duration {
	exponent, sub := bucket/subBuckets+lowestExponent, bucket%subBuckets
	return time.Duration((subBuckets + 1 + sub) << (exponent - 3))
}
