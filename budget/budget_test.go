package budget_test

import (
	"encoding/json"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/belayrpc/belay/budget"
)

// succeed pays in n first-try successes, spread evenly over the time d.
func succeed(bank *budget.Budget, n int, d time.Duration) {
	for range n {
		bank.Deposit()
		if gap := d / time.Duration(n); gap > 0 {
			time.Sleep(gap)
		}
	}
}

// outage makes n retries that all fail, and returns how many were allowed.
func outage(bank *budget.Budget, n int) (allowed int) {
	for range n {
		if p, ok := bank.Withdraw(); ok {
			allowed++
			p.Spend()
		}
	}
	return allowed
}

// blip reports whether one failure could be retried, with success.
func blip(bank *budget.Budget) bool {
	p, ok := bank.Withdraw()
	p.Refund()
	return ok
}

func wantSnapshot(t *testing.T, bank *budget.Budget, want budget.Snapshot) {
	t.Helper()
	if diff := cmp.Diff(want, bank.Snapshot()); diff != "" {
		t.Errorf("Snapshot() (-want +got):\n%s", diff)
	}
}

func wantAllowed(t *testing.T, what string, got, want int) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %d retries allowed, want %d", what, got, want)
	}
}

func TestBudget_startsWithInitial(t *testing.T) {
	wantAllowed(t, "defaults", outage(budget.New(budget.Config{}), 100), 3)
	wantAllowed(t, "Initial 10", outage(budget.New(budget.Config{Initial: 10}), 100), 10)
	wantAllowed(t, "Initial 0.9", outage(budget.New(budget.Config{Initial: 0.9}), 100), 0)
	wantAllowed(t, "StartEmpty", outage(budget.New(budget.Config{StartEmpty: true}), 100), 0)
}

func TestBudget_tenSuccessesBuyARetry(t *testing.T) {
	bank := budget.New(budget.Config{})
	outage(bank, 3)
	for i := 1; i <= 30; i++ {
		bank.Deposit()
		if got, want := outage(bank, 1) == 1, i%10 == 0; got != want {
			t.Fatalf("after %d successes: retry allowed = %v, want %v", i, got, want)
		}
	}
}

func TestBudget_hedgesWaitForEvidence(t *testing.T) {
	bank := budget.New(budget.Config{StartEmpty: true, Earn: 0.02})
	succeed(bank, 49, 0)
	wantAllowed(t, "after 49 successes", outage(bank, 10), 0)
	bank.Deposit()
	wantAllowed(t, "after 50 successes", outage(bank, 10), 1)
}

func TestBudget_retriesThatWorkAreFree(t *testing.T) {
	bank := budget.New(budget.Config{})
	for i := range 1000 {
		if !blip(bank) {
			t.Fatalf("blip %d was not retried", i)
		}
	}
	wantSnapshot(t, bank, budget.Snapshot{Balance: 3, Cap: 3, Withdrawals: 1000, Refunds: 1000})
}

func TestBudget_refundIsHeldToTheCapacity(t *testing.T) {
	bank := budget.New(budget.Config{Cap: 3})
	p, _ := bank.Withdraw()
	succeed(bank, 10, 0) // fills what the permit had left
	p.Refund()
	wantSnapshot(t, bank, budget.Snapshot{Balance: 3, Cap: 3, Deposits: 10, Withdrawals: 1, Refunds: 1})
}

func TestBudget_burst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bank := budget.New(budget.Config{})
		succeed(bank, 1000, time.Second)
		wantSnapshot(t, bank, budget.Snapshot{Balance: 100, Cap: 100, Deposits: 1000})
		wantAllowed(t, "burst", outage(bank, 1000), 100)
		wantAllowed(t, "second burst", outage(bank, 1000), 0)
	})
}

// The 3 of a fresh bank come once: with the capacity above them the start does
// not add to what was earned.
func TestBudget_capacityHoldsEarningsOnly(t *testing.T) {
	bank := budget.New(budget.Config{Window: time.Hour})
	succeed(bank, 50, 0)
	wantSnapshot(t, bank, budget.Snapshot{Balance: 5, Cap: 5, Deposits: 50})
}

func TestBudget_refillAfterOutage(t *testing.T) {
	for _, failures := range []int{1, 10, 1000, 100_000} {
		synctest.Test(t, func(t *testing.T) {
			bank := budget.New(budget.Config{})
			succeed(bank, 1000, time.Second)
			outage(bank, failures)
			time.Sleep(time.Minute)
			// However long it was: ten successes buy a retry, thirty fill an idle bank.
			outage(bank, failures)
			succeed(bank, 10, 10*time.Second)
			if !blip(bank) {
				t.Errorf("outage of %d: no retry after ten successes", failures)
			}
			succeed(bank, 30, 30*time.Second)
			wantAllowed(t, "full again", outage(bank, 100), 3)
		})
	}
}

