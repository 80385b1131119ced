package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/belayrpc/belay/examples/chaos/order"
)

// result is what came of a cell.
type result struct {
	cell

	keys, kills, takeovers        int
	duplicates, wrong, unresolved int
	torn, stales, drops           int
	byPoint                       map[order.Point]int
	took                          time.Duration
	notes                         []string // the first few things that were wrong
}

// String is the line for scripts.
func (r *result) String() string {
	return fmt.Sprintf("RESULT chaos %s keys=%d kills=%d takeovers=%d duplicates=%d wrong_replies=%d unresolved=%d torn=%d stales=%d dropped_replies=%d seconds=%.0f",
		r.cell, r.keys, r.kills, r.takeovers, r.duplicates, r.wrong, r.unresolved, r.torn, r.stales, r.drops, r.took.Seconds())
}

// points is the line that says where the servers were killed.
func (r *result) points() string {
	var b strings.Builder
	fmt.Fprintf(&b, "RESULT chaos-kills %s", r.cell)
	for _, p := range order.Points {
		fmt.Fprintf(&b, " %s=%d", p, r.byPoint[p])
	}
	return b.String()
}

// missed names the bars that the result does not reach.
func (r *result) missed(quick bool) []string {
	var missed []string
	bar := func(holds bool, what string, value int, rule string) {
		if !holds {
			missed = append(missed, fmt.Sprintf("%s: %s is %d, must be %s", r.cell, what, value, rule))
		}
	}
	if r.mutant.name != noMutant {
		least := minDuplicates
		if quick {
			least = 1
		}
		bar(r.duplicates >= least, "duplicates", r.duplicates, fmt.Sprintf("at least %d, or this harness sees nothing", least))
		return missed
	}
	bar(r.duplicates == 0, "duplicates", r.duplicates, "0")
	bar(r.wrong == 0, "wrong_replies", r.wrong, "0")
	bar(r.unresolved == 0, "unresolved", r.unresolved, "0")
	bar(r.torn == 0, "torn", r.torn, "0")
	g := r.goals(quick)
	bar(r.kills >= g.kills, "kills", r.kills, fmt.Sprintf("at least %d", g.kills))
	bar(r.stales >= g.stales, "stales", r.stales, fmt.Sprintf("at least %d", g.stales))
	if g.killsPerPoint > 0 {
		rarest := slices.MinFunc(order.Points, func(a, b order.Point) int { return r.byPoint[a] - r.byPoint[b] })
		bar(r.byPoint[rarest] >= g.killsPerPoint, "kills at "+string(rarest), r.byPoint[rarest], fmt.Sprintf("at least %d", g.killsPerPoint))
	}
	return missed
}

// maxNotes is how many wrong things are told one by one.
const maxNotes = 8

func (r *result) notef(format string, args ...any) {
	if len(r.notes) < maxNotes {
		r.notes = append(r.notes, fmt.Sprintf(format, args...))
	}
}
