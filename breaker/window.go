package breaker

import (
	"math/bits"
	"runtime"
	"sync"
	"time"
)

// Counts is what a window holds: how many calls ended with a verdict, and how many of them failed
// or were slow. A call may be both.
type Counts struct {
	Calls, Failures, Slow uint64
}

func (c *Counts) add(d Counts) {
	c.Calls += d.Calls
	c.Failures += d.Failures
	c.Slow += d.Slow
}

func (c *Counts) sub(d Counts) {
	c.Calls -= d.Calls
	c.Failures -= d.Failures
	c.Slow -= d.Slow
}

// reached reports whether part of whole is at least the share rate. Products of 128 bits: no
// count is too large.
func (rate perBillion) reached(part, whole uint64) bool {
	partHi, partLo := bits.Mul64(part, billion)
	rateHi, rateLo := bits.Mul64(whole, uint64(rate))
	return partHi > rateHi || partHi == rateHi && partLo >= rateLo
}

// window counts the calls of the last Config.Window. It is cut into buckets by time, so that it
// can slide, and into shards by processor, so that calls that end at the same moment on different
// processors do not wait for each other's cache line. Times are offsets from the window's start.
type window struct {
	width  time.Duration // of a bucket
	shards []shard       // a power of two
}

const (
	bucketCount = 10
	maxShards   = 16
)

// shard is a whole window of its own for part of the calls. mu guards everything in it.
type shard struct {
	mu      sync.Mutex
	end     time.Duration // of the current bucket
	current int
	total   Counts // the sum of the buckets
	buckets [bucketCount]Counts

	_ [96]byte // to a whole number of cache line pairs
}

func newWindow(length time.Duration) *window {
	w := &window{
		width:  length / bucketCount,
		shards: make([]shard, shardCount(runtime.GOMAXPROCS(0))),
	}
	for i := range w.shards {
		w.shards[i].end = w.width
	}
	return w
}

// shardCount returns the power of two not below twice the processors: with room to spare, tickets
// that meet find another shard quickly. The cap bounds what reading the totals costs.
func shardCount(procs int) int {
	n := 1
	for n < 2*procs && n < maxShards {
		n *= 2
	}
	return n
}

// file counts one call that ended at the offset at. The caller owns t.
func (w *window) file(t *ticket, at time.Duration, call Counts) {
	s := w.lockShard(t)
	s.rollLocked(at, w.width)
	s.buckets[s.current].add(call)
	s.total.add(call)
	s.mu.Unlock()
}

// lockShard locks the ticket's shard. If that is taken, another processor uses it too and the
// ticket moves to the next shard for good: after a few calls each processor has its own, which no
// fixed assignment achieves, since a program cannot ask which processor it runs on.
func (w *window) lockShard(t *ticket) *shard {
	mask := uint32(len(w.shards) - 1) //nolint:gosec // 1 to maxShards
	s := &w.shards[t.lane&mask]
	if s.mu.TryLock() {
		return s
	}
	t.lane++
	s = &w.shards[t.lane&mask]
	s.mu.Lock()
	return s
}

// totals returns the counts at the offset at. Shards are read one after the other; a call that is
// filed meanwhile may be missed, but whoever filed it reads the totals after that.
func (w *window) totals(at time.Duration) Counts {
	var sum Counts
	for i := range w.shards {
		s := &w.shards[i]
		s.mu.Lock()
		// Read or written, a window slides: an idle one must not show what is long over.
		s.rollLocked(at, w.width)
		sum.add(s.total)
		s.mu.Unlock()
	}
	return sum
}

// rollLocked moves the shard on to the bucket that at falls in. An at before the current bucket,
// from a caller that read its clock first and filed second, counts as current: time does not go
// back.
func (s *shard) rollLocked(at, width time.Duration) {
	if at < s.end {
		return
	}
	steps := (at-s.end)/width + 1
	s.end += steps * width //nolint:durationcheck // steps is a number, though its type says time
	if steps >= bucketCount {
		s.current, s.total, s.buckets = 0, Counts{}, [bucketCount]Counts{}
		return
	}
	for range steps {
		s.current = (s.current + 1) % bucketCount
		s.total.sub(s.buckets[s.current])
		s.buckets[s.current] = Counts{}
	}
}