func TestBudget_timeAloneChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bank := budget.New(budget.Config{})
		time.Sleep(24 * time.Hour)
		wantAllowed(t, "idle for a day", outage(bank, 100), 3)
		time.Sleep(24 * time.Hour)
		wantAllowed(t, "empty for a day", outage(bank, 100), 0)
	})
}

func TestBudget_capacityFollowsTraffic(t *testing.T) {
	for _, tt := range []struct {
		name  string
		every time.Duration
		want  float64
	}{
		{"0.1 per second", 10 * time.Second, 3},
		{"10 per second", 100 * time.Millisecond, 3},
		{"100 per second", 10 * time.Millisecond, 20},
		{"1000 per second", time.Millisecond, 200},
		{"10000 per second", 100 * time.Microsecond, 2000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bank := budget.New(budget.Config{})
				calls := max(10, int(5*time.Second/tt.every))
				succeed(bank, calls, time.Duration(calls)*tt.every)
				got := bank.Snapshot()
				// The window is dropped in steps of 1/64.
				if got.Cap > tt.want || got.Cap < max(3, tt.want*62/64) {
					t.Errorf("Cap = %v, want about %v", got.Cap, tt.want)
				}
				if got.Balance != got.Cap {
					t.Errorf("Balance = %v, want Cap %v: nothing failed", got.Balance, got.Cap)
				}
				wantAllowed(t, "outage", outage(bank, 10_000), int(got.Cap))
			})
		})
	}
}

func TestBudget_windowRolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bank := budget.New(budget.Config{Window: 640 * time.Millisecond}) // steps of 10 ms
		succeed(bank, 50, 0)
		time.Sleep(320 * time.Millisecond)
		succeed(bank, 40, 0)
		wantSnapshot(t, bank, budget.Snapshot{Balance: 9, Cap: 9, Deposits: 90})
		time.Sleep(310 * time.Millisecond)
		wantSnapshot(t, bank, budget.Snapshot{Balance: 9, Cap: 9, Deposits: 90})
		time.Sleep(10 * time.Millisecond) // the first fifty are as old as the window
		wantSnapshot(t, bank, budget.Snapshot{Balance: 4, Cap: 4, Deposits: 90})
		time.Sleep(320 * time.Millisecond) // and the rest
		wantSnapshot(t, bank, budget.Snapshot{Balance: 3, Cap: 3, Deposits: 90})
	})
}

// A peak long past must not finance an outage, whoever looks first afterwards.
func TestBudget_peakIsForgotten(t *testing.T) {
	for name, look := range map[string]func(*budget.Budget){
		"withdraw": func(*budget.Budget) {},
		"snapshot": func(bank *budget.Budget) { bank.Snapshot() },
		"refund": func(bank *budget.Budget) {
			p, _ := bank.Withdraw()
			p.Refund()
		},
		"deposit": func(bank *budget.Budget) { bank.Deposit() },
		// More than the sixteen that may share one look at the clock.
		"deposits": func(bank *budget.Budget) { succeed(bank, 17, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bank := budget.New(budget.Config{})
				succeed(bank, 20_007, 2*time.Second)
				time.Sleep(time.Hour)
				look(bank)
				wantAllowed(t, "after an hour", outage(bank, 10_000), 3)
			})
		})
	}
}

// Under heavy traffic one look at the clock dates sixteen successes. Those that
// it left undated must not look new after a silence.
func TestBudget_undatedSuccessesAreOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bank := budget.New(budget.Config{Earn: 1})
		succeed(bank, 20_015, 2*time.Second)
		time.Sleep(time.Hour)
		wantSnapshot(t, bank, budget.Snapshot{Balance: 3, Cap: 3, Deposits: 20_015})
	})
	synctest.Test(t, func(t *testing.T) {
		bank := budget.New(budget.Config{Earn: 1})
		succeed(bank, 20_000, 2*time.Second)
		outage(bank, 30_000)
		succeed(bank, 15, 0)
		time.Sleep(time.Hour)
		wantAllowed(t, "after an hour", outage(bank, 100), 3)
	})
}

func TestBudget_capacityGrowsAgainAfterSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bank := budget.New(budget.Config{})
		time.Sleep(time.Hour)
		succeed(bank, 100, time.Second)
		wantSnapshot(t, bank, budget.Snapshot{Balance: 10, Cap: 10, Deposits: 100})
	})
}

func TestBudget_fixedCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bank := budget.New(budget.Config{Cap: 10})
		succeed(bank, 10_000, time.Second)
		time.Sleep(time.Hour)
		wantAllowed(t, "full", outage(bank, 100), 10)
		wantSnapshot(t, bank, budget.Snapshot{Cap: 10, Deposits: 10_000, Withdrawals: 10, Spent: 10, Refused: 90})
	})
}

func TestBudget_maxInFlight(t *testing.T) {
	bank := budget.New(budget.Config{Initial: 100, MaxInFlight: 2})
	first, ok1 := bank.Withdraw()
	second, ok2 := bank.Withdraw()
	if !ok1 || !ok2 {
		t.Fatal("the first two were refused")
	}
	if _, ok := bank.Withdraw(); ok {
		t.Error("a third permit was given")
	}
	wantSnapshot(t, bank, budget.Snapshot{Balance: 98, Cap: 100, InFlight: 2, Withdrawals: 2, Refused: 1})
	first.Spend()
	if !blip(bank) {
		t.Error("refused after one was settled")
	}
	second.Refund()
	wantSnapshot(t, bank, budget.Snapshot{Balance: 99, Cap: 100, Withdrawals: 3, Refunds: 2, Spent: 1, Refused: 1})
}

func TestPermit_firstSettlementCounts(t *testing.T) {
	bank := budget.New(budget.Config{})
	p, _ := bank.Withdraw()
	q := p
	p.Spend()
	p.Spend()
	q.Refund()
	wantSnapshot(t, bank, budget.Snapshot{Balance: 2, Cap: 3, Withdrawals: 1, Spent: 1})

	p, _ = bank.Withdraw()
	q.Refund() // must not reach the permit that took its place
	wantSnapshot(t, bank, budget.Snapshot{Balance: 1, Cap: 3, InFlight: 1, Withdrawals: 2, Spent: 1})
	p.Refund()
	p.Spend()
	wantSnapshot(t, bank, budget.Snapshot{Balance: 2, Cap: 3, Withdrawals: 2, Refunds: 1, Spent: 1})
}

func TestPermit_zeroDoesNothing(t *testing.T) {
	bank := budget.New(budget.Config{StartEmpty: true})
	p, ok := bank.Withdraw()
	if ok || p != (budget.Permit{}) {
		t.Errorf("Withdraw() = %v, %v from an empty bank, want the zero Permit, false", p, ok)
	}
	p.Refund()
	p.Spend()
	wantSnapshot(t, bank, budget.Snapshot{Cap: 3, Refused: 1})
}

func TestPermit_settledByManyGoroutines(t *testing.T) {
	bank := budget.New(budget.Config{Initial: 100})
	var wg sync.WaitGroup
	for range 100 {
		p, ok := bank.Withdraw()
		if !ok {
			t.Fatal("refused below Initial")
		}
		for range 4 {
			wg.Go(p.Refund)
		}
	}
	wg.Wait()
	wantSnapshot(t, bank, budget.Snapshot{Balance: 100, Cap: 100, Withdrawals: 100, Refunds: 100})
}

func TestBudget_depositsFromManyGoroutinesAllCount(t *testing.T) {
	bank := budget.New(budget.Config{StartEmpty: true, Window: time.Hour})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { succeed(bank, 10_000, 0) })
	}
	wg.Wait()
	wantSnapshot(t, bank, budget.Snapshot{Balance: 8000, Cap: 8000, Deposits: 80_000})
}

func TestBudget_sharedByChannels(t *testing.T) {
	shared := budget.New(budget.Config{})
	channelA, channelB := shared, shared
	succeed(channelA, 100, 0)
	wantAllowed(t, "what A earned, B can spend", outage(channelB, 100), 10)
	wantAllowed(t, "and A cannot spend it again", outage(channelA, 100), 0)
}

func TestSnapshot_json(t *testing.T) {
	bank := budget.New(budget.Config{Initial: 1.5})
	bank.Withdraw()
	bank.Withdraw()
	got, err := json.Marshal(bank.Snapshot())
	if err != nil {
		t.Fatal(err)
	}
	want := `{"balance":0.5,"cap":1.5,"inFlight":1,"deposits":0,"withdrawals":1,"refunds":0,"spent":0,"refused":1}`
	if string(got) != want {
		t.Errorf("JSON = %s, want %s", got, want)
	}
}
