package interceptors

import (
	"fmt"
	"math"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/belayrpc/belay/interceptors/policy"
)

// attemptTimeout is the time that the next attempt is given: the policy's, or a
// learned one that is shorter. policy.Unlimited is none. Early says that it is the
// call's own deadline, told a little before it passes.
func (c *call) attemptTimeout(left time.Duration, has bool) (t time.Duration, early bool) {
	t = c.rules.AttemptTimeout
	if !c.learns {
		return t, false
	}
	view := c.distribution()
	if view == nil {
		return t, false
	}
	if learned, ok := c.learnedTimeout(view, left, has); ok && learned < t {
		c.explain("attempt timeout", learned, view)
		t = learned
	}
	if shorter, ok := c.shortened(view, left, has); ok && shorter < t {
		return shorter, true
	}
	return t, false
}

// distribution is the method's recent latencies; nil while there are too few.
func (c *call) distribution() *latencyView {
	if c.forced || !c.rules.Learn.Enabled() {
		return nil
	}
	return c.latencies().view(c.now, c.rules.Learn.MinSamples)
}

// learnedTimeout cuts an attempt off where waiting longer is worth less than
// trying again. So it needs an attempt to come.
func (c *call) learnedTimeout(view *latencyView, left time.Duration, has bool) (time.Duration, bool) {
	l := c.rules.Learn
	if l.AttemptQuantile == 0 || c.off || !c.class.Repeatable() || int(c.made) >= c.rules.MaxAttempts {
		return 0, false
	}
	t := max(scaleUp(view.quantile(l.AttemptQuantile), l.AttemptFactor), l.AttemptFloor)
	if has {
		if rest := left - view.quantile(0.5); rest >= l.AttemptFloor {
			t = min(t, rest)
		}
	}
	return t, true
}

func scaleUp(d time.Duration, f float64) time.Duration {
	if v := float64(d) * f; v < math.MaxInt64 {
		return time.Duration(v)
	}
	return policy.Unlimited
}

// shortened is a deadline a little before the caller's: what a server is told
// is relative, so on the way it moves by the delay of the network. A stream's is
// left alone, since its latencies are those of first answers.
func (c *call) shortened(view *latencyView, left time.Duration, has bool) (time.Duration, bool) {
	if !c.rules.Learn.ShortenDeadline || !has || c.stream != nil {
		return 0, false
	}
	return left - min(view.least/2, left/20), true
}

// hopeless reports whether an attempt has too little chance to finish in what
// is left.
func (c *call) hopeless(left time.Duration) bool {
	if !c.learns || c.rules.Learn.MinChance == 0 {
		return false
	}
	view := c.distribution()
	if view == nil {
		return false
	}
	if shorter, ok := c.shortened(view, left, true); ok {
		left = shorter // what the attempt will be given
	}
	chance := view.chance(left)
	if chance >= c.rules.Learn.MinChance {
		return false
	}
	spanEvent(c.span, "chance too small", attribute.Float64("belay.chance", chance),
		attribute.Float64("belay.deadline.left", left.Seconds()))
	c.explain("chance", left, view)
	return true
}

// explain tells the observer about a learned decision, with its numbers.
func (c *call) explain(what string, limit time.Duration, view *latencyView) {
	if c.client.config.observer == nil {
		return
	}
	c.client.config.observe(c.ctx, Event{
		Kind: EventLearned, Method: c.method.full, Attempt: int(c.made), Delay: limit,
		Detail: fmt.Sprintf("%s: %d samples, least %v, median %v, p99 %v, chance %.3f",
			what, view.total, view.least, view.quantile(0.5), view.quantile(0.99), view.chance(limit)),
	})
}
