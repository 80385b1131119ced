package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime/pprof"
	"slices"
	"strings"
	"time"
)

func main() {
	err := run(os.Args[1:], os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// settings are what the flags say.
type settings struct {
	what     []string // empty: all
	rounds   int
	perRun   time.Duration
	markdown string
	check    bool
	profile  string
}

func parse(args []string, stderr io.Writer) (settings, error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	quick := flags.Bool("quick", false, "three short rounds: enough for a look, not for a claim")
	what := flags.String("what", "", "comma-separated, of "+strings.Join(whats(), ", ")+"; default all")
	rounds := flags.Int("rounds", 15, "how often each contestant runs")
	perRun := flags.Duration("time", 30*time.Millisecond, "how long one run takes")
	markdown := flags.String("markdown", "", "write the table to this file, between its lines \""+
		markBegin+"\" and \""+markEnd+"\"; - is standard output")
	profile := flags.String("cpuprofile", "", "write a CPU profile of the whole run to this file")
	check := flags.Bool("check", false, "exit with 1 when a bar is missed")
	if err := flags.Parse(args); err != nil {
		return settings{}, err
	}
	s := settings{rounds: *rounds, perRun: *perRun, markdown: *markdown, check: *check, profile: *profile}
	if *quick {
		s.rounds, s.perRun = 3, 10*time.Millisecond
	}
	if *what != "" {
		s.what = strings.Split(*what, ",")
	}
	var errs []error
	if flags.NArg() > 0 {
		errs = append(errs, fmt.Errorf("argument %q: there are only flags", flags.Arg(0)))
	}
	if s.rounds < 1 {
		errs = append(errs, fmt.Errorf("-rounds is %d: must be at least 1", s.rounds))
	}
	if s.perRun <= 0 {
		errs = append(errs, fmt.Errorf("-time is %v: must be positive", s.perRun))
	}
	for _, w := range s.what {
		if !slices.Contains(whats(), w) {
			errs = append(errs, fmt.Errorf("-what has %q: must be of %s", w, strings.Join(whats(), ", ")))
		}
	}
	return s, errors.Join(errs...)
}

func run(args []string, stdout, stderr io.Writer) error {
	set, err := parse(args, stderr)
	if err != nil {
		return err
	}
	out, progress := &printer{to: stdout}, &printer{to: stderr}
	machine := describeMachine()
	out.line(machine)
	all, err := measureAll(set, out, progress)
	if err != nil {
		return err
	}

	verdicts := judge(all)
	missed := 0
	for _, v := range verdicts {
		out.line(v)
		if !v.met {
			missed++
		}
	}
	if err := writeMarkdown(set.markdown, stdout, machine, all); err != nil {
		return err
	}
	if set.check && missed > 0 {
		return fmt.Errorf("%d of %d bars missed", missed, len(verdicts))
	}
	return out.err
}

// measureAll runs the races that were asked for and prints each as it ends.
func measureAll(set settings, out, progress *printer) (all []result, err error) {
	if set.profile != "" {
		stop, profileErr := startProfile(set.profile)
		if profileErr != nil {
			return nil, profileErr
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	for _, r := range races() {
		if len(set.what) > 0 && !slices.Contains(set.what, r.what) {
			continue
		}
		progress.line(r.what + ", " + r.name)
		results, err := r.run(set.rounds, set.perRun)
		if err != nil {
			return nil, fmt.Errorf("%s, %s: %w", r.what, r.name, err)
		}
		for _, res := range results {
			out.line(res)
		}
		all = append(all, results...)
	}
	return all, nil
}

// printer prints lines and keeps the first error, so that a reader who leaves
// early does not cost a check at every line.
type printer struct {
	to  io.Writer
	err error
}

func (p *printer) line(v any) {
	if p.err == nil {
		_, p.err = fmt.Fprintln(p.to, v)
	}
}

func startProfile(path string) (stop func() error, err error) {
	file, err := os.Create(path) //nolint:gosec // the person who runs the program names it
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return file.Close()
	}, nil
}
