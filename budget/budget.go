package budget

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// errNotMade is reported by the Err of a Budget that New did not make.
var errNotMade = errors.New("budget: a Budget must be made with New")

// Values of Budget.clockMask. A deposit reads the clock when its number has none
// of the mask's bits.
const (
	clockAlways    = 0
	clockSometimes = 15             // one deposit in 16
	clockNever     = math.MaxUint64 // the number never is 0, so some bit is set
)

// A Budget is a bank of retries. Make it with [New]. One Budget may serve any
// number of channels, which then share what they earn and spend; by default each
// channel has its own. All methods may be called concurrently.
//
// The zero Budget refuses every withdrawal.
type Budget struct {
	// Config, read-only after New.
	err         error
	made        bool
	earn        int64         // units
	floor       int64         // units: the capacity never falls below it
	stepWidth   time.Duration // 0: the capacity is fixed
	maxCounted  uint64        // successes that fill the largest possible bank
	maxInFlight int           // 0: no bound
	born        time.Time     // monotonic zero of the window

	// Atomics: what a deposit touches. Each has a cache line of its own, for
	// deposits counts up all the time while clockMask is only read.
	_         [cacheLine]byte
	clockMask atomic.Uint64
	_         [cacheLine]byte
	deposits  atomic.Uint64
	_         [cacheLine]byte

	mu          sync.Mutex // guards all below
	window      window
	credited    uint64 // how many of deposits are in balance and window
	capacity    int64  // units, as of window.step
	balance     int64  // units, 0 ≤ balance ≤ capacity
	free        *slot  // settled, to be used again
	inFlight    int
	withdrawals uint64
	refunds     uint64
	refused     uint64
}

// cacheLine is two lines of most processors, which fetch them in pairs.
const cacheLine = 128

// New makes a bank. It never panics: when c breaks a rule, the bank refuses every
// withdrawal and [Budget.Err] says which rule.
func New(c Config) *Budget {
	b := &Budget{made: true, born: time.Now()}
	b.clockMask.Store(clockNever)
	if b.err = c.Validate(); b.err != nil {
		return b
	}
	c = c.withDefaults()
	b.earn = toUnits(c.Earn)
	b.floor = toUnits(c.Initial)
	b.capacity = b.floor
	b.maxCounted = uint64(maxUnits / b.earn) //nolint:gosec // Validate has found Earn positive
	b.maxInFlight = c.MaxInFlight
	if c.Cap > 0 {
		b.capacity = toUnits(c.Cap)
	} else {
		b.stepWidth = c.Window / windowSteps
		b.clockMask.Store(clockAlways)
	}
	if !c.StartEmpty {
		b.balance = b.floor
	}
	return b
}

// Err returns what [Config.Validate] found in the Config that the bank was made
// from, nil when the bank works.
func (b *Budget) Err() error {
	if !b.made {
		return errNotMade
	}
	return b.err
}

// Deposit pays in what one success earns. Call it when the first attempt of a
// call succeeded, and only then: the success of a retry refunds its permit, and a
// final error such as "not found" neither earns nor costs.
func (b *Budget) Deposit() {
	// The count alone is enough for the balance, whoever needs that credits it.
	// Only the capacity asks when a success was, and reading a clock costs more
	// than all the rest of a deposit: under heavy traffic one reading dates 16.
	if b.deposits.Add(1)&b.clockMask.Load() != 0 {
		return
	}
	b.mu.Lock()
	b.creditLocked()
	b.mu.Unlock()
}

// Withdraw takes one retry out. Ask before the backoff, not after it: whoever is
// asleep must already be counted, or all sleepers pass the check and come back
// together. It reports false, and takes nothing, when the balance is less than
// one retry or MaxInFlight permits are out: do not retry then, and do not wait.
//
// Every permit must be settled by [Permit.Refund] or [Permit.Spend].
func (b *Budget) Withdraw() (Permit, bool) {
	b.mu.Lock()
	b.creditForWithdrawLocked()
	if b.balance < unitsPerRetry || (b.maxInFlight > 0 && b.inFlight >= b.maxInFlight) {
		b.refused++
		b.mu.Unlock()
		return Permit{}, false
	}
	b.balance -= unitsPerRetry
	b.withdrawals++
	b.inFlight++
	p := b.openLocked()
	b.mu.Unlock()
	return p, true
}

// creditForWithdrawLocked leaves the clock alone when no time of day could take
// anything away: a balance within floor is within every capacity.
func (b *Budget) creditForWithdrawLocked() {
	n := b.deposits.Load() - b.credited
	if b.balance+b.earned(n) > b.floor {
		b.creditLocked()
		return
	}
	if n > 0 {
		b.creditNowLocked(n)
	}
}

// creditLocked moves the window to the present and enters the deposits that
// have not been entered yet.
func (b *Budget) creditLocked() {
	n := b.deposits.Load() - b.credited
	if b.stepWidth == 0 {
		b.creditNowLocked(n)
		return
	}
	// The clock is read under the lock so that the window only moves forward.
	step := stepOf(time.Since(b.born), b.stepWidth)
	if b.clockMask.Load() == clockSometimes && step > b.window.step+1 {
		// Heavy traffic has stopped for a while. The undated rest may be as old as
		// its end; dating it now would add to the capacity what is long past.
		b.creditNowLocked(n)
		n = 0
	}
	// Old successes go before the new ones come, as they would have, had somebody
	// looked in between.
	b.window.advance(step)
	b.creditNowLocked(n)
	b.setClockMaskLocked()
}

// creditNowLocked enters n deposits at the window's running step. Entering them
// together comes to the same as one by one, because each raises the capacity by
// no more than the balance.
func (b *Budget) creditNowLocked(n uint64) {
	b.credited += n
	if b.stepWidth != 0 {
		b.window.add(n)
		b.capacity = max(b.floor, b.earned(b.window.sum))
	}
	b.balance = min(b.balance+b.earned(n), b.capacity)
}

func (b *Budget) setClockMaskLocked() {
	mask := uint64(clockAlways)
	if b.window.busy() {
		mask = clockSometimes
	}
	if b.clockMask.Load() != mask { // a store would evict the line everywhere
		b.clockMask.Store(mask)
	}
}

// earned is what n successes pay, at most what the largest bank holds.
func (b *Budget) earned(n uint64) int64 {
	if n > b.maxCounted {
		return maxUnits
	}
	return int64(n) * b.earn //nolint:gosec // maxCounted keeps the product within maxUnits
}
