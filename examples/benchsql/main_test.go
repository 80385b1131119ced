package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/belayrpc/belay/examples/internal/testpg"
)

func TestMain(m *testing.M) {
	code := testpg.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		_, _ = os.Stderr.WriteString(err.Error() + "\n")
		code = 1
	}
	os.Exit(code)
}

// A short run calls every contestant and prints a line for each; the figures of so
// short a run prove nothing.
func TestRun(t *testing.T) {
	testpg.URL(t) // a failure to start it names what is missing
	var out bytes.Buffer
	if err := run(t.Context(), []string{"-rounds", "1", "-time", "200ms", "-callers", "20"}, &out, t.Output()); err != nil {
		t.Fatal(err)
	}
	for _, name := range stacks {
		if !strings.Contains(out.String(), "RESULT bench what=sql-throughput stack="+name+" per_second=") {
			t.Errorf("no line for %s in\n%s", name, out.String())
		}
	}
	if !strings.Contains(out.String(), "RESULT bench-bar what=sql-throughput") {
		t.Errorf("no bar in\n%s", out.String())
	}
}

func TestReport_NamesAMissedBar(t *testing.T) {
	rates := map[string][]float64{plain: {100, 100, 100}, control: {100, 90, 110}, belaySame: {54, 70, 50}, belayLease: {50, 50, 50}, belayPool: {40, 40, 40}}
	var out bytes.Buffer
	missed, err := report(&out, settings{rounds: 3, callers: 1}, rates)
	if err != nil || len(missed) != 1 || !strings.Contains(missed[0], "0.540") || !strings.Contains(out.String(), "met=false") {
		t.Errorf("report = %q, %v\n%s; want the median ratio 0.540 missed", missed, err, out.String())
	}
	rates[belaySame] = []float64{54, 70, 56}
	if missed, err = report(&out, settings{rounds: 3, callers: 1}, rates); err != nil || len(missed) != 0 {
		t.Errorf("report = %q, %v; want nothing missed", missed, err)
	}
}

func TestParse_Errors(t *testing.T) {
	for args, want := range map[string]string{
		"x":           `argument "x"`,
		"-rounds 0":   "-rounds is 0",
		"-time 0s":    "-time is 0s",
		"-callers -1": "-callers is -1",
	} {
		var usage bytes.Buffer
		if _, err := parse(strings.Fields(args), &usage); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want …%s…", args, err, want)
		}
	}
}
