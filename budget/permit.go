package budget

// A Permit is the right to one retry, from [Budget.Withdraw]. Settle it exactly
// once: of all calls of Refund and Spend, on all copies and from all goroutines,
// the first counts and the others change nothing, not even a later permit. A
// permit that is never settled counts as in flight for ever. The zero Permit is
// valid and does nothing.
type Permit struct {
	slot *slot
	turn uint64
}

// slot is the place that all copies of a Permit share, so that they can agree on
// who was first. It is used again afterwards: turn tells its permits apart.
type slot struct {
	bank *Budget // read-only

	// Guarded by bank.mu.
	turn uint64
	next *slot // in bank.free
}

// Refund gives the retry back: it succeeded, or was never sent. What does not fit
// into the capacity any more is dropped.
func (p Permit) Refund() { p.settle(true) }

// Spend keeps the retry: it failed.
func (p Permit) Spend() { p.settle(false) }

func (p Permit) settle(refund bool) {
	if p.slot == nil {
		return
	}
	b := p.slot.bank
	b.mu.Lock()
	if b.closeLocked(p) {
		b.inFlight--
		if refund {
			b.refunds++
			// Capacity may be out of date, too large only until the next credit
			// lowers it and the balance with it.
			b.balance = min(b.balance+unitsPerRetry, b.capacity)
		}
	}
	b.mu.Unlock()
}

// openLocked returns a permit on a settled slot, a new one if there is none. So
// there are never more slots than permits were out at once.
func (b *Budget) openLocked() Permit {
	s := b.free
	if s == nil {
		s = &slot{bank: b}
	} else {
		b.free, s.next = s.next, nil
	}
	return Permit{slot: s, turn: s.turn}
}

// closeLocked reports whether p had not been settled before.
func (b *Budget) closeLocked(p Permit) bool {
	s := p.slot
	if s.turn != p.turn {
		return false
	}
	s.turn++
	b.free, s.next = s, b.free
	return true
}
