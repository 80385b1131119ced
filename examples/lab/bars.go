package main

import (
	"fmt"
	"slices"
	"strings"
)

// bar is what Belay has promised about one number of one experiment. It is
// judged by the worst of the repeats unless it says otherwise.
type bar struct {
	experiment string
	stacks     []string
	variant    string // what the variant must contain; "" is any
	except     string // what it must not; "" is nothing
	key        string
	atLeast    bool // else at most

	limit float64
	// byMedian is for what a single repeat can only estimate: the p99.9 of
	// 100,000 calls rests on a hundred of them.
	byMedian bool
	// fewest is how many calls a row must have: a share of few calls is chance.
	fewest float64
	// of, if not empty, is another metric of the row that the limit is a multiple
	// of.
	of string
}

// onlyBank is Belay with its breakers out of the way, for bars about the bank.
// A breaker can only lower the load, so these hold for the defaults too where
// they say "at most".
var (
	defaults = []string{stackBelay, stackNoBreaker}
	onlyBank = []string{stackNoBreaker}
)

var bars = []bar{
	{experiment: "chain", stacks: defaults, key: "extra_total", limit: 1, of: "bank"},
	{experiment: "chain", stacks: defaults, key: "steady", limit: 1.01},
	{experiment: "chain", stacks: onlyBank, key: "steady", atLeast: true, limit: 0.99},
	{experiment: "mask", stacks: defaults, variant: "p=10", key: "success", atLeast: true, limit: 0.999, fewest: 10_000},
	{experiment: "mask", stacks: defaults, variant: "p=10", key: "load", limit: 1.12, fewest: 10_000},
	{experiment: "swarm", stacks: append(slices.Clone(defaults), stackNativeOnBelay), variant: "p=50 replies=1", key: "load_2s", limit: 1.15},
	{experiment: "swarm", stacks: append(slices.Clone(defaults), stackNativeOnBelay), variant: "p=100 replies=1", key: "load_2s", limit: 1.02},
	{experiment: "swarm", stacks: defaults, variant: "replies=0", key: "load_60s", limit: 1.6},
	{experiment: "deadline", stacks: []string{stackBelay, stackNoBreaker, stackLearn, stackLearnNoBreaker}, except: "detached", key: "late", limit: 0},
	{experiment: "deadline", stacks: []string{stackLearn, stackLearnNoBreaker}, except: "detached", key: "too_short", limit: 0},
	{experiment: "deadline", stacks: []string{stackLearn, stackLearnNoBreaker}, variant: "clock=fake", except: "detached", key: "doomed_refused", atLeast: true, limit: 0.8, of: "oracle_refused"},
	{experiment: "tail", stacks: []string{stackHedge}, variant: "shed=0", key: "p999_ms", limit: 40, byMedian: true},
	{experiment: "tail", stacks: []string{stackHedge}, variant: "shed=0", key: "extra", limit: 0.022},
	{experiment: "tail", stacks: []string{stackHedge}, variant: "shed=1", key: "hedges", limit: 0.0005},
	{experiment: "herd", stacks: defaults, key: "peak_over_mean", limit: 3},
	{experiment: "flap", stacks: defaults, key: "lost_up", limit: 0},
	{experiment: "flap", stacks: defaults, key: "retries_per_up", limit: 1.1},
	{experiment: "gone", stacks: defaults, key: "longest_ms", limit: 1050}, // ConnectGrace and an attempt
	{experiment: "gone", stacks: defaults, key: "most_in_flight", limit: 256},
	{experiment: "pushback", stacks: defaults, key: "obeyed", atLeast: true, limit: 1},
	{experiment: "pushback", stacks: defaults, variant: "ask=never", key: "passed_up", atLeast: true, limit: 1},
	{experiment: "proxy", stacks: defaults, variant: "call=write", key: "sent_again", limit: 0},
	{experiment: "proxy", stacks: defaults, key: "origin_right", atLeast: true, limit: 1},
}

// judge names the bars that the rows do not reach, and says how many were
// looked at. Rows of a quick run have too few calls to be judged.
func judge(rows []row) (missed []string, judged int) {
	for _, b := range bars {
		for i := range rows {
			r := &rows[i]
			value, limit, ok := b.find(r)
			if !ok || r.Quick {
				continue
			}
			judged++
			if b.atLeast && value < limit || !b.atLeast && value > limit {
				missed = append(missed, fmt.Sprintf("%v: %s is %s, must be %s", r.cell, b.key, number(value), b.rule(limit)))
			}
		}
	}
	return missed, judged
}

// find returns what the bar compares in a row that it is about.
func (b bar) find(r *row) (value, limit float64, ok bool) {
	if r.Experiment != b.experiment || !slices.Contains(b.stacks, r.Stack) || !b.about(r) {
		return 0, 0, false
	}
	s, ok := r.summary(b.key)
	if !ok {
		return 0, 0, false
	}
	if calls, counted := r.summary("calls"); counted && calls.worst < b.fewest {
		return 0, 0, false
	}
	switch {
	case b.of == "" && b.byMedian:
		return s.median, b.limit, true
	case b.of == "":
		return s.worst, b.limit, true
	}
	// Values of one repeat belong together; medians are the closest to it.
	of, ok := r.summary(b.of)
	return s.median, b.limit * of.median, ok
}

func (b bar) about(r *row) bool {
	switch {
	case b.except != "" && strings.Contains(r.Variant, b.except):
		return false
	case b.variant == "clock=fake":
		return r.fake()
	default:
		return strings.Contains(r.Variant+" ", b.variant)
	}
}

func (b bar) rule(limit float64) string {
	rule := "at most " + number(limit)
	if b.atLeast {
		rule = "at least " + number(limit)
	}
	if b.of != "" {
		rule += fmt.Sprintf(" (%g × %s)", b.limit, b.of)
	}
	return rule
}
