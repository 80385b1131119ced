package budget_test

import (
	"testing"

	"github.com/belayrpc/belay/budget"
)

func TestAllocations(t *testing.T) {
	bank := budget.New(budget.Config{Initial: 100})
	empty := budget.New(budget.Config{StartEmpty: true})
	for name, op := range map[string]func(){
		"deposit": bank.Deposit,
		"withdraw and refund": func() {
			p, _ := bank.Withdraw()
			p.Refund()
		},
		"three out at once": func() {
			var ps [3]budget.Permit
			for i := range ps {
				ps[i], _ = bank.Withdraw()
			}
			for _, p := range ps {
				p.Refund()
			}
		},
		"refused":  func() { empty.Withdraw() },
		"snapshot": func() { bank.Snapshot() },
	} {
		got := testing.AllocsPerRun(1000, op)
		if !raceEnabled && got != 0 {
			t.Errorf("%s: %v allocations, want 0", name, got)
		}
	}
}
