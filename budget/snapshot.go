package budget

// Snapshot is the state of a bank at one moment, as one JSON object. The counts
// are totals since the bank was made; all fields belong together, so that
//
//	Withdrawals = Refunds + Spent + InFlight
//	Balance + Spent + InFlight ≤ Initial + Earn × Deposits
type Snapshot struct {
	// Balance is how many retries could be withdrawn now, fractions included.
	Balance float64 `json:"balance"`
	// Cap is the most that Balance can be now, in retries. It follows the traffic
	// unless [Config.Cap] fixed it.
	Cap float64 `json:"cap"`
	// InFlight is the number of permits that are not settled.
	InFlight int `json:"inFlight"`
	// Deposits counts first-try successes.
	Deposits uint64 `json:"deposits"`
	// Withdrawals counts permits that were given.
	Withdrawals uint64 `json:"withdrawals"`
	// Refunds counts permits that came back: retries that succeeded or were never
	// sent.
	Refunds uint64 `json:"refunds"`
	// Spent counts permits that did not: retries that failed.
	Spent uint64 `json:"spent"`
	// Refused counts withdrawals that got no permit.
	Refused uint64 `json:"refused"`
}

// Snapshot returns the state of the bank now. It changes nothing that a caller
// could notice.
func (b *Budget) Snapshot() Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.creditLocked()
	return Snapshot{
		Balance:     toRetries(b.balance),
		Cap:         toRetries(b.capacity),
		InFlight:    b.inFlight,
		Deposits:    b.credited,
		Withdrawals: b.withdrawals,
		Refunds:     b.refunds,
		Spent:       b.withdrawals - b.refunds - uint64(b.inFlight), //nolint:gosec // inFlight counts up from 0
		Refused:     b.refused,
	}
}
