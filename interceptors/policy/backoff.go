package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Jitter is how a delay is drawn at random from the exponential curve
// v(n) = min(Max, Base × Multiplierⁿ).
type Jitter uint8

const (
	// JitterUnspecified inherits; the default is JitterFull.
	JitterUnspecified Jitter = iota

	// JitterFull draws from [0, v). It does the least work of all when many
	// clients contend (M. Brooker, "Exponential Backoff And Jitter").
	JitterFull

	// JitterEqual draws from [v/2, v): half the wait is certain.
	JitterEqual

	// JitterDecorrelated draws from [Base, 3 × the delay before), at most Max.
	JitterDecorrelated

	// JitterProportional draws from v × [1−Spread, 1+Spread), at most Max: the
	// rule of gRFC A6 with Spread 0.2. It leaves a herd nearly together.
	JitterProportional

	// JitterNone waits exactly v. For tests and for single clients.
	JitterNone
)

var jitterNames = [...]string{"", "full", "equal", "decorrelated", "proportional", "none"}

// String returns the name used in JSON; "" for JitterUnspecified.
func (j Jitter) String() string {
	if int(j) < len(jitterNames) {
		return jitterNames[j]
	}
	return fmt.Sprintf("jitter(%d)", uint8(j))
}

// MarshalText implements [encoding.TextMarshaler].
func (j Jitter) MarshalText() ([]byte, error) {
	if int(j) >= len(jitterNames) {
		return nil, fmt.Errorf("policy: Jitter %d is not one of the constants of this package", uint8(j))
	}
	return []byte(j.String()), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler].
func (j *Jitter) UnmarshalText(text []byte) error {
	for n, name := range jitterNames {
		if name == string(text) {
			*j = Jitter(n)
			return nil
		}
	}
	return fmt.Errorf("policy: Jitter %q: want one of full, equal, decorrelated, proportional, none", text)
}

// Backoff is the wait before a retry. The zero value of each field inherits;
// with nothing set anywhere it is full jitter, Base 50 ms, Multiplier 2, Max 1 s.
//
// A delay is never negative and never above Max, whatever the inputs: the
// curve saturates instead of overflowing.
type Backoff struct {
	// Base is the value of the curve for the first retry. Default 50 ms, or Max
	// where only Max is set and is less: the more specific of the two wins.
	Base time.Duration `json:"-"`

	// Max is the largest delay. Default 1 s, or Base where only Base is set and
	// is larger.
	Max time.Duration `json:"-"`

	// Multiplier is the growth from one retry to the next, at least 1. Default 2.
	Multiplier float64 `json:"-"`

	// Jitter is how the delay is drawn. Default JitterFull.
	Jitter Jitter `json:"-"`

	// Spread is the half width of JitterProportional, a share of 1. Default 0.2.
	Spread float64 `json:"-"`
}

// Delay returns the wait before retry number n, counted from 0, on the draw u
// from [0, 1). prev is the delay before (0 for the first), which only
// JitterDecorrelated uses. Delay is pure; [Backoff.Next] draws u for you.
//
// Fields that [Policy.Validate] refuses count as not set, so that a bad number
// cannot make a hot loop of a client.
func (b Backoff) Delay(n int, prev time.Duration, u float64) time.Duration {
	b = b.usable().over(defaultBackoff)
	u = min(max(u, 0), 1)
	v := b.curve(n)
	switch b.Jitter {
	case JitterNone:
		return v
	case JitterEqual:
		return v/2 + scale(v-v/2, u)
	case JitterProportional:
		return min(b.Max, scale(v, 1-b.Spread+2*b.Spread*u))
	case JitterDecorrelated:
		from, high := max(prev, b.Base), b.Max
		if from < b.Max/3 { // 3 × from may overflow: compare before multiplying
			high = 3 * from
		}
		return b.Base + scale(high-b.Base, u)
	default: // JitterFull, and anything unknown: the safest draw
		return scale(v, u)
	}
}

// Next is Delay on a draw from the runtime's own generator, which takes no
// lock. It may be called from many goroutines.
func (b Backoff) Next(n int, prev time.Duration) time.Duration {
	return b.Delay(n, prev, rand.Float64()) //nolint:gosec // spreading load needs no secret numbers
}

// curve is min(Max, Base × Multiplierⁿ) in floating point, where growth past
// the range of a Duration is a large number and not a negative one.
func (b Backoff) curve(n int) time.Duration {
	v := float64(b.Base) * math.Pow(b.Multiplier, float64(max(n, 0)))
	if !(v < float64(b.Max)) { // also true for NaN and infinities
		return b.Max
	}
	return time.Duration(v)
}

// scale returns d × f for d ≥ 0, saturating. A share of d is never more than d,
// although the float64 nearest to a large Duration can be.
func scale(d time.Duration, f float64) time.Duration {
	limit := time.Duration(math.MaxInt64)
	if f <= 1 {
		limit = d
	}
	switch v := float64(d) * f; {
	case !(v > 0): // also true for NaN
		return 0
	case v >= float64(limit):
		return limit
	default:
		return time.Duration(v)
	}
}

// validate returns an error for each field with a bad value.
func (b Backoff) validate() []error {
	var errs []error
	if b.Base < 0 {
		errs = append(errs, fieldError("Backoff.Base", b.Base, "must not be negative"))
	}
	if b.Base == Unlimited {
		errs = append(errs, fieldError("Backoff.Base", "unlimited", "must be a time that a call can wait"))
	}
	if b.Max < 0 {
		errs = append(errs, fieldError("Backoff.Max", b.Max, "must not be negative"))
	}
	if b.Base > 0 && b.Max > 0 && b.Max < b.Base {
		errs = append(errs, fieldError("Backoff.Max", b.Max, fmt.Sprintf("must not be less than Backoff.Base %v", b.Base)))
	}
	if !validMultiplier(b.Multiplier) {
		errs = append(errs, fieldError("Backoff.Multiplier", b.Multiplier, "must be a number of at least 1"))
	}
	if int(b.Jitter) >= len(jitterNames) {
		errs = append(errs, fieldError("Backoff.Jitter", uint8(b.Jitter), "must be one of the Jitter constants"))
	}
	if !validSpread(b.Spread) {
		errs = append(errs, fieldError("Backoff.Spread", b.Spread, "must be between 0 and 1"))
	}
	return errs
}

func validMultiplier(m float64) bool { return m == 0 || m >= 1 && !math.IsInf(m, 0) }

func validSpread(s float64) bool { return s >= 0 && s <= 1 }

// usable returns b without the fields that validate refuses.
func (b Backoff) usable() Backoff {
	b.Base, b.Max = max(b.Base, 0), max(b.Max, 0)
	if b.Max > 0 && b.Base > b.Max {
		b.Base = b.Max
	}
	if !validMultiplier(b.Multiplier) {
		b.Multiplier = 0
	}
	if !validSpread(b.Spread) {
		b.Spread = 0
	}
	return b
}

// over returns b with each unset field taken from base. Where one of Base and
// Max is set and the inherited other contradicts it, the set one wins.
func (b Backoff) over(base Backoff) Backoff {
	if b.Base == 0 {
		b.Base = base.Base
		if b.Max > 0 {
			b.Base = min(b.Base, b.Max)
		}
	}
	if b.Max == 0 && base.Max != 0 {
		b.Max = max(base.Max, b.Base)
	}
	if b.Multiplier == 0 {
		b.Multiplier = base.Multiplier
	}
	if b.Jitter == JitterUnspecified {
		b.Jitter = base.Jitter
	}
	if b.Spread == 0 {
		b.Spread = base.Spread
	}
	return b
}
