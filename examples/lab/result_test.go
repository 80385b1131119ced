package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Repeats become one row: the median of each metric, and the worst in the
// direction that is worse for it.
func TestSummarize(t *testing.T) {
	var cells []cell
	var outcomes []outcome
	for i, v := range []float64{0.9, 0.7, 0.8} {
		for _, stack := range []string{stackNone, stackBelay} {
			cells = append(cells, cell{Experiment: "mask", Stack: stack, Variant: "p=10", Repeat: i})
			outcomes = append(outcomes, outcome{Metrics: []metric{{"success", v}, {"load", 1 + v}}})
		}
	}
	rows := summarize(cells, outcomes)
	var lines []string
	for i := range rows {
		lines = append(lines, rows[i].line())
	}
	want := []string{
		"RESULT lab exp=mask stack=none p=10 success=0.8 load=1.8 success_worst=0.7 load_worst=1.9 repeats=3",
		"RESULT lab exp=mask stack=belay p=10 success=0.8 load=1.8 success_worst=0.7 load_worst=1.9 repeats=3",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
}

// A bar is judged by the worst repeat, only for the rows that it is about, that
// have enough calls, and not on a quick run.
func TestJudge(t *testing.T) {
	mask := func(stack string, quick bool, worst, calls float64) row {
		return row{
			cell:    cell{Experiment: "mask", Stack: stack, Variant: "hops=3 p=10", Quick: quick},
			metrics: []summary{{"success", 1, worst}, {"load", 1.1, 1.12}, {"calls", calls, calls}},
		}
	}
	for _, tt := range []struct {
		name         string
		row          row
		missed, seen int
	}{
		{"kept", mask(stackBelay, false, 0.999, 10_000), 0, 2},
		{"missed by the worst", mask(stackBelay, false, 0.9989, 10_000), 1, 2},
		{"too few calls", mask(stackBelay, false, 0.5, 9_999), 0, 0},
		{"of another's", mask(stackNone, false, 0.5, 10_000), 0, 0},
		{"quick", mask(stackBelay, true, 0.5, 10_000), 0, 0},
	} {
		missed, judged := judge([]row{tt.row})
		if len(missed) != tt.missed || judged != tt.seen {
			t.Errorf("%s: missed %q of %d, want %d of %d", tt.name, missed, judged, tt.missed, tt.seen)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 3: "3", 0.12: "0.12", 1.000049: "1.00005", 1234.56: "1234.6", 0.000004: "0"} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %q, want %q", v, got, want)
		}
	}
}

// A window holds the calls that began in it and the attempts that they caused,
// also those that came after it.
func TestTallyBetween(t *testing.T) {
	tally := &tally{
		users: []userCall{{id: 1, at: time.Second, took: 3}, {id: 2, at: 2 * time.Second, took: 1, error: errDown, code: 14}},
		leaves: []leafCall{
			{1, time.Second}, {2, 2 * time.Second}, {2, 9 * time.Second}, {3, 2 * time.Second},
		},
	}
	got := tally.between(2*time.Second, 3*time.Second)
	want := window{calls: 1, ok: 0, leaves: 2, extra: 1, took: []time.Duration{1}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(window{})); diff != "" {
		t.Errorf("window (-want +got):\n%s", diff)
	}
}
