package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == workerCommand {
		workerMain()
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := lab(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

// experiments are all there are, in the order of the page.
var experiments = []experiment{
	chainExperiment, maskExperiment, swarmExperiment, herdExperiment, flapExperiment, goneExperiment, pushbackExperiment, deadlineExperiment, tailExperiment, proxyExperiment, cpuExperiment, scaleExperiment,
}

func experimentNames() []string {
	names := make([]string, 0, len(experiments))
	for _, e := range experiments {
		names = append(names, e.name)
	}
	return names
}

// options are the flags.
type options struct {
	plan

	out         string
	check       bool
	parallel    int
	experiments []string
	stacks      []string
}

func parse(args []string, usage io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("lab", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.IntVar(&o.repeats, "repeats", 5, "how many `times` each cell runs, each with other random numbers")
	flags.BoolVar(&o.quick, "quick", false, "a size for CI: less load, fewer variants; its numbers are not for comparison")
	flags.StringVar(&o.out, "out", filepath.Join("lab", "build", "lab.html"), "the `file` that the page is written to; empty for none")
	flags.BoolVar(&o.check, "check", false, "fail if Belay misses a bar, and name it")
	flags.IntVar(&o.parallel, "parallel", runtime.NumCPU(), "`cells` that run at the same time")
	names := experimentNames()
	experimentList := flags.String("exp", "all", "comma-separated `names` of experiments: "+strings.Join(names, ","))
	stackList := flags.String("stack", "all", "comma-separated `names` of stacks")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("argument %q: only flags are understood", flags.Arg(0))
	case o.repeats < 1 || o.repeats > 100:
		return o, fmt.Errorf("-repeats %d: must be between 1 and 100", o.repeats)
	case o.parallel < 1 || o.parallel > 64:
		return o, fmt.Errorf("-parallel %d: must be between 1 and 64", o.parallel)
	}
	var err error
	if o.experiments, err = choose("-exp", *experimentList, names); err != nil {
		return o, err
	}
	o.stacks, err = choose("-stack", *stackList, allStacks)
	return o, err
}

// choose returns the names that a list asks for.
func choose(name, list string, all []string) ([]string, error) {
	if list == "all" {
		return all, nil
	}
	asked := strings.Split(list, ",")
	for _, a := range asked {
		if !slices.Contains(all, a) {
			return nil, fmt.Errorf("%s %q: must be all, or some of %s", name, a, strings.Join(all, ","))
		}
	}
	return asked, nil
}

// chosen are the cells that the flags ask for.
func (o options) chosen() []cell {
	var cells []cell
	for _, e := range experiments {
		if !slices.Contains(o.experiments, e.name) {
			continue
		}
		for _, c := range e.cells(o.plan) {
			if slices.Contains(o.stacks, c.Stack) {
				cells = append(cells, c)
			}
		}
	}
	return cells
}

// lab runs what the flags ask for, prints it, writes the page and judges.
func lab(ctx context.Context, args []string, out, progress io.Writer) error {
	o, err := parse(args, progress)
	if err != nil {
		return err
	}
	cells := o.chosen()
	began := time.Now()
	sayf(progress, "%d cells, %d at a time\n", len(cells), o.parallel)
	outcomes, err := runAll(ctx, cells, o.parallel, progress)
	if err != nil {
		return err
	}
	rows := summarize(cells, outcomes)
	for i := range rows {
		sayf(out, "%s\n", rows[i].line())
	}
	missed, judged := judge(rows)
	if o.out != "" {
		if err := writePage(o, rows, missed, judged, time.Since(began)); err != nil {
			return fmt.Errorf("the page: %w", err)
		}
		sayf(progress, "page: %s\n", o.out)
	}
	for _, m := range missed {
		sayf(progress, "bar missed: %s\n", m)
	}
	sayf(progress, "%d bars looked at, %d missed, %v\n", judged, len(missed), time.Since(began).Round(time.Second))
	if o.check && len(missed) > 0 {
		return fmt.Errorf("%d of %d bars missed: %s", len(missed), judged, strings.Join(missed, "; "))
	}
	return nil
}

// sayf writes what people read while the lab runs. If they have closed the
// terminal, the page is still worth its making.
func sayf(w io.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(w, format, args...)
}
