package budget

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Defaults of the zero [Config].
const (
	// DefaultInitial lets a fresh or idle client survive a few blips. It is also
	// all that an outage can take from such a client.
	DefaultInitial = 3.0
	// DefaultEarn allows one failed retry for ten successes: with four attempts a
	// call, one failure in ten is still masked to 99.9 % and the load stays under
	// 1.12 times the calls.
	DefaultEarn = 0.1
	// DefaultWindow is long enough to ride out the gaps of slow traffic and short
	// enough that yesterday's peak does not finance today's outage.
	DefaultWindow = 2 * time.Second
)

// Limits that [Config.Validate] enforces.
const (
	maxRetries = 1e9  // keeps every sum of two balances inside an int64
	minEarn    = 1e-9 // one unit, the resolution of a balance
	minWindow  = time.Millisecond
)

// Config says how much a bank starts with, earns and holds. Amounts are in
// retries, rounded down to a billionth of one. The zero Config is valid and means
// the defaults.
type Config struct {
	// Initial is the balance of a new bank and the capacity that it never falls
	// below. Zero means [DefaultInitial]; at most 1e9. A value under 1 allows no
	// retry until successes have earned the rest.
	Initial float64
	// Earn is what one first-try success pays in. Zero means [DefaultEarn];
	// otherwise between 1e-9 and 1. Above 1 every call that works would finance
	// more than one that fails, which is no bound at all.
	Earn float64
	// Cap is a fixed capacity, at least 1, at least Initial and at most 1e9. Zero
	// means that the capacity follows the traffic: the larger of Initial and
	// Earn × the first-try successes of the last Window.
	Cap float64
	// Window is how far back successes count towards the capacity. Zero means
	// [DefaultWindow]; otherwise at least a millisecond. Without effect when Cap
	// is set. It is divided into 64 steps, and the oldest step is dropped whole, so
	// a success counts for at least 63/64 of Window and never for longer.
	Window time.Duration
	// MaxInFlight bounds the permits that are out at once: retries waiting for
	// their backoff or running. Zero means no bound besides the balance, which
	// every permit has already been taken from. Set it where retries are slow
	// and each one holds something scarce.
	MaxInFlight int
	// StartEmpty makes the bank begin with nothing instead of Initial, which then
	// is only the least capacity. It is for attempts that no failure asked for,
	// such as hedges: they should wait for evidence that the server is well.
	StartEmpty bool
}

// Validate reports every field that breaks a rule, by name, with its value and
// the rule; nil when there is none. [New] calls it.
func (c Config) Validate() error {
	return errors.Join(
		checkAmount("Initial", c.Initial, 0, maxRetries),
		checkAmount("Earn", c.Earn, minEarn, 1),
		checkAmount("Cap", c.Cap, 1, maxRetries),
		c.checkCapHoldsInitial(),
		c.checkWindow(),
		c.checkMaxInFlight(),
	)
}

// checkAmount lets zero pass, since zero asks for the default. NaN fails because
// it compares false with everything.
func checkAmount(field string, v, least, most float64) error {
	if v == 0 || (v >= least && v <= most) {
		return nil
	}
	return fmt.Errorf("budget: Config.%s is %v: must be 0 (the default) or between %v and %v", field, v, least, most)
}

func (c Config) checkCapHoldsInitial() error {
	if initial := c.withDefaults().Initial; c.Cap >= 1 && c.Cap < initial {
		return fmt.Errorf("budget: Config.Cap is %v: must be at least Initial, which is %v", c.Cap, initial)
	}
	return nil
}

func (c Config) checkWindow() error {
	if c.Window == 0 || c.Window >= minWindow {
		return nil
	}
	return fmt.Errorf("budget: Config.Window is %v: must be 0 (the default) or at least %v", c.Window, minWindow)
}

func (c Config) checkMaxInFlight() error {
	if c.MaxInFlight >= 0 {
		return nil
	}
	return fmt.Errorf("budget: Config.MaxInFlight is %d: must be 0 (no bound besides the balance) or positive", c.MaxInFlight)
}

func (c Config) withDefaults() Config {
	if c.Initial == 0 {
		c.Initial = DefaultInitial
	}
	if c.Earn == 0 {
		c.Earn = DefaultEarn
	}
	if c.Window == 0 {
		c.Window = DefaultWindow
	}
	return c
}

// Amounts are integers of a billionth of a retry: in floating point ten deposits
// of 0.1 make a little less than 1, and the tenth success would not buy a retry.
const (
	unitsPerRetry = 1_000_000_000
	maxUnits      = maxRetries * unitsPerRetry
)

// toUnits rounds down, so that the bank never lends more than its Config says.
// The product may miss a whole number from below (0.29 × 100 is 28.999…), hence
// the millionth of a unit.
func toUnits(retries float64) int64 { return int64(math.Floor(retries*unitsPerRetry + 1e-6)) }

func toRetries(units int64) float64 { return float64(units) / unitsPerRetry }
