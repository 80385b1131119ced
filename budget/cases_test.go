package budget_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/budget"
)

// A budget that never comes back, leaks to neighbours, or is spent by the wrong
// failures: the arithmetic of the case, without calls.
func TestB13_comesBackAndKeepsToItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := budget.Config{}
		a, b := budget.New(config), budget.New(config)

		outage(a, 1000)
		if blip(a) {
			t.Error("(1) channel A still retries in a total outage")
		}
		if !blip(b) {
			t.Error("(2) the outage of A starved channel B")
		}
		succeed(a, 200, 20*time.Second)
		if !blip(a) {
			t.Error("(3) 200 clean calls did not bring the budget of A back")
		}
		// (4) 1000 NotFound answers neither deposit nor withdraw: nothing to call.
		if fresh := budget.New(config); !blip(fresh) {
			t.Error("(4) a fresh channel does not retry")
		}
	})
}

// Retries waiting in backoff count: fifty calls fail at once, the bank has five.
func TestB37_sleepersAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls, permitted, backoff = 50, 5, 300 * time.Millisecond
		bank := budget.New(budget.Config{Initial: permitted})
		var hits, retried, refused atomic.Int64
		var wg sync.WaitGroup
		for range calls {
			wg.Go(func() {
				start := time.Now()
				hits.Add(1)
				p, ok := bank.Withdraw()
				if !ok {
					refused.Add(1)
					if took := time.Since(start); took != 0 {
						t.Errorf("a refused call took %v, want no wait", took)
					}
					return
				}
				time.Sleep(backoff)
				hits.Add(1)
				retried.Add(1)
				p.Spend()
			})
		}
		synctest.Wait()
		wantSnapshot(t, bank, budget.Snapshot{
			Cap: permitted, InFlight: permitted, Withdrawals: permitted, Refused: calls - permitted,
		})
		wg.Wait()
		if hits.Load() != calls+permitted || retried.Load() != permitted || refused.Load() != calls-permitted {
			t.Errorf("hits %d, retried %d, refused %d; want %d, %d, %d",
				hits.Load(), retried.Load(), refused.Load(), calls+permitted, permitted, calls-permitted)
		}
		wantSnapshot(t, bank, budget.Snapshot{
			Cap: permitted, Withdrawals: permitted, Spent: permitted, Refused: calls - permitted,
		})
	})
}
