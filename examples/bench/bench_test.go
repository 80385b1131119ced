package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// A run of every race, so short that its figures mean nothing: each contestant
// works, and each line can be read.
func TestRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "README.md")
	if err := os.WriteFile(file, []byte("# Title\n"+markBegin+"\nold\n"+markEnd+"\nend\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var stdout bytes.Buffer
	if err := run([]string{"-rounds", "1", "-time", "1ms", "-markdown", file}, &stdout, io.Discard); err != nil {
		t.Fatal(err)
	}

	line := regexp.MustCompile(`^RESULT bench what=\S+ stack=\S+ ns=\d+\.\d allocs=\d+\.\d+ ratio=\d+\.\d+ mode=(seq|par64) case=\S+ base=\S+ control=\d+\.\d+ ` +
		`over_ns=-?\d+\.\d over_allocs=-?\d+\.\d+ best_ns=\d+\.\d cpu_ns=\d+\.\d bytes=\d+$`)
	for l := range strings.Lines(stdout.String()) {
		if strings.HasPrefix(l, "RESULT bench ") && !line.MatchString(strings.TrimSuffix(l, "\n")) {
			t.Errorf("cannot be read: %s", l)
		}
	}
	for _, r := range races() {
		for _, c := range r.contestants {
			for _, m := range modes {
				want := regexp.MustCompile(fmt.Sprintf("(?m)^RESULT bench what=%s stack=%s .* mode=%s case=%s base=%s ", r.what, c.stack, m.name, r.name, r.base))
				if !want.MatchString(stdout.String()) {
					t.Errorf("no line matches %q", want)
				}
			}
		}
	}
	for _, b := range bars {
		if !strings.Contains(stdout.String(), fmt.Sprintf("RESULT bench-bar what=%s case=%s ", b.what, b.name)) {
			t.Errorf("bar of %s, %s was not judged", b.what, b.name)
		}
	}

	table, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(table), "# Title\n"+markBegin+"\nMeasured on ") || !strings.HasSuffix(string(table), "|\n"+markEnd+"\nend\n") {
		t.Errorf("the file is now:\n%s", table)
	}
	if !strings.Contains(string(table), "| client-unary | success | **belay** |") {
		t.Errorf("the table has no row of Belay's:\n%s", table)
	}
}

// Contestants take turns, and ratios are of the same round: a machine that is
// slow in every other round does not show in them.
func TestRatiosAreByRound(t *testing.T) {
	r := race{what: "w", name: "n", base: "base"}
	seq := modes[0]
	entries := []*entry{
		{contestant: contestant{stack: "base"}, mode: seq, samples: []sample{{ns: 10}, {ns: 100}, {ns: 30}}},
		{contestant: contestant{stack: "base-again"}, mode: seq, samples: []sample{{ns: 11}, {ns: 110}, {ns: 33}}},
		{contestant: contestant{stack: "mine"}, mode: seq, samples: []sample{{ns: 20, allocs: 2}, {ns: 200, allocs: 2}, {ns: 90, allocs: 3}}},
	}
	got := r.results(entries)[2]
	want := result{
		what: "w", name: "n", stack: "mine", mode: "seq", base: "base",
		ns: 90, best: 20, allocs: 2, ratio: 2, control: 1.1, overNs: 60, overAllocs: 2,
	}
	if math.Abs(got.control-want.control) < 1e-9 {
		got.control = want.control
	}
	if got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestMeasureCountsOperations(t *testing.T) {
	done, closed := make([]int, 3), 0
	c := contestant{"c", func() (subject, error) {
		next := -1
		return subject{
			worker: func() worker {
				next++
				mine := next
				return func(n int) error {
					done[mine] += n
					return nil
				}
			},
			close: func() error { closed++; return nil },
		}, nil
	}}
	if _, _, err := measure(c, 3, 30); err != nil {
		t.Fatal(err)
	}
	for i, n := range done {
		if n != 10+10 { // the warm-up and the run
			t.Errorf("goroutine %d did %d operations, want 20", i, n)
		}
	}
	if closed != 1 {
		t.Errorf("closed %d times, want once", closed)
	}
}

// What goes wrong in a run ends the program, with the contestant's name.
func TestFailuresAreReported(t *testing.T) {
	boom := errors.New("boom")
	fails := func(int) error { return boom }
	works := func(int) error { return nil }
	for name, open := range map[string]func() (subject, error){
		"open":   func() (subject, error) { return subject{}, boom },
		"worker": func() (subject, error) { return subject{worker: func() worker { return fails }}, nil },
		"close": func() (subject, error) {
			return subject{worker: func() worker { return works }, close: func() error { return boom }}, nil
		},
	} {
		r := race{what: "w", name: "n", base: "victim", contestants: []contestant{{"victim", open}}}
		if _, err := r.run(1, time.Microsecond); !errors.Is(err, boom) {
			t.Errorf("%s: %v, want boom", name, err)
		}
	}
}

func TestJudge(t *testing.T) {
	results := []result{
		{what: "budget", name: "deposit", stack: belay, mode: "seq", ns: 30, allocs: 0.05},
		{what: "budget", name: "deposit", stack: belay, mode: "par64", ns: 32, allocs: 1},
		{what: "budget", name: "deposit", stack: failsafe, mode: "seq", ns: 1000, allocs: 9},
	}
	got := map[string]bool{}
	for _, v := range judge(results) {
		got[v.mode+" "+v.metric] = v.met
	}
	want := map[string]bool{"seq ns": true, "seq allocs": true, "par64 allocs": false, "par64 ns_over_seq": false}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestBadFlags(t *testing.T) {
	_, err := parse([]string{"-rounds", "0", "-time", "-1s", "-what", "rpc,nonsense", "extra"}, io.Discard)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"-rounds is 0", "-time is -1s", `-what has "nonsense"`, `argument "extra"`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
}

func TestMarks(t *testing.T) {
	for _, old := range []string{"", markBegin + "\n", markEnd + "\n" + markBegin + "\n"} {
		if _, err := replaceBetweenMarks(old, "t\n"); err == nil {
			t.Errorf("%q: no error", old)
		}
	}
}
