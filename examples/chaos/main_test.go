//go:build unix

package main

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/belayrpc/belay/examples/internal/testpg"
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "belay-chaos-test-")
	if err != nil {
		panic(err)
	}
	shared.dir = dir
	code := testpg.Main(m)
	_ = os.RemoveAll(dir)
	if err := goleak.Find(); err != nil && code == 0 {
		_, _ = os.Stderr.WriteString(err.Error() + "\n")
		code = 1
	}
	os.Exit(code)
}

// shared are the servers' programs: each is built once for all tests.
var shared = binaries{built: make(map[string]string)}

func testHarness(t *testing.T) *harness {
	t.Helper()
	return &harness{
		quick: true, progress: t.Output(), binaries: shared,
		databases: databases{dir: t.TempDir(), pg: testpg.URL(t)},
	}
}

// The whole harness, small: nothing is wrong with what is shipped.
func TestChaos_Kills(t *testing.T) {
	for _, c := range cells() {
		if c.phase == kills && c.mutant == unchanged {
			t.Run(c.store+"_"+c.mode, func(t *testing.T) { runCell(t, c) })
		}
	}
}

// … and it sees what is wrong with the mutants.
func TestChaos_Mutants(t *testing.T) {
	for _, c := range cells() {
		if c.phase == stale && c.mutant != unchanged && (c.store == postgresql) == (c.mode == same) {
			t.Run(c.store+"_"+c.mutant.name, func(t *testing.T) { runCell(t, c) })
		}
	}
}

func runCell(t *testing.T, c cell) {
	t.Helper()
	r, err := c.run(t.Context(), testHarness(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Log(r)
	for _, m := range r.missed(true) {
		t.Error(m)
	}
	if t.Failed() {
		t.Log(strings.Join(r.notes, "\n"))
	}
}

func TestParse_Errors(t *testing.T) {
	for args, want := range map[string]string{
		"x":              `argument "x"`,
		"-store oracle":  `-store has "oracle"`,
		"-mode both":     `-mode has "both"`,
		"-phase none":    `-phase has "none"`,
		"-mutant absent": `-mutant has "absent"`,
	} {
		var out bytes.Buffer
		err := run(context.Background(), strings.Fields(args), &out, &out)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want …%s…", args, err, want)
		}
	}
}
