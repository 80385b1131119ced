package main

import (
	"fmt"
	"slices"
)

// bar is what Belay has promised about one number of one scenario.
type bar struct {
	scenario string
	stacks   []string
	what     string
	value    func(result) float64
	atLeast  bool // else at most
	limit    float64
}

var bars = []bar{
	{"ledger-down", []string{stackNoBreaker}, "leaf_per_call", leafPerCall, false, 1.15},
	{"ledger-down", []string{stackNoBreaker}, "leaf_per_call_steady", leafPerCallSteady, false, 1.02},
	{"ledger-down", []string{stackBelay}, "leaf_per_call_steady", leafPerCallSteady, false, 0.2},
	{"blips-10", []string{stackBelay, stackNoBreaker}, "success", success, true, 0.999},
	{"blips-10", []string{stackBelay, stackNoBreaker}, "leaf_per_call", leafPerCall, false, 1.14},
	{"reply-lost", []string{stackBelay, stackNoBreaker}, "duplicates", duplicates, false, 0},
	{"reply-lost", []string{stackBelay, stackNoBreaker}, "success", success, true, 0.999},
	{"slow-leaf", []string{stackBelay, stackNoBreaker}, "late", late, false, 0},
	{"restart", []string{stackBelay, stackNoBreaker}, "success", success, true, 0.995},
	{"server-stream", []string{stackBelay}, "lost", streamsLost, false, 0},
	{"server-stream", []string{stackBelay}, "repeated", streamsRepeated, false, 0},
	{"upload", []string{stackBelay}, "lost", streamsLost, false, 0},
	{"upload", []string{stackBelay}, "repeated", streamsRepeated, false, 0},
	{"upload", []string{stackBelay}, "heap_mib", streamsHeap, false, 16},
}

func success(r result) float64           { return r.success }
func leafPerCall(r result) float64       { return r.leafPerCall }
func leafPerCallSteady(r result) float64 { return r.leafPerCallSteady }
func duplicates(r result) float64        { return float64(r.duplicates) }
func late(r result) float64              { return float64(r.late) }
func streamsLost(r result) float64       { return float64(r.streams.lost) }
func streamsRepeated(r result) float64   { return float64(r.streams.repeated) }
func streamsHeap(r result) float64       { return r.streams.heapMiB }

// fewest is the number of calls from which a share of 0.999 can be judged.
const fewest = 1500

// judgeable tells whether there were enough calls. Streams are as many in every
// run, and are counted, not estimated.
func (r result) judgeable() bool { return r.streams != nil || r.calls >= fewest }

// missed names the bars that the results do not reach, and says how many were
// looked at. Results of too few calls are not judged.
func missed(results []result) (names []string, judged int) {
	for _, b := range bars {
		for _, r := range results {
			if r.scenario != b.scenario || !slices.Contains(b.stacks, r.stack) || !r.judgeable() {
				continue
			}
			judged++
			if v := b.value(r); !b.holds(v) {
				names = append(names, fmt.Sprintf("%s · %s: %s is %.4g, must be %s", r.scenario, r.stack, b.what, v, b.rule()))
			}
		}
	}
	return names, judged
}

func (b bar) holds(v float64) bool {
	if b.atLeast {
		return v >= b.limit
	}
	return v <= b.limit
}

func (b bar) rule() string {
	if b.atLeast {
		return fmt.Sprintf("at least %g", b.limit)
	}
	return fmt.Sprintf("at most %g", b.limit)
}
