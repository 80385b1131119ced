package policy

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
)

// Unlimited, as the value of a duration of a [Policy], clears a bound that a
// less specific source sets: no timeout. It reads "unlimited" in JSON.
const Unlimited time.Duration = math.MaxInt64

// Defaults of [Policy]. They hold where no source sets the field.
const (
	// DefaultMaxAttempts counts the first attempt. With a retry bank the bound
	// on load is the bank, not this number.
	DefaultMaxAttempts = 4

	// DefaultMinAttempt is the least time worth starting an attempt with.
	DefaultMinAttempt = 2 * time.Millisecond

	// DefaultConnectGrace is how long a channel that lost its connection is
	// waited for.
	DefaultConnectGrace = time.Second

	// DefaultReplayBytes is what one stream keeps to send again.
	DefaultReplayBytes = 64 << 10
)

var defaultBackoff = Backoff{
	Base: 50 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: JitterFull, Spread: 0.2,
}

// Default returns the policy of a method for which nothing is configured: four
// attempts, no timeout of its own, full jitter from 50 ms to 1 s, UNAVAILABLE.
func Default() Policy {
	return Policy{
		Timeout:        Unlimited,
		AttemptTimeout: Unlimited,
		MinAttempt:     DefaultMinAttempt,
		MaxAttempts:    DefaultMaxAttempts,
		Backoff:        defaultBackoff,
		ConnectGrace:   DefaultConnectGrace,
		ReplayBytes:    DefaultReplayBytes,
		MaxIdle:        Unlimited,
		Hedge:          Hedge{Max: 1},
		Learn: Learn{
			AttemptFactor: DefaultAttemptFactor, AttemptFloor: DefaultAttemptFloor, MinSamples: DefaultMinSamples,
		},
	}
}

// Policy is how one method, or many, may be tried again. It is tuning: what a
// method promises about repetition is declared in its .proto ([Declared]).
//
// The zero value of a field inherits it from the next less specific source,
// and the zero Policy changes nothing. A negative value is an error. A Policy
// is a value: nothing in this module writes to one that it was given, and
// slices in it are copied before they are kept.
//
// JSON round-trips: durations read "50ms" or "unlimited", codes are
// "UNAVAILABLE", and an absent field inherits.
type Policy struct {
	// Timeout bounds the whole call, all attempts and waits together, where
	// the caller's own deadline is later or missing. Default: none.
	Timeout time.Duration

	// AttemptTimeout bounds one attempt. It reaches the server as that
	// attempt's deadline, never later than what the call has left; of a stream
	// it bounds the wait for the first response, here only, since a deadline
	// would cut a healthy stream off. An attempt that it ends may be repeated. Default: none; a guess cuts off calls that
	// would have succeeded.
	AttemptTimeout time.Duration

	// MinAttempt is the least time left for which an attempt is begun, the
	// first included. Default 2 ms.
	MinAttempt time.Duration

	// MaxAttempts counts all attempts, the first included; 1 means no retry.
	// Default 4.
	MaxAttempts int

	// Backoff is the wait before a retry.
	Backoff Backoff

	// Codes are the transient ones. nil inherits; empty and not nil means that
	// no code is retried. RESOURCE_EXHAUSTED also needs a hint of the server's
	// (pushback or RetryInfo), listed or not: a message above a size limit has
	// the same code and will never succeed. Default: UNAVAILABLE, and
	// RESOURCE_EXHAUSTED and ABORTED with such a hint.
	Codes []codes.Code

	// Idempotency overrides what the .proto declares. Saying Keyed or
	// Idempotent of a method whose server does not keep that promise repeats
	// its effects.
	Idempotency Idempotency

	// ConnectGrace is how long attempts that were never sent may wait for the
	// channel to connect, counted per channel from its first such failure since
	// it last worked. After it they fail at once. A channel that no call has tried
	// for a minute counts as one of which nothing is known. Default 1 s.
	ConnectGrace time.Duration

	// ReplayBytes is how much of what a client sends on a stream is kept so that
	// it can be sent again. A stream that sends more goes on, without retries.
	// Default 64 KiB, which is also gRPC's first flow-control window.
	ReplayBytes int

	// MaxIdle ends a stream on which no message came or went for so long, which
	// includes the time that the application spends between two messages; other
	// than AttemptTimeout, which only bounds the wait for the first response.
	// A connection that is dead is keepalive's business, which is gRPC's.
	// Default: none.
	MaxIdle time.Duration

	// Hedge sends a second attempt beside a slow one. Default: none.
	Hedge Hedge

	// Learn derives limits from observed latencies. Default: none.
	Learn Learn
}

