package interceptors

import (
	"reflect"
	"runtime/debug"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/interceptors/policy"
)

// MetadataHedge tells a server that a request is a hedge: a copy of one that
// another attempt of the call has sent.
const MetadataHedge = "belay-hedge"

// hedgeOffFor is how long a channel sends no hedges after a server asked for a
// wait or answered RESOURCE_EXHAUSTED.
const hedgeOffFor = 10 * time.Second

// hedgeBank is what pays for a channel's hedges: it starts empty and no hedge
// gets its payment back, so hedges are at most one in fifty of what succeeds.
var hedgeBank = budget.Config{StartEmpty: true, Earn: 0.02, Initial: 1}

// hedging is a channel's state of hedges.
type hedging struct {
	bank *budget.Budget
	off  atomic.Int64 // until when, on the channel's clock
}

// shed notes that a server asked for less.
func (h *hedging) shed(now int64) {
	h.off.Store(now + int64(hedgeOffFor))
}

func (h *hedging) isOff(now int64) bool { return now < h.off.Load() }

// racer is one of the attempts of a call that run at the same time. Each has
// its own reply and metadata targets: nothing that one writes is another's.
type racer struct {
	attempt  *attempt
	reply    any
	err      error
	panicked any
	stack    []byte
	state    atomic.Int32 // racing, then whichever of the other two comes first
}

const (
	racing  int32 = iota
	arrived       // its result is in the channel: the caller's to judge
	lost          // another one decided: it clears up after itself
)

// verdict is what judge said of the attempt that decides.
type verdict struct {
	policy.Decision

	notSent bool
}

// race makes one attempt, with hedges beside it once it takes long, and returns
// the one that decides, as invoke does. Attempts that fail while another still
// runs yield to it, unless their answer is final.
func (c *call) race(first *attempt, reply any, delay time.Duration, invoke grpc.UnaryInvoker) (*attempt, verdict, error) {
	results := make(chan *racer, 1+c.rules.Hedge.Max)
	var live []*racer
	launch := func(a *attempt) {
		r := &racer{attempt: a, reply: emptyLike(reply)}
		live = append(live, r)
		go c.runRacer(r, invoke, results)
	}
	launch(first)
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for hedges := 0; ; {
		select {
		case r := <-results:
			live = without(live, r)
			if r.panicked != nil {
				c.supersede(live)
				c.abandon(r.attempt)
				panic(r.panicked)
			}
			if r.err == nil {
				c.supersede(live)
				assign(reply, r.reply)
				return r.attempt, verdict{}, nil
			}
			d, notSent := c.judge(r.attempt, r.err, false)
			if len(live) == 0 || decides(d) {
				c.supersede(live)
				return r.attempt, verdict{d, notSent}, r.err
			}
		case <-timer.C:
			if permit, ok := c.mayHedge(); ok {
				hedges++
				launch(c.beginHedge(permit, first))
				if hedges < c.rules.Hedge.Max {
					timer.Reset(delay)
				}
			}
		}
	}
}

// decides reports whether a failure ends the call though another attempt runs:
// its answer would be the same.
func decides(d policy.Decision) bool {
	switch d.Outcome {
	case policy.OutcomeFinal, policy.OutcomeStopAsked, policy.OutcomeCallerGone, policy.OutcomeLocal:
		return true
	default:
		return false
	}
}

// runRacer runs on a goroutine of its own. Of the call it touches only what does
// not change while attempts race.
func (c *call) runRacer(r *racer, invoke grpc.UnaryInvoker, results chan<- *racer) {
	defer func() {
		if p := recover(); p != nil {
			r.panicked, r.stack = p, debug.Stack()
		}
		if r.state.CompareAndSwap(racing, arrived) {
			results <- r
			return
		}
		c.bury(r)
	}()
	r.err = invoke(r.attempt.ctx, c.method.full, c.request, r.reply, c.cc, r.attempt.opts...)
}

// supersede cancels the attempts that another one has decided without. They say
// nothing about the server; that they took so long is still known of them.
func (c *call) supersede(live []*racer) {
	now := time.Now()
	for _, r := range live {
		if l := c.latencies(); l != nil {
			l.add(now.Sub(r.attempt.start), now)
		}
		// Read before the attempt is lost: from then on it is the racer's, which
		// clears it up.
		cancel := r.attempt.cancel
		took := r.state.CompareAndSwap(racing, lost)
		cancel()
		if !took {
			c.bury(r) // it had arrived, and nobody will look
		}
	}
}

