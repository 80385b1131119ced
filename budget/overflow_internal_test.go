package budget

import "testing"

// Inside the package, for no test has the years that it takes to make so many
// calls.
func TestEarned_saturates(t *testing.T) {
	const want = maxRetries // even 1.8e19 successes at a billionth each earn more
	for _, config := range []Config{{Earn: 1}, {Earn: 1, Cap: maxRetries}, {Earn: minEarn}} {
		b := New(config)
		b.deposits.Store(1<<64 - 1)
		if got := b.Snapshot(); got.Balance != want || got.Cap != want {
			t.Errorf("%+v: Balance %v, Cap %v; want %v", config, got.Balance, got.Cap, want)
		}
		p, ok := b.Withdraw()
		p.Refund()
		if got := b.Snapshot().Balance; !ok || got != want {
			t.Errorf("%+v: Withdraw() = %v, Balance %v after the refund; want true, %v", config, ok, got, want)
		}
	}
}
