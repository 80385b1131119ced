package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// cell is one run of one experiment: a stack in one variant of it.
type cell struct {
	Experiment string `json:"experiment"`
	Stack      string `json:"stack"`
	Variant    string `json:"variant"` // "key=value …", as it is printed
	Repeat     int    `json:"repeat"`
	Quick      bool   `json:"quick"`
}

func (c cell) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s · %s %s", c.Experiment, c.Stack, c.Variant))
}

// param returns the value of a key of the variant, 0 where it has none.
func (c cell) param(key string) int {
	n, err := strconv.Atoi(c.text(key))
	if err != nil {
		return 0
	}
	return n
}

func (c cell) text(key string) string {
	for field := range strings.FieldsSeq(c.Variant) {
		if k, v, ok := strings.Cut(field, "="); ok && k == key {
			return v
		}
	}
	return ""
}

// outcome is what a cell measured.
type outcome struct {
	Metrics []metric `json:"metrics"`
	Curves  []curve  `json:"curves"`
}

type metric struct {
	Key   string  `json:"key"`
	Value float64 `json:"value"`
}

// curve is a line of a plot: load over time, a distribution.
type curve struct {
	Plot string    `json:"plot"` // curves of one plot share it: "load", "goodput"
	X    []float64 `json:"x"`
	Y    []float64 `json:"y"`
}

func (o *outcome) add(key string, value float64) {
	o.Metrics = append(o.Metrics, metric{key, value})
}

func (o *outcome) value(key string) (float64, bool) {
	for _, m := range o.Metrics {
		if m.Key == key {
			return m.Value, true
		}
	}
	return 0, false
}

// row is all repeats of a cell.
type row struct {
	cell

	metrics []summary
	curves  []curve // of the first repeat
	repeats int
}

// summary is one metric over all repeats.
type summary struct {
	key           string
	median, worst float64
}

// better are the metrics of which more is better; of all others less is.
var better = map[string]bool{
	"success": true, "goodput": true, "share": true, "doomed_refused": true, "oracle_refused": true,
	"obeyed": true, "passed_up": true, "origin_right": true, "lowest_up": true, "calls": true, "bank": true,
	"replies": true,
}

// summarize puts the repeats of each cell together, in the order of the cells.
func summarize(cells []cell, outcomes []outcome) []row {
	var rows []row
	index := map[cell]int{}
	all := map[cell][]outcome{}
	for i, c := range cells {
		c.Repeat = 0
		if _, seen := index[c]; !seen {
			index[c] = len(rows)
			rows = append(rows, row{cell: c, curves: outcomes[i].Curves})
		}
		all[c] = append(all[c], outcomes[i])
	}
	for i := range rows {
		repeats := all[rows[i].cell]
		rows[i].repeats = len(repeats)
		for _, m := range repeats[0].Metrics {
			var values []float64
			for _, o := range repeats {
				if v, ok := o.value(m.Key); ok {
					values = append(values, v)
				}
			}
			rows[i].metrics = append(rows[i].metrics, summarizeOne(m.Key, values))
		}
	}
	return rows
}

func summarizeOne(key string, values []float64) summary {
	slices.Sort(values)
	s := summary{key: key, median: values[len(values)/2], worst: values[len(values)-1]}
	if len(values)%2 == 0 {
		s.median = (values[len(values)/2-1] + values[len(values)/2]) / 2
	}
	if better[key] {
		s.worst = values[0]
	}
	return s
}

func (r *row) summary(key string) (summary, bool) {
	i := slices.IndexFunc(r.metrics, func(s summary) bool { return s.key == key })
	if i < 0 {
		return summary{}, false
	}
	return r.metrics[i], true
}

// line is the row for a script.
func (r *row) line() string {
	var b strings.Builder
	fmt.Fprintf(&b, "RESULT lab exp=%s stack=%s", r.Experiment, r.Stack)
	if r.Variant != "" {
		b.WriteString(" " + r.Variant)
	}
	for _, s := range r.metrics {
		fmt.Fprintf(&b, " %s=%s", s.key, number(s.median))
	}
	for _, s := range r.metrics {
		if s.worst != s.median {
			fmt.Fprintf(&b, " %s_worst=%s", s.key, number(s.worst))
		}
	}
	fmt.Fprintf(&b, " repeats=%d", r.repeats)
	return b.String()
}

// number writes a value with as many digits as mean something.
func number(v float64) string {
	switch {
	case v == float64(int64(v)):
		return strconv.FormatInt(int64(v), 10)
	case v >= 100 || v <= -100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	default:
		return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(v, 'f', 5, 64), "0"), ".")
	}
}

// quantile returns the q-quantile of values by nearest rank; 0 of none.
func quantile[T cmp.Ordered](sorted []T, q float64) T {
	if len(sorted) == 0 {
		var zero T
		return zero
	}
	i := min(int(q*float64(len(sorted))), len(sorted)-1)
	return sorted[i]
}
