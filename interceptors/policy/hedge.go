package policy

import (
	"errors"
	"math"
	"time"
)

// Hedge says when a second attempt is sent beside one that takes long (J. Dean,
// L. A. Barroso, "The Tail at Scale"). The zero value inherits; with nothing set
// anywhere there are no hedges.
//
// Only unary methods with no side effects are hedged, unless Repeatable says
// more. Hedges are paid for from a bank of their own, which starts empty and
// earns 0.02 per success, and are off for 10 s after a server asked for a wait
// or answered RESOURCE_EXHAUSTED: a server that sheds gets no second copies.
type Hedge struct {
	// After is the delay after which a hedge is sent. With Quantile it is the
	// least delay. Unlimited clears a less specific source's. Default: none.
	After time.Duration `json:"-"`

	// Quantile sends the hedge when an attempt takes longer than this share of
	// the method's recent ones, such as 0.98. Above 0 and below 1. It needs 100
	// successes of the last 15 seconds; before that there are no hedges.
	Quantile float64 `json:"-"`

	// Max is how many hedges one attempt may have. Default 1.
	Max int `json:"-"`

	// Repeatable hedges methods that are idempotent or keyed too. Two copies of
	// a keyed call at one server join; of an idempotent one both run.
	Repeatable bool `json:"-"`
}

// Enabled reports whether there are any hedges at all.
func (h Hedge) Enabled() bool {
	return h.After != Unlimited && (h.After > 0 || h.Quantile > 0)
}

// Allows reports whether calls of a class may be hedged.
func (h Hedge) Allows(class Idempotency) bool {
	return h.Enabled() && (class == NoSideEffects || h.Repeatable && class.Repeatable())
}

func (h Hedge) validate() error {
	var errs []error
	if h.After < 0 {
		errs = append(errs, fieldError("Hedge.After", h.After, "must not be negative"))
	}
	if math.IsNaN(h.Quantile) || h.Quantile < 0 || h.Quantile >= 1 {
		errs = append(errs, fieldError("Hedge.Quantile", h.Quantile, "must be at least 0 and below 1"))
	}
	if h.Max < 0 || h.Max > 8 {
		errs = append(errs, fieldError("Hedge.Max", h.Max, "must be between 0 and 8"))
	}
	return errors.Join(errs...)
}

func (h Hedge) over(base Hedge) Hedge {
	// After and Quantile say one thing together: when. They come from one source.
	if h.After == 0 && h.Quantile == 0 {
		h.After, h.Quantile = base.After, base.Quantile
	}
	if h.Max == 0 {
		h.Max = base.Max
	}
	h.Repeatable = h.Repeatable || base.Repeatable
	return h
}

// Learn derives limits from what was observed of a method on a channel. Each is
// off until asked for, and nothing is refused or cut before there are enough
// samples. The zero value inherits.
type Learn struct {
	// AttemptQuantile bounds an attempt to this quantile of the method's recent
	// latencies times AttemptFactor, where AttemptTimeout does not bound it
	// closer. Above 0 and below 1; 0 is off. As much as a median attempt takes is
	// left for an attempt to come, where the deadline allows that at all.
	AttemptQuantile float64 `json:"-"`

	// AttemptFactor is at least 1. Default 3.
	AttemptFactor float64 `json:"-"`

	// AttemptFloor is the least timeout that is learned. Default 10 ms.
	AttemptFloor time.Duration `json:"-"`

	// MinChance refuses an attempt whose chance to finish in what is left of the
	// deadline, by the recent latencies, is below it. The call then ends with
	// DeadlineTooShort and its last error. Between 0 and 1; 0 is off.
	MinChance float64 `json:"-"`

	// ShortenDeadline sends a deadline that is earlier than the caller's by half
	// of the least latency observed, at most by 5 % of what is left, so that work
	// further down does not outlive the call that it is for: a relative deadline
	// grows by the delay of each hop.
	ShortenDeadline bool `json:"-"`

	// MinSamples is how many recent successes make a distribution. Default 100.
	MinSamples int `json:"-"`
}

// Defaults of [Learn].
const (
	DefaultAttemptFactor = 3
	DefaultAttemptFloor  = 10 * time.Millisecond
	DefaultMinSamples    = 100
)

// Enabled reports whether anything is to be learned.
func (l Learn) Enabled() bool {
	return l.AttemptQuantile > 0 || l.MinChance > 0 || l.ShortenDeadline
}

func (l Learn) validate() error {
	var errs []error
	share := func(name string, v float64) {
		if math.IsNaN(v) || v < 0 || v >= 1 {
			errs = append(errs, fieldError(name, v, "must be at least 0 and below 1"))
		}
	}
	share("Learn.AttemptQuantile", l.AttemptQuantile)
	share("Learn.MinChance", l.MinChance)
	if math.IsNaN(l.AttemptFactor) || math.IsInf(l.AttemptFactor, 0) || l.AttemptFactor != 0 && l.AttemptFactor < 1 {
		errs = append(errs, fieldError("Learn.AttemptFactor", l.AttemptFactor, "must be a number of at least 1"))
	}
	if l.AttemptFloor < 0 {
		errs = append(errs, fieldError("Learn.AttemptFloor", l.AttemptFloor, "must not be negative"))
	}
	if l.MinSamples < 0 {
		errs = append(errs, fieldError("Learn.MinSamples", l.MinSamples, "must not be negative"))
	}
	return errors.Join(errs...)
}

func (l Learn) over(base Learn) Learn {
	if l.AttemptQuantile == 0 {
		l.AttemptQuantile = base.AttemptQuantile
	}
	if l.AttemptFactor == 0 {
		l.AttemptFactor = base.AttemptFactor
	}
	if l.AttemptFloor == 0 {
		l.AttemptFloor = base.AttemptFloor
	}
	if l.MinChance == 0 {
		l.MinChance = base.MinChance
	}
	l.ShortenDeadline = l.ShortenDeadline || base.ShortenDeadline
	if l.MinSamples == 0 {
		l.MinSamples = base.MinSamples
	}
	return l
}
