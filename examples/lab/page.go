package main

import (
	"embed"
	"html/template"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

//go:embed page.html
var pageFile embed.FS

// pageData is what the template shows.
type pageData struct {
	Quick   bool
	Repeats int
	Took    string
	Machine string
	Missed  []string
	Judged  int
	Parts   []pagePart
}

// pagePart is one experiment.
type pagePart struct {
	Name, Title string
	Text        []string
	Plots       []pagePlot
	Tables      []pageTable
}

type pagePlot struct {
	Title string
	SVG   template.HTML
}

// pageTable is one variant: a row for each stack.
type pageTable struct {
	Variant string
	Keys    []string
	Rows    []pageRow
}

type pageRow struct {
	Stack string
	Belay bool
	Cells []pageCell
}

type pageCell struct {
	Median, Worst string
	Bar           string // how Belay stands with its bars: "kept", "missed" or nothing
}

// writePage writes the report: one file that needs no other.
func writePage(o options, rows []row, missed []string, judged int, took time.Duration) error {
	data := pageData{
		Quick: o.quick, Repeats: o.repeats, Took: took.Round(time.Second).String(),
		Machine: machine(), Missed: missed, Judged: judged,
	}
	for _, e := range experiments {
		ours := slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return r.Experiment != e.name })
		if len(ours) == 0 {
			continue
		}
		part := pagePart{Name: e.name, Title: e.title, Text: strings.Split(e.text, "\n"), Tables: tables(ours)}
		for _, p := range e.plots {
			svg, err := p.draw(ours)
			if err != nil {
				return err
			}
			if svg != "" {
				part.Plots = append(part.Plots, pagePlot{p.title, svg})
			}
		}
		data.Parts = append(data.Parts, part)
	}
	page, err := template.ParseFS(pageFile, "page.html")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(o.out), 0o755); err != nil { //nolint:gosec // a report is for everybody
		return err
	}
	var text strings.Builder
	if err := page.Execute(&text, data); err != nil {
		return err
	}
	return os.WriteFile(o.out, []byte(text.String()), 0o644) //nolint:gosec // a report is for everybody
}

func machine() string {
	return runtime.GOOS + "/" + runtime.GOARCH + ", " + number(float64(runtime.NumCPU())) + " CPUs, " + runtime.Version()
}

// tables are the rows by variant.
func tables(rows []row) []pageTable {
	var all []pageTable
	for i := range rows {
		r := &rows[i]
		at := slices.IndexFunc(all, func(t pageTable) bool { return t.Variant == r.Variant })
		if at < 0 {
			at = len(all)
			all = append(all, pageTable{Variant: r.Variant, Keys: keysOf(rows, r.Variant)})
		}
		all[at].Rows = append(all[at].Rows, tableRow(r, all[at].Keys))
	}
	return all
}

// keysOf are the metrics that any stack has in a variant.
func keysOf(rows []row, variant string) []string {
	var keys []string
	for i := range rows {
		if rows[i].Variant != variant {
			continue
		}
		for _, s := range rows[i].metrics {
			if !slices.Contains(keys, s.key) {
				keys = append(keys, s.key)
			}
		}
	}
	return keys
}

func tableRow(r *row, keys []string) pageRow {
	row := pageRow{Stack: r.Stack, Belay: isBelay(r.Stack)}
	for _, key := range keys {
		s, ok := r.summary(key)
		if !ok {
			row.Cells = append(row.Cells, pageCell{})
			continue
		}
		c := pageCell{Median: short(s.median), Bar: standing(r, key)}
		if worst := short(s.worst); worst != c.Median {
			c.Worst = worst
		}
		row.Cells = append(row.Cells, c)
	}
	return row
}

// standing says whether a number has bars and keeps them.
func standing(r *row, key string) string {
	stands := ""
	for _, b := range bars {
		value, limit, ok := b.find(r)
		if !ok || b.key != key || r.Quick {
			continue
		}
		if b.atLeast && value < limit || !b.atLeast && value > limit {
			return "missed"
		}
		stands = "kept"
	}
	return stands
}

// short writes a number for people: four figures are enough to compare.
func short(v float64) string {
	s := number(v)
	if i := strings.IndexByte(s, '.'); i >= 0 && len(s) > i+1 {
		digits := max(5-i, 1)
		if v < 0.1 && v > -0.1 {
			digits = 5
		}
		s = strings.TrimRight(strings.TrimRight(s[:min(len(s), i+1+digits)], "0"), ".")
	}
	return s
}
