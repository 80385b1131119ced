package interceptors

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// ledger remembers, for one call that a server handles, how the calls that the
// handler makes under its context ended. The guard reads it when the handler
// fails: a failure behind which retries were already spent is marked, so that
// no layer above starts its own, and one that the caller's deadline made, so that
// no breaker above counts it. This finds what the error's own chain does not
// show, such as status.Errorf("…: %v", err).
type ledger struct {
	deadline time.Time    // the handler's, if its caller has set it; else zero. Set before it runs
	open     atomic.Int32 // number of entries: what the path of successes reads

	mu      sync.Mutex             // guards entries
	entries map[string]ledgerEntry // downstream full method → how its last call ended
}

type ledgerEntry struct {
	stop      StopReason
	outOfTime bool // the deadline that it was made under is why
}

// maxLedgerEntries bounds a ledger; one entry marks the failure as well as many.
const maxLedgerEntries = 64

// origin is what a call finds in its context of the Belay code above it. One
// value, so that a call looks once.
type origin struct {
	// ledger is that of the server call under whose context this one is made;
	// nil outside of one.
	ledger *ledger

	// inbound is the server call itself, for dedupe, which meets the guard in it.
	inbound *inbound

	// attempt tells that the context is an attempt's. An inner interceptor that
	// makes a call of its own under it (to fetch a token, say) makes another
	// call: the metadata that was written for this one is not that one's.
	attempt bool
}

type originKey struct{}

func withOrigin(ctx context.Context, o *origin) context.Context {
	return context.WithValue(ctx, originKey{}, o)
}

var noOrigin origin

func originOf(ctx context.Context) *origin {
	if o, ok := ctx.Value(originKey{}).(*origin); ok {
		return o
	}
	return &noOrigin
}

// record notes how a call ended. A success clears what an earlier call of the
// same method left: the handler got its answer after all.
func (l *ledger) record(method string, stop StopReason, outOfTime bool) {
	remembered := stop.Spent() || outOfTime
	if l == nil || !remembered && l.open.Load() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case stop == NotStopped:
		delete(l.entries, method)
	case remembered && len(l.entries) < maxLedgerEntries:
		if l.entries == nil {
			l.entries = make(map[string]ledgerEntry)
		}
		if !stop.Spent() {
			stop = l.entries[method].stop // retries that were spent stay spent until a success
		}
		l.entries[method] = ledgerEntry{stop, outOfTime}
	}
	l.open.Store(int32(len(l.entries))) //nolint:gosec // at most maxLedgerEntries
}

// spent returns a downstream method behind which retries were spent.
func (l *ledger) spent() (method string, stop StopReason, ok bool) {
	if l == nil || l.open.Load() == 0 {
		return "", NotStopped, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for m, e := range l.entries {
		if e.stop.Spent() && (!ok || m < method) { // the first by name, so that the same failure reads the same
			method, stop, ok = m, e.stop, true
		}
	}
	return method, stop, ok
}

// inherited reports whether a call's deadline is the one that the handler was
// given. One that the handler has made shorter is its own doing.
func (l *ledger) inherited(ctx context.Context) bool {
	if l == nil || l.deadline.IsZero() {
		return false
	}
	deadline, ok := ctx.Deadline()
	return ok && !deadline.Before(l.deadline)
}

// outOfTime reports whether a call downstream ended with its caller's time.
func (l *ledger) outOfTime() bool {
	if l.open.Load() == 0 {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e.outOfTime {
			return true
		}
	}
	return false
}
