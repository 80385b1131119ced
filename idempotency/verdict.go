package idempotency

import "errors"

// Verdict is what a handler says about its own effect, beside its error.
type Verdict uint8

// The verdicts. A code alone cannot tell them apart: UNAVAILABLE after the card
// was charged and UNAVAILABLE before it look the same.
const (
	// VerdictNone: nothing was said; the code and the store decide.
	VerdictNone Verdict = iota
	// VerdictFinal: the error is the answer to this key, now and later.
	VerdictFinal
	// VerdictNoEffect: nothing happened; the key may run again.
	VerdictNoEffect
	// VerdictUnknown: something may have happened outside the store's reach.
	VerdictUnknown
)

// Final marks err as the answer to this key for good: it is recorded and
// replayed, whatever its code, and a store that is a transaction undoes the
// handler's writes. Use it for a decline that will not change. Nil stays nil.
//
// The three marks are transparent to errors.Is and errors.As and leave the
// text as it is. A server without Belay's dedupe answers the same code, but
// grpc puts its "rpc error" prefix into the message, as for any wrapped status.
func Final(err error) error { return withVerdict(err, VerdictFinal) }

// NoEffect marks err as one after which provably nothing has happened: the key
// is free, and the next call with it runs. Nil stays nil.
func NoEffect(err error) error { return withVerdict(err, VerdictNoEffect) }

// UnknownEffect marks err as one that leaves open whether something happened
// where no transaction reaches, such as a call to a partner that timed out. The
// record becomes UNKNOWN and nothing runs again until Store.Resolve. Nil stays
// nil.
func UnknownEffect(err error) error { return withVerdict(err, VerdictUnknown) }

// VerdictOf returns the outermost verdict in err's chain.
func VerdictOf(err error) Verdict {
	if v, ok := errors.AsType[*verdictError](err); ok {
		return v.verdict
	}
	return VerdictNone
}

// Unmark returns err without the marks at its outside, for the edge that turns
// an error into a status. A mark deeper in the chain stays.
func Unmark(err error) error {
	for {
		v, ok := err.(*verdictError) //nolint:errorlint // only the outermost layers are taken off
		if !ok {
			return err
		}
		err = v.err
	}
}

type verdictError struct {
	err     error
	verdict Verdict
}

func (e *verdictError) Error() string { return e.err.Error() }
func (e *verdictError) Unwrap() error { return e.err }

func withVerdict(err error, v Verdict) error {
	if err == nil {
		return nil
	}
	return &verdictError{err: err, verdict: v}
}
