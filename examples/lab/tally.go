package main

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// tally is what a cell sees of its calls: at their users, by when they were
// meant to start, and at the leaf, by when they came.
type tally struct {
	zero time.Time

	flying  atomic.Int64
	mostFly atomic.Int64

	mu     sync.Mutex // guards all below
	users  []userCall
	leaves []leafCall
}

// userCall is one call of a user's.
type userCall struct {
	id    int64
	at    time.Duration // since zero, when it was meant to start
	took  time.Duration // from then on
	code  codes.Code
	error error
}

// leafCall is one attempt that arrived at the leaf.
type leafCall struct {
	id int64 // the user's call that caused it
	at time.Duration
}

func newTally() *tally { return &tally{zero: time.Now()} }

// arrived notes an attempt at the leaf.
func (t *tally) arrived(id int64) {
	now := time.Since(t.zero)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaves = append(t.leaves, leafCall{id, now})
}

// begun notes that one more call is under way; done notes its end.
func (t *tally) begun() {
	n := t.flying.Add(1)
	for {
		most := t.mostFly.Load()
		if n <= most || t.mostFly.CompareAndSwap(most, n) {
			return
		}
	}
}

func (t *tally) done(id int64, intended time.Time, err error) {
	took := time.Since(intended)
	t.flying.Add(-1)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.users = append(t.users, userCall{id: id, at: intended.Sub(t.zero), took: took, code: status.Code(err), error: err})
}

func (t *tally) leafCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.leaves)
}

// window is the calls that were meant to start in a stretch of time.
type window struct {
	calls, ok int
	leaves    int             // attempts at the leaf
	extra     int             // those of them beyond one a call
	took      []time.Duration // of all calls, sorted
}

// between counts the calls that were meant to start from one time up to
// another, and the attempts at the leaf that they caused, whenever these came.
func (t *tally) between(from, to time.Duration) window {
	t.mu.Lock()
	defer t.mu.Unlock()
	var w window
	attempts := map[int64]int{}
	for _, u := range t.users {
		if u.at < from || u.at >= to {
			continue
		}
		attempts[u.id] = 0
		w.calls++
		if u.code == codes.OK {
			w.ok++
		}
		w.took = append(w.took, u.took)
	}
	for _, l := range t.leaves {
		n, ours := attempts[l.id]
		if !ours {
			continue
		}
		w.leaves++
		if n > 0 {
			w.extra++
		}
		attempts[l.id]++
	}
	slices.Sort(w.took)
	return w
}

// load is attempts at the leaf for each call; 0 without calls.
func (w window) load() float64 { return ratio(w.leaves, w.calls) }

func (w window) success() float64 { return ratio(w.ok, w.calls) }

func ratio(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// forever is later than any cell lasts.
const forever = 1000 * time.Hour

// curves draws load and goodput over time, in steps, each for a second.
func (t *tally) curves(step time.Duration) []curve {
	t.mu.Lock()
	defer t.mu.Unlock()
	var last time.Duration
	for _, l := range t.leaves {
		last = max(last, l.at)
	}
	for _, u := range t.users {
		last = max(last, u.at)
	}
	n := int(last/step) + 1
	arrived, ok := make([]float64, n), make([]float64, n)
	perSecond := 1 / step.Seconds()
	for _, l := range t.leaves {
		arrived[l.at/step] += perSecond
	}
	for _, u := range t.users {
		if i := int((u.at + u.took) / step); u.code == codes.OK && i < n {
			ok[i] += perSecond
		}
	}
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(i) * step.Seconds()
	}
	return []curve{{Plot: "load", X: x, Y: arrived}, {Plot: "goodput", X: x, Y: ok}}
}