// bury ends what a superseded attempt holds.
func (c *call) bury(r *racer) {
	r.attempt.report(policy.Neutral, 0, time.Now())
	if r.attempt.span != nil {
		r.attempt.span.SetAttributes(attribute.Bool("belay.superseded", true))
	}
	r.attempt.end(codes.Canceled, "superseded")
}

// hedgeDelay is when a hedge is due; false when none will be.
func (c *call) hedgeDelay() (time.Duration, bool) {
	if !c.hedges {
		return 0, false
	}
	h := c.rules.Hedge
	if !h.Allows(c.class) || c.off || c.stream != nil || c.channel.hedges.isOff(c.channel.clock.at(c.now)) {
		return 0, false
	}
	if h.Quantile == 0 {
		return h.After, true
	}
	view := c.latencies().view(c.now, c.rules.Learn.MinSamples)
	if view == nil {
		return 0, false
	}
	return max(view.quantile(h.Quantile), h.After), true
}

// mayHedge asks everything that has a say, and pays.
func (c *call) mayHedge() (breakerPermit, bool) {
	c.now = time.Now()
	left, has := c.left()
	switch {
	case c.ctx.Err() != nil, has && left < c.rules.MinAttempt:
		return breakerPermit{}, false
	case c.channel.hedges.isOff(c.channel.clock.at(c.now)):
		c.noHedge("the server asked for less")
		return breakerPermit{}, false
	}
	permit, ok := c.channel.hedges.bank.Withdraw()
	if !ok {
		c.noHedge("nothing in the bank")
		return breakerPermit{}, false
	}
	admitted, err := c.allow()
	if err != nil {
		permit.Refund() // nothing was sent
		c.noHedge("breaker")
		return breakerPermit{}, false
	}
	permit.Spend()
	return admitted, true
}

func (c *call) noHedge(why string) {
	spanEvent(c.span, "hedge refused", attribute.String("belay.reason", why))
}

func (c *call) beginHedge(permit breakerPermit, first *attempt) *attempt {
	c.client.config.observe(c.ctx, Event{Kind: EventHedge, Method: c.method.full, Attempt: int(c.made) + 1, Delay: c.now.Sub(first.start)})
	return c.begin(permit, false, first)
}

// latencies returns where this method's latencies on this channel are kept;
// nil where no policy asks for them.
func (c *call) latencies() *latencies {
	if !c.learns {
		return nil
	}
	return c.channel.latenciesOf(c.method.full)
}

func (c *channel) latenciesOf(method string) *latencies {
	if l, ok := c.observed.Load(method); ok {
		return l.(*latencies) //nolint:forcetypeassert // the map holds nothing else
	}
	if c.watched.Load() >= maxMethods {
		return newLatencies() // nothing is learned of a method too many
	}
	l, known := c.observed.LoadOrStore(method, newLatencies())
	if !known {
		c.watched.Add(1)
	}
	return l.(*latencies) //nolint:forcetypeassert // as above
}

func without(live []*racer, r *racer) []*racer {
	for i, other := range live {
		if other == r {
			return append(live[:i:i], live[i+1:]...)
		}
	}
	return live
}

// emptyLike returns a new reply of the same type.
func emptyLike(reply any) any {
	if m, ok := reply.(proto.Message); ok {
		return m.ProtoReflect().New().Interface()
	}
	if t := reflect.TypeOf(reply); t != nil && t.Kind() == reflect.Pointer {
		return reflect.New(t.Elem()).Interface()
	}
	return reply
}

// assign makes the caller's reply what the winner's is.
func assign(reply, won any) {
	if m, ok := reply.(proto.Message); ok {
		proto.Reset(m)
		proto.Merge(m, won.(proto.Message)) //nolint:forcetypeassert // made by emptyLike
		return
	}
	if v := reflect.ValueOf(reply); v.Kind() == reflect.Pointer && !v.IsNil() && reply != won {
		v.Elem().Set(reflect.ValueOf(won).Elem())
	}
}
