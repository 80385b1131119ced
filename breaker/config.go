package breaker

import (
	"errors"
	"fmt"
	"time"
)

// Defaults of [Config], used where a field is zero.
//
// The failure rate is high on purpose. A server half of whose replicas are down fails one call in
// two; opening there would cut off the healthy half, and retries under a budget do better.
const (
	DefaultFailureRate = 0.8
	DefaultMinCalls    = 20
	DefaultWindow      = 10 * time.Second
	DefaultSlowRate    = 0.8
	DefaultOpenFor     = time.Second
	DefaultMaxOpenFor  = 30 * time.Second
	DefaultProbes      = 3
	DefaultProbeLease  = 10 * time.Second
)

// minWindow keeps a window's buckets well above the resolution of clocks.
const minWindow = time.Millisecond

// Config says when a breaker opens, for how long, and how it tries again. The zero Config is
// ready to use: each field's zero stands for its default. Negative values are errors.
type Config struct {
	// Name is carried by errors, transitions and snapshots. It has no other effect; a [Group]
	// sets it to the member's key. Default: empty.
	Name string

	// FailureRate opens the breaker when at least this share of the window's calls failed, once
	// there are MinCalls of them. Above 0, at most 1. Default [DefaultFailureRate].
	//
	// It is cut after nine decimals, and then compared without rounding.
	FailureRate float64

	// MinCalls is the number of calls in the window below which no rate is judged, so that one
	// failure out of one opens nothing. Default [DefaultMinCalls]. With math.MaxInt only
	// ConsecutiveFailures opens the breaker.
	MinCalls int

	// Window is how far back calls count. It slides in ten steps: a call counts for at least
	// nine tenths of Window after its end and at most for Window. At least 1 ms. Default
	// [DefaultWindow].
	Window time.Duration

	// ConsecutiveFailures opens the breaker after so many failures without a success between
	// them, whatever MinCalls says. Neutral outcomes neither add to the run nor end it.
	// Default 0: off.
	ConsecutiveFailures int

	// SlowCall is the latency from which a call counts as slow, whether it failed or not. A slow
	// success also fails as a probe: a breaker that opened because the server is slow must not
	// close while it is. Default 0: off.
	SlowCall time.Duration

	// SlowRate opens the breaker when at least this share of the window's calls was slow, once
	// there are MinCalls of them. Above 0, at most 1; an error without SlowCall. Default
	// [DefaultSlowRate] when SlowCall is set.
	SlowRate float64

	// OpenFor is how long calls are refused after the breaker opens. Each time a probe fails it
	// doubles, up to MaxOpenFor; when the breaker closes it starts from OpenFor again. Every
	// open time is drawn evenly from the upper half, OpenFor/2 to OpenFor, so that the clients
	// of one server do not probe it in step and none waits longer than configured. Default
	// [DefaultOpenFor].
	OpenFor time.Duration

	// MaxOpenFor is the most that OpenFor grows to; not below OpenFor. Default
	// [DefaultMaxOpenFor], or OpenFor where that is longer.
	MaxOpenFor time.Duration

	// Probes is both how many calls may be under way at once while half-open and how many must
	// succeed to close. Default [DefaultProbes].
	Probes int

	// ProbeLease is how long a probe holds its place when it does not report. After that another
	// call may probe; the late report still counts if the breaker is half-open as it was.
	// Default [DefaultProbeLease].
	ProbeLease time.Duration

	// OnTransition, if set, is told of every change of state: one at a time, in order, with no
	// lock held, so it may call the breaker. It runs in the goroutine of a call that changed the
	// state and holds that call up: keep it short. A panic in it passes through to that call
	// and leaves the breaker sound.
	OnTransition func(Transition)
}

// Validate returns nil, or one error that names every field that breaks its rule, with the value
// and the rule.
func (c Config) Validate() error {
	slowRate := checkRate("SlowRate", c.SlowRate)
	if slowRate == nil && c.SlowRate > 0 && c.SlowCall == 0 {
		slowRate = invalid("SlowRate", c.SlowRate, "has no effect without SlowCall: set both or neither")
	}
	window := checkNotNegative("Window", c.Window)
	if window == nil && c.Window > 0 && c.Window < minWindow {
		window = invalid("Window", c.Window, fmt.Sprintf("must be at least %v, or 0 for the default", minWindow))
	}
	maxOpenFor := checkNotNegative("MaxOpenFor", c.MaxOpenFor)
	if d := c.withDefaults(); maxOpenFor == nil && d.MaxOpenFor < d.OpenFor {
		maxOpenFor = invalid("MaxOpenFor", c.MaxOpenFor, fmt.Sprintf("must not be below OpenFor (%v)", d.OpenFor))
	}
	return errors.Join(
		checkRate("FailureRate", c.FailureRate),
		checkNotNegative("MinCalls", c.MinCalls),
		window,
		checkNotNegative("ConsecutiveFailures", c.ConsecutiveFailures),
		checkNotNegative("SlowCall", c.SlowCall),
		slowRate,
		checkNotNegative("OpenFor", c.OpenFor),
		maxOpenFor,
		checkNotNegative("Probes", c.Probes),
		checkNotNegative("ProbeLease", c.ProbeLease),
	)
}

func checkRate(field string, rate float64) error {
	// NaN fails every comparison, so the test is for what is right.
	if rate >= 0 && rate <= 1 {
		return nil
	}
	return invalid(field, rate, "must be above 0 and at most 1, or 0 for the default")
}

func checkNotNegative[T int | time.Duration](field string, value T) error {
	if value >= 0 {
		return nil
	}
	return invalid(field, value, "must not be negative")
}

func invalid(field string, value any, rule string) error {
	return fmt.Errorf("breaker: Config.%s = %v: %s", field, value, rule)
}

// withDefaults returns c with every zero replaced by what it stands for.
func (c Config) withDefaults() Config {
	c.FailureRate = orDefault(c.FailureRate, DefaultFailureRate)
	c.MinCalls = orDefault(c.MinCalls, DefaultMinCalls)
	c.Window = orDefault(c.Window, DefaultWindow)
	if c.SlowCall != 0 {
		c.SlowRate = orDefault(c.SlowRate, DefaultSlowRate)
	}
	c.OpenFor = orDefault(c.OpenFor, DefaultOpenFor)
	c.MaxOpenFor = orDefault(c.MaxOpenFor, max(DefaultMaxOpenFor, c.OpenFor))
	c.Probes = orDefault(c.Probes, DefaultProbes)
	c.ProbeLease = orDefault(c.ProbeLease, DefaultProbeLease)
	return c
}

func orDefault[T int | float64 | time.Duration](value, def T) T {
	if value == 0 {
		return def
	}
	return value
}

// openTime is the longest that the n-th opening in a row may last, n from 0.
func (c Config) openTime(n int) time.Duration {
	d := c.OpenFor
	for range n {
		// Compare before doubling: the product could overflow, the cap cannot.
		if d > c.MaxOpenFor/2 {
			return c.MaxOpenFor
		}
		d *= 2
	}
	return d
}

// perBillion is a share in billionths. Floats are good enough to write a rate down and not to
// compare one: 0.07*100 is 7.000000000000001, and then 7 of 100 would not reach it.
type perBillion uint64

const billion = 1_000_000_000

func toPerBillion(rate float64) perBillion {
	// Downwards, so that 2 of 3 reaches a rate of 2.0/3. Less than one in a billion is lost, which
	// no window of fewer calls can tell.
	return perBillion(rate * billion)
}
