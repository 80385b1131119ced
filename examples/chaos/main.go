package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/belayrpc/belay/examples/internal/testpg"
)

func main() {
	// The servers end with this process, so a signal has only to make it return.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	testpg.Stop()
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	quick, check bool
	stores       []string
	modes        []string
	phases       []string
	mutants      []string
}

func parse(args []string, usage io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("chaos", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.BoolVar(&o.quick, "quick", false, "a few kills of each kind: enough for a look, not for a claim")
	flags.BoolVar(&o.check, "check", false, "exit with 1 when a bar is missed, and name it")
	lists := []struct {
		name string
		all  []string
		into *[]string
	}{
		{"store", []string{postgresql, sqlite}, &o.stores},
		{"mode", []string{same, lease}, &o.modes},
		{"phase", []string{kills, stale}, &o.phases},
		{"mutant", []string{noMutant, mutants[lease].name, mutants[same].name}, &o.mutants},
	}
	values := make([]*string, len(lists))
	for i, l := range lists {
		values[i] = flags.String(l.name, "all", "comma-separated, of "+strings.Join(l.all, ", "))
	}
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("argument %q: there are only flags", flags.Arg(0))
	}
	for i, l := range lists {
		chosen := l.all
		if *values[i] != "all" {
			chosen = strings.Split(*values[i], ",")
		}
		for _, name := range chosen {
			if !slices.Contains(l.all, name) {
				return o, fmt.Errorf("-%s has %q: must be all, or some of %s", l.name, name, strings.Join(l.all, ","))
			}
		}
		*l.into = chosen
	}
	return o, nil
}

// wants reports whether the flags ask for a cell.
func (o options) wants(c cell) bool {
	return slices.Contains(o.stores, c.store) && slices.Contains(o.modes, c.mode) &&
		slices.Contains(o.phases, c.phase) && slices.Contains(o.mutants, c.mutant.name)
}

// harness is what all cells share.
type harness struct {
	quick     bool
	progress  io.Writer
	binaries  binaries
	databases databases
}

func run(ctx context.Context, args []string, out, progress io.Writer) (err error) {
	o, err := parse(args, progress)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "belay-chaos-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	h := &harness{
		quick: o.quick, progress: progress,
		binaries:  binaries{dir: dir, built: make(map[string]string)},
		databases: databases{dir: dir},
	}
	if slices.Contains(o.stores, postgresql) {
		if h.databases.pg, err = testpg.Start(); err != nil {
			return err
		}
	}
	return h.runAll(ctx, o, out)
}

// runAll runs the cells one after the other: each needs the machine for itself.
func (h *harness) runAll(ctx context.Context, o options, out io.Writer) error {
	chosen := slices.DeleteFunc(cells(), func(c cell) bool { return !o.wants(c) })
	_, _ = fmt.Fprintln(h.progress, "building the servers")
	for _, c := range chosen { // all before the first, so that one source is measured
		if _, err := h.binaries.of(ctx, c.mutant); err != nil {
			return err
		}
	}
	var missed []string
	for _, c := range chosen {
		r, err := c.run(ctx, h)
		if err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		lines := []string{r.String(), r.points()}
		if c.mutant == unchanged {
			lines = append(lines, r.notes...)
		}
		if _, err := io.WriteString(out, strings.Join(lines, "\n")+"\n"); err != nil {
			return err
		}
		missed = append(missed, r.missed(o.quick)...)
	}
	for _, m := range missed {
		_, _ = fmt.Fprintln(h.progress, "missed:", m)
	}
	if o.check && len(missed) > 0 {
		return fmt.Errorf("%d bars missed:\n  %s", len(missed), strings.Join(missed, "\n  "))
	}
	return nil
}