// Validate returns an error that names each field with a bad value, the value
// and the rule; nil when there is none.
func (p Policy) Validate() error {
	var errs []error
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"Timeout", p.Timeout},
		{"AttemptTimeout", p.AttemptTimeout},
		{"MinAttempt", p.MinAttempt},
		{"ConnectGrace", p.ConnectGrace},
		{"MaxIdle", p.MaxIdle},
	} {
		if d.value < 0 {
			errs = append(errs, fieldError(d.name, d.value, "must not be negative"))
		}
	}
	if p.MinAttempt == Unlimited {
		errs = append(errs, fieldError("MinAttempt", "unlimited", "must be a time that a call can have left"))
	}
	if p.MaxAttempts < 0 {
		errs = append(errs, fieldError("MaxAttempts", p.MaxAttempts, "must not be negative; 1 means no retry"))
	}
	if p.ReplayBytes < 0 {
		errs = append(errs, fieldError("ReplayBytes", p.ReplayBytes, "must not be negative; 1 keeps nothing"))
	}
	errs = append(errs, p.Backoff.validate()...)
	errs = append(errs, p.Hedge.validate(), p.Learn.validate())
	for _, c := range p.Codes {
		if err := validateCode(c); err != nil {
			errs = append(errs, err)
		}
	}
	if int(p.Idempotency) >= len(idempotencyNames) {
		errs = append(errs, fieldError("Idempotency", uint8(p.Idempotency), "must be one of the Idempotency constants"))
	}
	if p.Timeout > 0 && p.MinAttempt > 0 && p.Timeout < p.MinAttempt {
		errs = append(errs, fieldError("Timeout", p.Timeout,
			fmt.Sprintf("must not be less than MinAttempt %v: every call would be refused", p.MinAttempt)))
	}
	if p.AttemptTimeout > 0 && p.MinAttempt > 0 && p.AttemptTimeout < p.MinAttempt {
		errs = append(errs, fieldError("AttemptTimeout", p.AttemptTimeout,
			fmt.Sprintf("must not be less than MinAttempt %v", p.MinAttempt)))
	}
	return errors.Join(errs...)
}

// validateCode refuses what can never be transient. CANCELLED and
// DEADLINE_EXCEEDED are judged by whose context ended, not by a list.
func validateCode(c codes.Code) error {
	switch {
	case c == codes.OK:
		return fieldError("Codes", "OK", "success is not retried")
	case c == codes.Canceled || c == codes.DeadlineExceeded:
		return fieldError("Codes", codeName(c),
			"is judged by whose deadline passed; set AttemptTimeout to have slow attempts repeated")
	case c > codes.Unauthenticated:
		return fieldError("Codes", uint32(c), "must be one of gRPC's 17 codes")
	}
	return nil
}

func fieldError(field string, value any, rule string) error {
	return fmt.Errorf("%s: %v %s", field, value, rule)
}

// Over returns p with every unset field taken from base: p is the more
// specific of the two.
func (p Policy) Over(base Policy) Policy {
	if p.Timeout == 0 {
		p.Timeout = base.Timeout
	}
	if p.AttemptTimeout == 0 {
		p.AttemptTimeout = base.AttemptTimeout
	}
	if p.MinAttempt == 0 {
		p.MinAttempt = base.MinAttempt
	}
	if p.MaxAttempts == 0 {
		p.MaxAttempts = base.MaxAttempts
	}
	p.Backoff = p.Backoff.over(base.Backoff)
	if p.Codes == nil {
		p.Codes = base.Codes
	}
	if p.Idempotency == Unspecified {
		p.Idempotency = base.Idempotency
	}
	if p.ConnectGrace == 0 {
		p.ConnectGrace = base.ConnectGrace
	}
	if p.ReplayBytes == 0 {
		p.ReplayBytes = base.ReplayBytes
	}
	if p.MaxIdle == 0 {
		p.MaxIdle = base.MaxIdle
	}
	p.Hedge = p.Hedge.over(base.Hedge)
	p.Learn = p.Learn.over(base.Learn)
	return p
}

// Clone returns a copy that shares no memory with p.
func (p Policy) Clone() Policy {
	p.Codes = slices.Clone(p.Codes)
	return p
}
