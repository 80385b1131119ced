package rules_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	// The go command keeps the result of a test whose inputs are what they were,
	// and would not see that these are inputs.
	_ "github.com/belayrpc/belay/idempotency"
	_ "github.com/belayrpc/belay/idempotency/sqlstore"
	_ "github.com/belayrpc/belay/idempotency/storetest"

	"github.com/belayrpc/belay/examples/internal/overlay"
)

// suite is a package's tests as `go test` finds them.
type suite struct {
	module string // folder, from the root of the tree
	pkg    string // from the module
}

var (
	ofIdempotency = suite{".", "./idempotency"}
	ofSQLStore    = suite{".", "./idempotency/sqlstore"}
	onDatabases   = suite{"examples", "./integration/sqlstore"}
)

// test runs the named tests of the package, sub-tests as A/B, and returns what
// `go test` printed. It stops at nothing: a failure is for the caller to read.
//
// The tests' own time is small, so the linker's is what counts: no vet, which
// `make test` runs on the true source, and no symbols.
func (s suite) test(ctx context.Context, root string, names []string, args ...string) string {
	patterns := make([]string, len(names))
	for i, name := range names {
		patterns[i] = "^" + strings.ReplaceAll(name, "/", "$/^") + "$"
	}
	args = append([]string{
		"test", "-v", "-count=1", "-timeout=2m", "-vet=off", "-ldflags=-s -w", "-run", strings.Join(patterns, "|"),
	}, args...)
	cmd := exec.CommandContext(ctx, "go", append(args, s.pkg)...)
	cmd.Dir = filepath.Join(root, s.module)
	out, err := cmd.CombinedOutput()
	return fmt.Sprintf("%s\n%s\n%v", cmd, out, err)
}

// passed and failed look for a test's own result. That `go test` failed is not
// enough: a mutant that does not compile says nothing about the rule.
func passed(out, name string) bool { return strings.Contains(out, "--- PASS: "+name+" (") }

func failed(out, name string) bool {
	return strings.Contains(out, "--- FAIL: "+name+" (") && !strings.Contains(out, "\npanic: ")
}

// rootOfTree is where the library's go.mod is.
func rootOfTree(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs(filepath.Join("..", "..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "idempotency", "store.go")); err != nil {
		t.Fatalf("the library is not in %s: %v", root, err)
	}
	return root
}

// overlay returns the path of the list that makes the go command read the
// mutant's file in the place of the true one.
func (m *mutant) overlay(t *testing.T, root string) string {
	t.Helper()
	file := filepath.Join(root, filepath.FromSlash(m.file))
	list, err := overlay.Write(t.TempDir(), file, m.rule, m.without)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// checkSound checks that the tests pass on the true source, each once.
func checkSound(t *testing.T, root string, mutants []mutant) {
	t.Helper()
	names := map[suite]map[string]bool{}
	for _, m := range mutants {
		if names[m.suite] == nil {
			names[m.suite] = map[string]bool{}
		}
		names[m.suite][m.red] = true
	}
	for s, set := range names {
		list := slices.Sorted(maps.Keys(set))
		out := s.test(t.Context(), root, list)
		for _, name := range list {
			if !passed(out, name) {
				t.Fatalf("%s does not pass on the true source, so its failure would show nothing:\n%s", name, out)
			}
		}
	}
}

// A build that failed, a test of a longer name and a crash are not the failure
// that is asked for.
func TestFailed(t *testing.T) {
	for out, want := range map[string]bool{
		"=== RUN   TestA\n--- FAIL: TestA (0.00s)\nFAIL\nexit status 1":     true,
		"    --- FAIL: TestA/B (0.00s)\n--- FAIL: TestA (0.00s)\nFAIL":      true,
		"# pkg\n./a.go:1:1: undefined: x\nFAIL\tpkg [build failed]\nFAIL":   false,
		"--- FAIL: TestAll (0.00s)\nFAIL":                                   false,
		"--- FAIL: TestA (0.00s)\npanic: nil dereference [recovered]\nFAIL": false,
		"testing: warning: no tests to run\nPASS":                           false,
		"=== RUN   TestA\n--- PASS: TestA (0.00s)\nPASS":                    false,
	} {
		if got := failed(out, "TestA"); got != want {
			t.Errorf("failed is %v: want %v, of:\n%s", got, want, out)
		}
		if got, want := passed(out, "TestA"), strings.Contains(out, "PASS: TestA"); got != want {
			t.Errorf("passed is %v: want %v, of:\n%s", got, want, out)
		}
	}
}
