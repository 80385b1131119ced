package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// What is between these lines of a file belongs to this program.
const (
	markBegin = "<!-- bench:begin -->"
	markEnd   = "<!-- bench:end -->"
)

// writeMarkdown writes the table where the flag says.
func writeMarkdown(path string, stdout io.Writer, machine string, results []result) error {
	switch path {
	case "":
		return nil
	case "-":
		_, err := io.WriteString(stdout, markdown(machine, results))
		return err
	}
	old, err := os.ReadFile(path) //nolint:gosec // the person who runs the program names it
	if err != nil {
		return err
	}
	updated, err := replaceBetweenMarks(string(old), markdown(machine, results))
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.WriteFile(path, []byte(updated), 0o644) //nolint:gosec // a document, as readable as it was
}

func replaceBetweenMarks(old, table string) (string, error) {
	before, rest, ok := strings.Cut(old, markBegin+"\n")
	if !ok {
		return "", errors.New("has no line " + markBegin)
	}
	_, after, ok := strings.Cut(rest, markEnd)
	if !ok {
		return "", errors.New("has no line " + markEnd + " after " + markBegin)
	}
	return before + markBegin + "\n" + table + markEnd + after, nil
}

// markdown puts the modes of a stack into one row.
func markdown(machine string, results []result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s. Median time of one operation; \"at 64\" is with 64 goroutines, all together.\n", machine)
	b.WriteString("The ratio is to the baseline of the same round, one goroutine; *again* is the baseline a second time,\n")
	b.WriteString("so its distance from 1 is what a ratio cannot tell from noise.\n\n")
	b.WriteString("| what | case | stack | ns | ns at 64 | allocs | ratio |\n")
	b.WriteString("|---|---|---|--:|--:|--:|--:|\n")
	for _, r := range results {
		if r.mode != modes[0].name {
			continue
		}
		parallel := "-"
		for _, p := range results {
			if p.what == r.what && p.name == r.name && p.stack == r.stack && p.mode == modes[1].name {
				parallel = figure(p.ns)
			}
		}
		stack, ratio := r.stack, fmt.Sprintf("%.2f", r.ratio)
		switch {
		case strings.HasPrefix(stack, belay):
			stack = "**" + stack + "**"
		case stack == r.base:
			ratio = "1"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %.0f | %s |\n", r.what, r.name, stack, figure(r.ns), parallel, r.allocs, ratio)
	}
	return b.String()
}

// figure prints three digits that mean something.
func figure(ns float64) string {
	switch {
	case ns < 10:
		return fmt.Sprintf("%.1f", ns)
	case ns < 1000:
		return fmt.Sprintf("%.0f", ns)
	}
	return fmt.Sprintf("%.0f", ns/10) + "0"
}
