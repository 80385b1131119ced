package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"time"
)

// writeTable writes what people read.
func writeTable(out *bytes.Buffer, results []result) {
	fmt.Fprintf(out, "%-18s%8s%11s%8s%7s%6s%9s%9s   %s\n",
		"", "success", "leaf/call", "steady", "twice", "late", "p50 ms", "p99 ms", "undeclared write")
	story := ""
	for _, r := range results {
		if story != r.scenario {
			story = r.scenario
			fmt.Fprintf(out, "\n%s: %s\n", r.scenario, storyOf(r.scenario))
		}
		fmt.Fprintf(out, "  %-16s%8.4f%11.2f%8.2f%7d%6d%9.1f%9.1f   %.3f, %d twice\n",
			r.stack, r.success, r.leafPerCall, r.leafPerCallSteady, r.duplicates-r.remarkDuplicates, r.late,
			millis(r.p50), millis(r.p99), r.remarkSuccess, r.remarkDuplicates)
	}
	fmt.Fprintf(out, `
success    share of users' checkouts that worked, each within its deadline of %v
leaf/call  calls that reached the ledger, per checkout; steady: without the first second after the onset
twice      charges done once more for the same intent
late       ledger calls begun after the user's deadline
undeclared write: success of the ledger's Append, of which the .proto does not say that it may be repeated
`, patience)
}

// writeSeconds shows how the load on the leaf goes on after the onset, for the
// scenarios in which it is not the same throughout.
func writeSeconds(out *bytes.Buffer, results []result) {
	outages := []string{"ledger-down", "ledger-killed", "restart"}
	story := ""
	for _, r := range results {
		if !slices.Contains(outages, r.scenario) {
			continue
		}
		if story == "" {
			fmt.Fprintf(out, "\nLedger calls per checkout, second by second after the onset (%s)\n", sparkLegend())
		}
		if story != r.scenario {
			story = r.scenario
			fmt.Fprintf(out, "\n%s\n", r.scenario)
		}
		fmt.Fprintf(out, "  %-16s%s\n", r.stack, sparkline(r.bySecond))
	}
}

// writeLines writes what scripts read.
func writeLines(out *bytes.Buffer, results []result) {
	for _, r := range results {
		fmt.Fprintf(out, "RESULT demo scenario=%s stack=%s success=%.5f leaf_per_call=%.4f leaf_per_call_steady=%.4f duplicates=%d late=%d p50_ms=%.2f p99_ms=%.2f calls=%d\n",
			r.scenario, r.stack, r.success, r.leafPerCall, r.leafPerCallSteady, r.duplicates, r.late, millis(r.p50), millis(r.p99), r.calls)
	}
	for _, r := range results {
		fmt.Fprintf(out, "RESULT demo-undeclared scenario=%s stack=%s success=%.5f duplicates=%d calls=%d\n",
			r.scenario, r.stack, r.remarkSuccess, r.remarkDuplicates, r.remarks)
	}
}

func storyOf(name string) string {
	for _, s := range scenarios {
		if s.name == name {
			return s.story
		}
	}
	return ""
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// sparks are the steps of a sparkline, each up to a number of calls. They are
// wide at the top, because 27 is as real as 0.
var sparks = []struct {
	upTo float64
	sign string
}{
	{0.1, "·"},
	{0.7, "▁"},
	{1.2, "▂"},
	{2, "▃"},
	{4, "▄"},
	{9, "▅"},
	{18, "▆"},
}

const sparkMore = "█"

func sparkline(values []float64) string {
	var b strings.Builder
	for _, v := range values {
		sign := sparkMore
		for _, s := range sparks {
			if v <= s.upTo {
				sign = s.sign
				break
			}
		}
		b.WriteString(sign)
	}
	return b.String()
}

func sparkLegend() string {
	var b strings.Builder
	for _, s := range sparks {
		fmt.Fprintf(&b, "%s ≤ %g  ", s.sign, s.upTo)
	}
	return b.String() + sparkMore + " more"
}
