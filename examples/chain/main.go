package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	if role, ok := serviceRole(os.Args); ok {
		if err := serve(role, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// The services end with their input, so a signal has only to make this
	// process return.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "chain:", err)
		os.Exit(1)
	}
}

// serviceRole tells whether this process was started to be a service.
func serviceRole(args []string) (string, bool) {
	if len(args) == 3 && args[1] == serveCommand {
		return args[2], true
	}
	return "", false
}

// options are the flags.
type options struct {
	load      load
	parallel  int
	scenarios []scenario
	stacks    []string
}

func parse(args []string, usage io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("chain", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.Float64Var(&o.load.rate, "rate", 100, "users a `second`, in each chain")
	flags.DurationVar(&o.load.duration, "duration", 30*time.Second, "how long they come, after the onset")
	flags.IntVar(&o.load.traceEvery, "trace", 20, "one call in so `many` is traced")
	flags.IntVar(&o.parallel, "parallel", 8, "`chains` that run at the same time")
	scenarioList := flags.String("scenario", "all", "comma-separated `names` of scenarios")
	stackList := flags.String("stack", "all", "comma-separated `names` of stacks")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("argument %q: only flags are understood, and these come first", flags.Arg(0))
	case !(o.load.rate >= 1 && o.load.rate <= 5000): // also refuses NaN
		return o, fmt.Errorf("-rate %v: must be between 1 and 5000", o.load.rate)
	case o.load.duration < 3*time.Second || o.load.duration > time.Hour:
		return o, fmt.Errorf("-duration %v: must be between 3s, when a restarted ledger is back, and 1h", o.load.duration)
	case o.load.traceEvery < 1:
		return o, fmt.Errorf("-trace %d: must be at least 1", o.load.traceEvery)
	case o.parallel < 1 || o.parallel > 64:
		return o, fmt.Errorf("-parallel %d: must be between 1 and 64", o.parallel)
	}
	var names []string
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	chosen, err := choose("-scenario", *scenarioList, names)
	if err != nil {
		return o, err
	}
	for _, s := range scenarios {
		if slices.Contains(chosen, s.name) {
			o.scenarios = append(o.scenarios, s)
		}
	}
	o.stacks, err = choose("-stack", *stackList, stackNames)
	return o, err
}

// choose returns the names that a list asks for, in their own order.
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
	return slices.DeleteFunc(slices.Clone(all), func(n string) bool { return !slices.Contains(asked, n) }), nil
}

// run runs what the flags ask for and writes the table, a trace and the lines
// for scripts. A bar that Belay misses is an error.
func run(ctx context.Context, args []string, out, progress io.Writer) error {
	o, err := parse(args, progress)
	if err != nil {
		return err
	}
	cells := cellsOf(o.scenarios, o.stacks)
	if len(cells) == 0 {
		return fmt.Errorf("-stack %s: none of them is in these scenarios; streams have only %s",
			strings.Join(o.stacks, ","), strings.Join(streamStacks, ","))
	}
	_, _ = fmt.Fprintf(progress, "user → edge → orders → payments → ledger, each a process: %d cells, %g users a second in each for %v, %d chains at a time on %d CPUs\n",
		len(cells), o.load.rate, o.load.duration, o.parallel, runtime.NumCPU())
	results, err := runAll(ctx, cells, o.load, o.parallel, progress)
	if err != nil {
		return err
	}
	names, judged := missed(results)
	if _, err := out.Write(report(results, judged-len(names))); err != nil {
		return err
	}
	if len(names) > 0 {
		return fmt.Errorf("%d of %d bars missed:\n  %s", len(names), judged, strings.Join(names, "\n  "))
	}
	return nil
}

// report is all that is written when the work is done.
func report(results []result, held int) []byte {
	calls := slices.DeleteFunc(slices.Clone(results), func(r result) bool { return r.streams != nil })
	streams := slices.DeleteFunc(slices.Clone(results), func(r result) bool { return r.streams == nil })
	var out bytes.Buffer
	out.WriteByte('\n')
	if len(calls) > 0 {
		writeTable(&out, calls)
		writeSeconds(&out, calls)
	}
	if len(streams) > 0 {
		writeStreams(&out, streams)
	}
	if r, ok := bestTrace(results); ok {
		fmt.Fprintf(&out, "\nOne call, %s with %s, over five processes (trace %s)\n\n", r.scenario, r.stack, r.trace[0].Trace)
		writeWaterfall(&out, r.trace)
	}
	out.WriteByte('\n')
	writeLines(&out, calls)
	writeStreamLines(&out, streams)
	fmt.Fprintf(&out, "\nBars of Belay's stacks that hold: %d (each needs at least %d calls to be judged; streams are always)\n", held, fewest)
	return out.Bytes()
}
