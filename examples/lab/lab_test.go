package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
)

// A cell in a process of its own is this binary again.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == workerCommand {
		workerMain()
		return
	}
	goleak.VerifyTestMain(m)
}

// measure runs a quick cell, in a bubble where it is one of fake time.
func measure(t *testing.T, experiment, stack, variant string) outcome {
	t.Helper()
	c := cell{Experiment: experiment, Stack: stack, Variant: variant, Quick: true}
	var o outcome
	var err error
	if c.fake() {
		synctest.Test(t, func(*testing.T) { o, err = run(c) })
	} else {
		o, err = run(c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// between is the values that a metric may have.
type between struct {
	key         string
	least, most float64
}

// A quick cell of every experiment measures what can be known beforehand. All
// of these run a real client and server.
func TestExperiments(t *testing.T) {
	for _, tt := range []struct {
		experiment, stack, variant string
		want                       []between
	}{
		{"chain", stackNone, "hops=3", []between{{"leaf_per_root", 1, 1}, {"extra_total", 0, 0}}},
		{"chain", stackMiddleware, "hops=3", []between{{"leaf_per_root", 27, 27}}},
		{"chain", stackRatio, "hops=1", []between{{"steady", 1.05, 1.15}}},
		{"chain", stackNoBreaker, "hops=3", []between{{"steady", 0.99, 1.01}, {"extra_total", 1, 20}, {"bank", 15, 20}}},
		{"chain", stackBelay, "hops=3", []between{{"steady", 0, 1.01}, {"extra_total", 1, 20}}},
		{"mask", stackNone, "hops=3 p=10", []between{{"success", 0.87, 0.93}, {"load", 1, 1}}},
		{"mask", stackBelay, "hops=3 p=10", []between{{"success", 0.995, 1}, {"load", 1.08, 1.14}}},
		{"swarm", stackMiddleware, "p=100 replies=1", []between{{"load", 3, 3}}},
		{"swarm", stackBelay, "p=100 replies=1", []between{{"load_2s", 1, 1.1}}},
		{"swarm", stackNone, "p=100 replies=0", []between{{"load_60s", 1, 1}, {"success", 0, 0}}},
		{"herd", stackMiddleware, "", []between{{"retries", 300, 300}, {"peak_over_mean", 2, 7}}},
		{"herd", stackBelay, "", []between{{"retries", 300, 300}, {"peak_over_mean", 1, 2}}},
		{"flap", stackBelay, "how=answers", []between{{"lost_up", 0, 0}, {"retries_per_up", 1, 1.1}}},
		{"gone", stackBelay, "", []between{{"longest_ms", 1, 1050}}},
		{"pushback", stackMiddleware, "ask=never", []between{{"obeyed", 0, 0}}},
		{"pushback", stackNative, "ask=never", []between{{"obeyed", 1, 1}, {"passed_up", 0, 0}}},
		{"pushback", stackBelay, "ask=never", []between{{"obeyed", 1, 1}, {"passed_up", 1, 1}}},
		{"pushback", stackBelay, "ask=300ms", []between{{"obeyed", 1, 1}, {"success", 1, 1}}},
		{"deadline", stackNone, "hops=6 root_ms=150", []between{{"success", 0.98, 1}}},
		{"deadline", stackNoBreaker, "hops=6 root_ms=100", []between{{"late", 0, 0}, {"oracle_refused", 0.01, 1}}},
		{"tail", stackNone, "shed=0", []between{{"p99_ms", 150, 230}, {"extra", 0, 0}}},
		{"tail", stackHedge, "shed=0", []between{{"p99_ms", 10, 60}, {"extra", 0.01, 0.03}}},
		{"tail", stackHedge, "shed=1", []between{{"success", 0.78, 0.88}, {"hedges", 0, 0.001}}},
		{"cpu", stackNone, "clock=real over=2", []between{{"load", 0.1, 1}, {"refused", 1, 1000}}},
		{"scale", stackMiddleware, "outage=gone", []between{{"during", 2.9, 3}, {"peak_over_mean", 1.5, 4}}},
		{"scale", stackNoBreaker, "outage=answers", []between{{"during", 1, 1.1}, {"full_s", 0, 10}}},
	} {
		t.Run(strings.TrimSpace(tt.experiment+" "+tt.stack+" "+tt.variant), func(t *testing.T) {
			o := measure(t, tt.experiment, tt.stack, tt.variant)
			for _, want := range tt.want {
				got, ok := o.value(want.key)
				if !ok || got < want.least || got > want.most {
					t.Errorf("%s = %v (measured: %v), want %v to %v", want.key, got, ok, want.least, want.most)
				}
			}
		})
	}
}

// Every cell that a plan names has an experiment and a stack, so that nothing
// but running it can fail.
func TestPlanNamesWhatExists(t *testing.T) {
	for _, quick := range []bool{true, false} {
		cells := options{plan: plan{repeats: 2, quick: quick}, experiments: experimentNames(), stacks: allStacks}.chosen()
		if len(cells) < 50 {
			t.Fatalf("quick=%v: %d cells", quick, len(cells))
		}
		for _, c := range cells {
			if _, err := experimentNamed(c.Experiment); err != nil {
				t.Error(err)
			}
			if _, err := newStack(c.Stack); err != nil {
				t.Error(err)
			}
			if c.Quick != quick {
				t.Errorf("%v: Quick is %v", c, c.Quick)
			}
		}
	}
}

// Every bar is about cells that the full plan has.
func TestBarsAreAboutCells(t *testing.T) {
	cells := options{plan: plan{repeats: 1}, experiments: experimentNames(), stacks: allStacks}.chosen()
	for _, b := range bars {
		if !slices.ContainsFunc(cells, func(c cell) bool {
			r := row{cell: c, metrics: []summary{{key: b.key}, {key: b.of}}}
			_, _, ok := b.find(&r)
			return ok
		}) {
			t.Errorf("bar %+v is about no cell", b)
		}
	}
}

// A run from the command line to the page, with each cell in its own process.
func TestLabWritesPage(t *testing.T) {
	page := filepath.Join(t.TempDir(), "sub", "lab.html")
	var out strings.Builder
	err := lab(context.Background(), []string{
		"-quick", "-repeats", "2", "-exp", "herd,pushback", "-stack", "middleware,belay", "-out", page, "-check",
	}, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 6 {
		t.Errorf("%d lines, want 6: herd for two stacks, pushback for two of two variants:\n%s", len(lines), out.String())
	}
	for _, l := range lines {
		if !strings.HasPrefix(l, "RESULT lab exp=") || !strings.HasSuffix(l, " repeats=2") {
			t.Errorf("line %q is not in the form that scripts read", l)
		}
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<svg", "HERD", "PUSHBACK", "belay"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the page has no %q", want)
		}
	}
	for _, not := range []string{"<script", "<link", "src=", "url(", "@import"} {
		if strings.Contains(string(text), not) {
			t.Errorf("the page has %q, so it may need another file", not)
		}
	}
}

// What fails in a worker reaches the user with its reason.
func TestWorkerReportsItsError(t *testing.T) {
	_, err := runInProcess(context.Background(), cell{Experiment: "herd", Stack: "nobody's", Quick: true})
	if err == nil || !strings.Contains(err.Error(), `stack "nobody's": not known`) {
		t.Errorf("error %v does not say what is wrong", err)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"-repeats", "0"}, "-repeats 0: must be between"},
		{[]string{"-parallel", "65"}, "-parallel 65: must be between"},
		{[]string{"-exp", "chain,nothing"}, `-exp "nothing": must be all, or some of chain,`},
		{[]string{"-stack", "nothing"}, `-stack "nothing": must be all, or some of none,`},
		{[]string{"herd"}, `argument "herd": only flags are understood`},
	} {
		if _, err := parse(tt.args, io.Discard); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error %v, want one with %q", tt.args, err, tt.want)
		}
	}
}
