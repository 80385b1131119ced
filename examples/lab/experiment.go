package main

import "fmt"

// experiment is one question put to all stacks.
type experiment struct {
	name  string
	title string
	text  string // for the page: what is done, and what the columns mean

	cells func(plan) []cell
	run   func(*world) (outcome, error)
	plots []plotSpec

	alone bool // its cells need both processors
}

// plan is how much is to be run.
type plan struct {
	repeats int
	quick   bool
}

// cross returns a cell for each stack, variant and repeat.
func (p plan) cross(name string, stacks []string, variants ...string) []cell {
	if len(variants) == 0 {
		variants = []string{""}
	}
	cells := make([]cell, 0, len(variants)*len(stacks)*p.repeats)
	for _, v := range variants {
		for _, s := range stacks {
			for r := range p.repeats {
				cells = append(cells, cell{Experiment: name, Stack: s, Variant: v, Repeat: r, Quick: p.quick})
			}
		}
	}
	return cells
}

// variants are one variant for each value.
func variants(format string, values []int) []string {
	all := make([]string, 0, len(values))
	for _, v := range values {
		all = append(all, fmt.Sprintf(format, v))
	}
	return all
}

// fake reports whether a cell runs in fake time.
func (c cell) fake() bool { return c.text("clock") != "real" }

// run runs a cell and takes down what it started.
func run(c cell) (outcome, error) {
	e, err := experimentNamed(c.Experiment)
	if err != nil {
		return outcome{}, err
	}
	w := newWorld(c, c.fake())
	o, err := e.run(w)
	if closed := w.close(); err == nil {
		err = closed
	}
	if err != nil {
		return outcome{}, fmt.Errorf("%v: %w", c, err)
	}
	return o, nil
}

func experimentNamed(name string) (*experiment, error) {
	for i := range experiments {
		if experiments[i].name == name {
			return &experiments[i], nil
		}
	}
	return nil, fmt.Errorf("experiment %q: not known", name)
}
