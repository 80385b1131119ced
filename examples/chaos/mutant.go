package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/belayrpc/belay/examples/internal/overlay"
)

// mutant is the library with one rule taken out, for a binary of its own. A run
// that finds nothing in the library as shipped proves something only if it finds
// the mutants.
type mutant struct {
	name     string
	file     string // below the module's folder
	old, new string // the change; old is there exactly once
}

var unchanged = mutant{name: noMutant}

// mutants are, by mode, the rule without which it is worth nothing.
var mutants = map[string]mutant{
	// The verdict is written whoever owns the record by then, and the effect is
	// committed with it.
	lease: {
		name: "no-compare-and-set",
		file: "idempotency/sqlstore/finish.go",
		old:  "case n == 0:\n\t\treturn e.overtaken(ctx, tx)",
		new:  "case n < 0:\n\t\treturn e.overtaken(ctx, tx)",
	},
	// The effect is committed with the claim, and the verdict after it.
	same: {
		name: "two-transactions",
		file: "idempotency/sqlstore/finish.go",
		old:  "\tst := e.store.dialect.finish(&e.claim, data, e.joined)\n",
		new: `	if e.joined {
		if err := tx.commit(ctx); err != nil {
			return nil, err
		}
		if n, err := e.store.write(ctx, e.store.dialect.conclude(&e.claim, idempotency.StateDone, data)); err != nil || n == 0 {
			return nil, errors.Join(idempotency.ErrLost, err)
		}
		return e.record(idempotency.StateDone, data), nil
	}
	st := e.store.dialect.finish(&e.claim, data, e.joined)
`,
	},
}

const (
	module        = "github.com/belayrpc/belay"
	serverPackage = module + "/examples/chaos/server"
)

// binaries are the servers, by mutant, each built once.
type binaries struct {
	dir   string
	built map[string]string
}

// of returns the program, building it if it must.
func (b *binaries) of(ctx context.Context, m mutant) (string, error) {
	if path, ok := b.built[m.name]; ok {
		return path, nil
	}
	path := filepath.Join(b.dir, "server-"+m.name)
	args := []string{"build", "-o", path}
	if m.file != "" {
		list, err := b.overlay(ctx, m)
		if err != nil {
			return "", fmt.Errorf("mutant %s: %w", m.name, err)
		}
		args = append(args, "-overlay", list)
	}
	if _, err := goCommand(ctx, append(args, serverPackage)...); err != nil {
		return "", err
	}
	b.built[m.name] = path
	return path, nil
}

// overlay writes the changed file and the list of changes that go build takes.
func (b *binaries) overlay(ctx context.Context, m mutant) (string, error) {
	root, err := goCommand(ctx, "list", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(b.dir, m.name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	return overlay.Write(dir, filepath.Join(strings.TrimSpace(root), filepath.FromSlash(m.file)), m.old, m.new)
}

func goCommand(ctx context.Context, args ...string) (string, error) {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", args...) //nolint:gosec // with arguments of our own
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return string(out), nil
}
