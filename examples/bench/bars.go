package main

import (
	"fmt"
	"strconv"
)

// bar is a limit that Belay has set itself. It holds in every mode unless it
// names one.
type bar struct {
	what, name string
	mode       string // empty: each
	metric     metric
	limit      float64
}

// metric is what a bar limits.
type metric struct {
	name string
	of   func(result) float64
}

var (
	nsMetric         = metric{"ns", func(r result) float64 { return r.ns }}
	allocsMetric     = metric{"allocs", func(r result) float64 { return r.allocs }}
	overNsMetric     = metric{"over_ns", func(r result) float64 { return r.overNs }}
	overAllocsMetric = metric{"over_allocs", func(r result) float64 { return r.overAllocs }}
)

// Times are for one goroutine; parallelBars say that many are not slower.
var bars = []bar{
	{"client-unary", "success", "seq", nsMetric, 350},
	{"client-unary", "success", "", allocsMetric, 3},
	{"client-unary-attempt-timeout", "success", "seq", nsMetric, 900},
	{"client-unary-attempt-timeout", "success", "", allocsMetric, 7},
	{"budget", "deposit", "seq", nsMetric, 30},
	{"budget", "deposit", "", allocsMetric, 0},
	{"budget", "withdraw-refund", "seq", nsMetric, 30},
	{"budget", "withdraw-refund", "", allocsMetric, 0},
	{"breaker", "success", "seq", nsMetric, 60},
	{"breaker", "success", "", allocsMetric, 0},
	{"breaker-refusal", "refusal", "seq", nsMetric, 40},
	{"breaker-refusal", "refusal", "", allocsMetric, 0},
	{"rpc", "success", "", overAllocsMetric, 20},
	{"dedupe-memory", "flat8", "seq", nsMetric, 5_000},
	{"dedupe-memory", "map20", "seq", nsMetric, 15_000},
	{"stream-message", "no-op", "seq", overNsMetric, 40},
	{"stream-message", "no-op", "", overAllocsMetric, 0},
}

// parallelBars: what must not take longer at 64 goroutines than at one.
var parallelBars = [][2]string{
	{"client-unary", "success"},
	{"client-unary-attempt-timeout", "success"},
	{"budget", "deposit"},
	{"budget", "withdraw-refund"},
	{"breaker", "success"},
	{"breaker-refusal", "refusal"},
}

// verdict is a bar and what was measured.
type verdict struct {
	what, name, mode, metric string
	value, limit             float64
	met                      bool
}

func (v verdict) String() string {
	return fmt.Sprintf("RESULT bench-bar what=%s case=%s mode=%s metric=%s value=%.2f limit=%s met=%t",
		v.what, v.name, v.mode, v.metric, v.value, strconv.FormatFloat(v.limit, 'f', -1, 64), v.met)
}

const (
	// noiseAllocs is what a runtime that works beside the measurement may add to
	// the allocations of one operation.
	noiseAllocs = 0.1

	// noiseShare is by how much two medians of the same thing differ on a quiet
	// machine.
	noiseShare = 0.05
)

// judge holds Belay's results against the bars of what was measured.
func judge(results []result) []verdict {
	var out []verdict
	for _, b := range bars {
		for _, r := range results {
			if r.stack != belay || r.what != b.what || r.name != b.name || (b.mode != "" && r.mode != b.mode) {
				continue
			}
			v := verdict{what: b.what, name: b.name, mode: r.mode, metric: b.metric.name, value: b.metric.of(r), limit: b.limit}
			v.met = v.value <= v.limit
			if b.metric.name == allocsMetric.name || b.metric.name == overAllocsMetric.name {
				v.met = v.value <= v.limit+noiseAllocs
			}
			out = append(out, v)
		}
	}
	for _, p := range parallelBars {
		var seq, par float64
		for _, r := range results {
			if r.stack == belay && r.what == p[0] && r.name == p[1] {
				if r.mode == modes[0].name {
					seq = r.ns
				} else {
					par = r.ns
				}
			}
		}
		if seq > 0 {
			out = append(out, verdict{what: p[0], name: p[1], mode: modes[1].name, metric: "ns_over_seq", value: par / seq, limit: 1, met: par <= seq*(1+noiseShare)})
		}
	}
	return out
}
