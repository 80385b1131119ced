package main

import (
	"slices"
	"sync"
	"time"
)

// tally counts what one cell's processes report and what its users saw. It may
// be used from many goroutines.
type tally struct {
	mu       sync.Mutex // guards all below
	leaf     map[int32]int
	invoked  map[int32]int
	late     int
	effects  map[effect]int
	spans    map[string][]*span // by trace
	checkout []answer
	remark   []answer
}

// answer is how one call ended for the user.
type answer struct {
	second int32
	ok     bool
	took   time.Duration // from when the call was to start
}

func newTally() *tally {
	return &tally{leaf: map[int32]int{}, invoked: map[int32]int{}, effects: map[effect]int{}, spans: map[string][]*span{}}
}

// keep takes in a fact that a process reported.
func (t *tally) keep(f fact) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case f.Leaf != nil:
		t.leaf[f.Leaf.Second]++
		if f.Leaf.Late && f.Leaf.Second >= 0 {
			t.late++
		}
	case f.Invoked != nil:
		t.invoked[f.Invoked.Second]++
	case f.Effect != nil:
		t.effects[*f.Effect]++
	case f.Span != nil:
		t.spans[f.Span.Trace] = append(t.spans[f.Span.Trace], f.Span)
	}
}

func (t *tally) checkedOut(a answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.checkout = append(t.checkout, a)
}

func (t *tally) remarked(a answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remark = append(t.remark, a)
}

// result is one line of the table. Warming up is not in it.
type result struct {
	scenario, stack string

	calls             int
	success           float64 // share of 1
	leafPerCall       float64
	leafPerCallSteady float64 // without the first second after the onset
	duplicates        int     // effects done once too often, of both kinds
	late              int     // leaf calls begun after the user's deadline
	p50, p99          time.Duration

	remarks          int // calls of the undeclared write
	remarkSuccess    float64
	remarkDuplicates int

	streams *streamTotals // of a scenario of streams; all numbers above are zero then

	bySecond []float64 // leaf calls per user call, for each second after onset
	trace    []*span   // one trace that tells the story; nil where there is none
}

// result sums up. leafless counts the leaf's calls at its caller.
func (t *tally) result(leafless bool) result {
	t.mu.Lock()
	defer t.mu.Unlock()
	leaf := t.leaf
	if leafless {
		leaf = t.invoked
	}
	r := result{late: t.late, trace: tellingTrace(t.spans)}
	r.calls, r.success = succeeded(t.checkout)
	r.remarks, r.remarkSuccess = succeeded(t.remark)
	for e, n := range t.effects {
		r.duplicates += n - 1
		if e.Kind == effectAppend {
			r.remarkDuplicates += n - 1
		}
	}

	calls := map[int32]int{}
	var took []time.Duration
	for _, a := range t.checkout {
		if a.second >= 0 {
			calls[a.second]++
			took = append(took, a.took)
		}
	}
	r.leafPerCall = perCall(leaf, calls, 0)
	r.leafPerCallSteady = perCall(leaf, calls, 1)
	for second := int32(0); calls[second] > 0; second++ {
		r.bySecond = append(r.bySecond, float64(leaf[second])/float64(calls[second]))
	}
	slices.Sort(took)
	r.p50, r.p99 = quantile(took, 0.50), quantile(took, 0.99)
	return r
}

func succeeded(answers []answer) (calls int, share float64) {
	ok := 0
	for _, a := range answers {
		if a.second < 0 {
			continue
		}
		calls++
		if a.ok {
			ok++
		}
	}
	return calls, ratio(ok, calls)
}

// perCall is the leaf's calls per user's call, of users' calls from a second on.
func perCall(leaf, calls map[int32]int, from int32) float64 {
	sum := func(counts map[int32]int) (n int) {
		for second, c := range counts {
			if second >= from {
				n += c
			}
		}
		return n
	}
	return ratio(sum(leaf), sum(calls))
}

func ratio(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// quantile is the nearest-rank quantile of sorted values.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(q*float64(len(sorted))+0.999999) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}
