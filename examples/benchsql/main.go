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
	"syscall"
	"time"

	"github.com/belayrpc/belay/examples/internal/testpg"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	testpg.Stop()
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "benchsql:", err)
		os.Exit(1)
	}
}

const (
	what = "sql-throughput"

	// minRatio is the bar, for PostgreSQL's default mode.
	minRatio = 0.55
)

// settings are what the flags say.
type settings struct {
	rounds  int
	perRun  time.Duration
	callers int
	check   bool
}

func parse(args []string, usage io.Writer) (settings, error) {
	var s settings
	flags := flag.NewFlagSet("benchsql", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.IntVar(&s.rounds, "rounds", 5, "how often each contestant runs")
	flags.DurationVar(&s.perRun, "time", 3*time.Second, "how long one run takes")
	flags.IntVar(&s.callers, "callers", 32, "concurrent `callers`")
	flags.BoolVar(&s.check, "check", false, "exit with 1 when the bar is missed")
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	switch {
	case flags.NArg() > 0:
		return s, fmt.Errorf("argument %q: there are only flags", flags.Arg(0))
	case s.rounds < 1:
		return s, fmt.Errorf("-rounds is %d: must be at least 1", s.rounds)
	case s.perRun <= 0:
		return s, fmt.Errorf("-time is %v: must be positive", s.perRun)
	case s.callers < 1:
		return s, fmt.Errorf("-callers is %d: must be at least 1", s.callers)
	}
	return s, nil
}

func run(ctx context.Context, args []string, out, progress io.Writer) (err error) {
	s, err := parse(args, progress)
	if err != nil {
		return err
	}
	url, err := testpg.Start()
	if err != nil {
		return err
	}
	b, err := newBench(ctx, url)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }() //nolint:contextcheck // it cleans up, also when ctx has ended
	perSecond, err := b.race(ctx, s, progress)
	if err != nil {
		return err
	}
	missed, err := report(out, s, perSecond)
	if err == nil && s.check && len(missed) > 0 {
		err = fmt.Errorf("bar missed: %s", missed)
	}
	return err
}

// report prints the medians and names the bars that are missed.
func report(out io.Writer, s settings, perSecond map[string][]float64) (missed []string, err error) {
	for _, name := range stacks {
		ratios := make([]float64, s.rounds)
		for i := range ratios {
			ratios[i] = perSecond[name][i] / perSecond[plain][i]
		}
		ratio := median(ratios)
		_, printErr := fmt.Fprintf(out, "RESULT bench what=%s stack=%s per_second=%.0f ratio=%.3f base=%s callers=%d connections=%d\n",
			what, name, median(perSecond[name]), ratio, plain, s.callers, connections)
		err = errors.Join(err, printErr)
		if name != belaySame {
			continue
		}
		met := ratio >= minRatio
		_, printErr = fmt.Fprintf(out, "RESULT bench-bar what=%s stack=%s metric=ratio value=%.3f limit=%.2f met=%t\n", what, name, ratio, minRatio, met)
		err = errors.Join(err, printErr)
		if !met {
			missed = append(missed, fmt.Sprintf("%s: the ratio of %s is %.3f, must be at least %.2f", what, name, ratio, minRatio))
		}
	}
	return missed, err
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
