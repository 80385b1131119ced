package interceptors

import (
	"sync"
	"sync/atomic"
	"time"
)

// serverBank is a service's own retry bank, which it speaks through pushback.
//
// A client's bank bounds that client. A thousand clients that are each allowed
// a few retries are not bounded by that, so the server counts too: the first
// try that succeeds earns, a retry that fails costs one, and while the balance
// is under one, every transient failure leaves with "do not retry". Failures
// that arrive as replies are then bounded for any number of clients in any
// language that follows gRFC A6.
type serverBank struct {
	clock clock

	mu      sync.Mutex // guards all below
	balance float64    // in retries; below zero while retries already under way fail
	buckets [bankSteps]float64
	step    int64 // the number of the current bucket
}

const (
	bankEarn    = 0.06
	bankInitial = 3
	bankWindow  = 2 * time.Second
	bankSteps   = 8
)

func newServerBank() *serverBank { return &serverBank{clock: newClock(), balance: bankInitial} }

// succeeded books a success; only a first try earns.
func (b *serverBank) succeeded(retry bool) {
	if retry {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rollLocked(time.Now())
	b.buckets[b.step%bankSteps]++ // before the limit is asked for, which this success raises
	b.balance = min(b.balance+bankEarn, b.limitLocked())
}

// failed books a transient failure and reports whether it must leave with
// "do not retry".
func (b *serverBank) failed(retry bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rollLocked(time.Now())
	if retry {
		// A floor, so that callers who ignore pushback cannot put a service in
		// debt for ever.
		b.balance = max(b.balance-1, -b.limitLocked())
	}
	return b.balance < 1
}

// rollLocked forgets buckets that have left the window, and lowers the balance
// to what the window's traffic may hold.
func (b *serverBank) rollLocked(now time.Time) {
	step := b.clock.at(now) / int64(bankWindow/bankSteps)
	for gone := b.step + 1; gone <= step && gone <= b.step+bankSteps; gone++ {
		b.buckets[gone%bankSteps] = 0
	}
	b.step = max(b.step, step)
	b.balance = min(b.balance, b.limitLocked())
}

// limitLocked is the most that the bank may hold now.
func (b *serverBank) limitLocked() float64 {
	var successes float64
	for _, n := range b.buckets {
		successes += n
	}
	return max(bankEarn*successes, bankInitial)
}

// maxBanks bounds the table of banks: a server registers its services once, but
// an unknown-service handler sees whatever name a caller makes up.
const maxBanks = 1024

// allOthers is the bank that services beyond maxBanks share.
const allOthers = "*"

// serverBanks is one bank per service.
type serverBanks struct {
	byService sync.Map // service → *serverBank
	count     atomic.Int32
}

func (b *serverBanks) get(service string) *serverBank {
	if bank, ok := b.byService.Load(service); ok {
		return bank.(*serverBank) //nolint:forcetypeassert // the map holds nothing else
	}
	if b.count.Load() >= maxBanks {
		service = allOthers
	}
	bank, loaded := b.byService.LoadOrStore(service, newServerBank())
	if !loaded {
		b.count.Add(1)
	}
	return bank.(*serverBank) //nolint:forcetypeassert // as above
}
