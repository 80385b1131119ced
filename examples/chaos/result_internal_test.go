//go:build unix

package main

import (
	"strings"
	"testing"

	"github.com/belayrpc/belay/examples/chaos/order"
)

func good(c cell) result {
	r := result{cell: c, kills: 600, stales: 300, byPoint: make(map[order.Point]int)}
	for _, p := range order.Points {
		r.byPoint[p] = minKillsPerPoint
	}
	return r
}

func TestMissed_NamesTheBar(t *testing.T) {
	shipped := cell{postgresql, lease, kills, unchanged}
	mutated := cell{postgresql, lease, kills, mutants[lease]}
	for want, r := range map[string]func() result{
		"":                               func() result { return good(shipped) },
		"duplicates is 1, must be 0":     func() result { r := good(shipped); r.duplicates = 1; return r },
		"wrong_replies is 2, must be 0":  func() result { r := good(shipped); r.wrong = 2; return r },
		"unresolved is 3, must be 0":     func() result { r := good(shipped); r.unresolved = 3; return r },
		"torn is 1, must be 0":           func() result { r := good(shipped); r.torn = 1; return r },
		"kills is 5, must be at least 5": func() result { r := good(shipped); r.kills = 5; return r },
		"stales is 7, must be at least":  func() result { r := good(shipped); r.stales = 7; return r },
		"kills at mid-effect is 24":      func() result { r := good(shipped); r.byPoint[order.MidEffect] = 24; return r },
		"duplicates is 19, must be at least 20, or this harness sees nothing": func() result {
			r := good(mutated)
			r.duplicates = minDuplicates - 1
			return r
		},
	} {
		res := r()
		missed := res.missed(false)
		switch {
		case want == "" && len(missed) > 0:
			t.Errorf("a good result misses %q", missed)
		case want != "" && (len(missed) != 1 || !strings.Contains(missed[0], want) || !strings.Contains(missed[0], "store=postgresql mode=lease")):
			t.Errorf("missed %q, want one, …%s…", missed, want)
		}
	}
}

func TestOrders_ReachEveryPoint(t *testing.T) {
	c := cell{sqlite, same, kills, unchanged}
	o := newOrders(c, c.goals(false))
	taken := 0
	for open := true; open; taken++ {
		ord := o.take()
		if ord == nil {
			t.Fatalf("no order, and the goals are not reached: %v", o.killed)
		}
		if ord.Point != order.AfterFinish || taken%2 == 0 { // a point that half of the calls do not pass
			o.done(ord.Deed, ord.Point)
		}
		o.over(ord)
		select {
		case <-o.enough:
			open = false
		default:
		}
	}
	total, byPoint, stales := o.counts()
	g := o.goals
	if total < g.kills || stales < g.stales {
		t.Errorf("%d kills and %d stales, want %d and %d", total, stales, g.kills, g.stales)
	}
	for _, p := range order.Points {
		if byPoint[p] < g.killsPerPoint {
			t.Errorf("%d kills at %s, want %d", byPoint[p], p, g.killsPerPoint)
		}
	}
	if total > g.kills+len(order.Points) {
		t.Errorf("%d kills, want not many more than %d", total, g.kills)
	}
}

func TestOverlay_RefusesAnOutdatedMutant(t *testing.T) {
	b := binaries{dir: t.TempDir(), built: make(map[string]string)}
	_, err := b.of(t.Context(), mutant{name: "outdated", file: "idempotency/sqlstore/finish.go", old: "no such line", new: ""})
	if err == nil || !strings.Contains(err.Error(), "0 places to change: must have 1") {
		t.Errorf("of = %v, want …0 places to change: must have 1…", err)
	}
}
