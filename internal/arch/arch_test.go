package arch_test

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// root is the module's root, seen from this package's folder.
const root = "../.."

// A source is one Go file of the module.
type source struct {
	folder, name string // folder is relative to the root, with slashes
	file         *ast.File
}

func (s source) isTest() bool { return strings.HasSuffix(s.name, "_test.go") }

// sources parses every Go file of the module, those that this machine's build
// tags leave out as well. Nested modules have rules of their own.
func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return skipFolder(path, entry)
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		all = append(all, source{folder: filepath.ToSlash(folder), name: filepath.Base(path), file: file})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Fatalf("no Go file found below %s", root)
	}
	return all
}

func skipFolder(path string, entry fs.DirEntry) error {
	if path == root {
		return nil
	}
	if strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata" {
		return fs.SkipDir
	}
	if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
		return fs.SkipDir
	}
	return nil
}

func TestImports(t *testing.T) {
	for _, s := range sources(t) {
		for _, spec := range s.file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if why := forbidden(s.folder, s.name, path); why != "" {
				t.Errorf("%s/%s imports %s: %s", s.folder, s.name, path, why)
			}
		}
	}
}

func TestEveryRuleHasAReason(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range rules {
		if r.why == "" {
			t.Errorf("the rule for %s has no reason", r.folder)
		}
		if seen[r.folder] {
			t.Errorf("two rules for %s: only the first would count", r.folder)
		}
		seen[r.folder] = true
	}
}

// One package doc per package, in one file, or go doc glues pieces together.
func TestOnePackageDoc(t *testing.T) {
	docs := map[string][]string{}
	for _, s := range sources(t) {
		if s.isTest() {
			continue
		}
		if _, ok := docs[s.folder]; !ok {
			docs[s.folder] = nil
		}
		if s.file.Doc.Text() == "" {
			continue // none, or a directive such as nolint, which is no doc
		}
		docs[s.folder] = append(docs[s.folder], s.name)
		if want := "Package " + s.file.Name.Name + " "; !strings.HasPrefix(s.file.Doc.Text(), want) {
			t.Errorf("%s/%s: the package doc begins %.30q, want %q", s.folder, s.name, s.file.Doc.Text(), want)
		}
	}
	for folder, files := range docs {
		if len(files) != 1 {
			t.Errorf("package %s is documented in %d files %q, want exactly one", folder, len(files), files)
		}
	}
}

// The top level is what a newcomer reads first: a folder more is a decision.
func TestTopLevel(t *testing.T) {
	want := []string{"breaker", "budget", "examples", "idempotency", "interceptors", "internal", "proto"}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if entry.IsDir() && !strings.HasPrefix(entry.Name(), ".") && !slices.Contains(want, entry.Name()) {
			t.Errorf("folder %s at the top level, want only %q", entry.Name(), want)
		}
	}
}

func TestRequirements(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", cmd, err)
	}
	var mod struct {
		Module struct {
			Path string `json:"path"`
		} `json:"module"`
		Require []struct {
			Path     string `json:"path"`
			Indirect bool   `json:"indirect"`
		} `json:"require"`
		Replace []struct {
			Old struct {
				Path string `json:"path"`
			} `json:"old"`
		} `json:"replace"`
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}

	if mod.Module.Path != module {
		t.Errorf("module %s, want %s", mod.Module.Path, module)
	}
	for _, r := range mod.Replace {
		t.Errorf("go.mod replaces %s: a user's build would not", r.Old.Path)
	}
	for _, r := range mod.Require {
		if !r.Indirect && requirements[r.Path] == "" {
			t.Errorf("go.mod requires %s, which is not one of the modules that this library may bring to its users", r.Path)
		}
		if covers(otel+"/sdk", r.Path) || covers(otel+"/exporters", r.Path) {
			t.Errorf("go.mod requires %s, also for others: the SDK is the program's choice", r.Path)
		}
	}
}

// What the rules say about imports that must never pass, and some that must:
// a check of the check.
func TestForbidden(t *testing.T) {
	for _, c := range []struct {
		folder, name, path string
		want               string // part of the reason; "" is allowed
	}{
		{"budget", "budget.go", "time", ""},
		{"budget", "budget.go", "google.golang.org/grpc/codes", "gRPC is the edge's"},
		{"budget", "budget_test.go", "google.golang.org/grpc", "gRPC is the edge's"},
		{"budget", "budget_test.go", "pgregory.net/rapid", ""},
		{"budget", "budget.go", "pgregory.net/rapid", "for tests only"},
		{"budget", "budget.go", "testing", "testing's flags"},
		{"breaker", "breaker.go", budget, "a state machine"},
		{"breaker", "breaker_test.go", "testing/synctest", ""},
		{"breaker", "breaker_test.go", breaker, ""},
		{"idempotency", "engine.go", "google.golang.org/protobuf/proto", ""},
		{"idempotency", "engine.go", "google.golang.org/genproto/googleapis/rpc/code", ""},
		{"idempotency", "engine.go", "google.golang.org/grpc/status", "gRPC is the edge's"},
		{"idempotency", "engine.go", idempotency + "/sqlstore", "so that jobs and queues"},
		{"idempotency", "engine_test.go", probev1, ""},
		{"idempotency", "engine_test.go", storetest, ""},
		{"idempotency", "engine.go", storetest, "so that jobs and queues"},
		{"idempotency/sqlstore", "store.go", "github.com/jackc/pgx/v5", "a driver here"},
		{"idempotency/storetest", "run.go", "testing", ""},
		{"interceptors", "client.go", "google.golang.org/grpc/metadata", ""},
		{"interceptors", "spans.go", "go.opentelemetry.io/otel/attribute", ""},
		{"interceptors", "spans.go", "go.opentelemetry.io/otel/sdk/trace", "the program's choice"},
		{"interceptors", "spans_test.go", "go.opentelemetry.io/otel/sdk/trace", "the program's choice"},
		{"interceptors", "server.go", idempotency, ""},
		{"interceptors", "server.go", idempotency + "/sqlstore", "imports no store"},
		{"interceptors", "client.go", probe, "fails on request"},
		{"interceptors", "client_test.go", probe, ""},
		{"interceptors", "client_test.go", "github.com/stretchr/testify/require", "go-cmp"},
		{"interceptors/policy", "decide.go", "google.golang.org/grpc/codes", ""},
		{"interceptors/policy", "decide.go", "google.golang.org/grpc", "a pure function"},
		{"interceptors/policy", "decide.go", "google.golang.org/grpc/metadata", "a pure function"},
		{"interceptors/policy", "decide.go", "go.opentelemetry.io/otel/trace", "the edge's"},
		{"proto/belay/v1", "policy.pb.go", idempotency, "to declare a method"},
		{"internal/probe", "start.go", module + "/interceptors", "must not know what it probes"},
		{"interceptors/fresh", "new.go", "google.golang.org/grpc", "has no rule"},
	} {
		got := forbidden(c.folder, c.name, c.path)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s/%s imports %s: %q, want %q", c.folder, c.name, c.path, got, c.want)
		}
	}
}
