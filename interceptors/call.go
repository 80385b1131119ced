package interceptors

import (
	"context"
	"errors"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors/policy"
)

// call is one logical call: what holds for all its attempts, and what they
// left. It belongs to the goroutine that made the call.
type call struct {
	*failed // nil until an attempt has failed
	callOptions

	// What holds for all attempts.
	client  *Client
	channel *channel
	cc      *grpc.ClientConn
	method  *method
	rules   *policy.Rules
	class   policy.Idempotency
	bundled bool            // made through DialOptions: gRPC's own retries are off
	noRetry bool            // the caller asked for one attempt
	off     bool            // one attempt, for whatever reason
	forced  bool            // the kill switch: refuse nothing
	learns  bool            // latencies are kept for the method
	hedges  bool            // the rules have hedges, for some class of methods at least
	nested  bool            // made under the context of another call's attempt
	request any             // what is sent: the caller's, or a copy with the key in it
	ctx     context.Context //nolint:containedctx // a call is its context
	cancel  context.CancelFunc
	span    trace.Span
	ledger  *ledger
	stream  *clientStream // nil for a unary call

	// What the attempts left.
	now      time.Time // read once for each decision
	delay    time.Duration
	made     int32    // attempts, questions about a running execution not counted
	sent     int32    // of those, the ones that may have reached the server
	total    int32    // attempts and questions
	executed Executed // the worst over all
	paid     bool     // failed.bank pays for the retry under way
	// outOfTime: the call's own deadline is what its last attempt ended of.
	outOfTime bool

	first attempt
}

// failed is what only a call has of which an attempt failed.
type failed struct {
	attempts []Attempt // see maxKeptAttempts
	lastErr  error
	last     *attempt      // the one that ended last
	bank     budget.Permit // pays for the retry under way
}

// breakerPermit is a permit of Belay's breaker or of the user's own, of which
// done is not nil. The zero one is of none.
type breakerPermit struct {
	belay breaker.Permit
	done  func(breaker.Outcome, time.Duration)
}

// open prepares everything that comes before the first attempt. On an error the
// call is over, with nothing sent.
func (c *call) open(ctx context.Context, set *policySet, req any, opts []grpc.CallOption) error {
	c.now = time.Now()
	c.first.start = c.now
	c.first.targets = &targets{}
	c.ctx = ctx
	c.request = req
	c.first.opts, c.noRetry = c.split(opts, c.first.room[:0])
	c.forced = c.client.disabled.Load() || c.client.config.dryRun
	c.off = c.noRetry || c.forced
	from := originOf(ctx)
	c.ledger, c.nested = from.ledger, from.attempt
	c.rules = &c.method.rules
	if o := c.override; o != nil {
		if err := o.Validate(); err != nil {
			return c.refuse(LocalRefusal, codes.InvalidArgument, "Override: "+err.Error(), err)
		}
	}
	c.rules = set.rulesFor(ctx, c.method, c.override)
	c.class = classOf(c.rules, c.method.declared)

	c.hedges = c.rules.Hedge.Enabled()
	c.learns = c.stream == nil && (c.rules.Learn.Enabled() || c.rules.Hedge.Quantile > 0)
	if t := c.rules.Timeout; t != policy.Unlimited {
		c.ctx, c.cancel = context.WithTimeoutCause(ctx, t, errCallTimeout)
	}
	c.ctx, c.span = c.client.tracer.startCall(c.ctx, c.now, &c.method.span)
	if err := c.prepareKey(); err != nil {
		return c.refuse(LocalRefusal, codes.InvalidArgument, err.Error(), err)
	}
	if err := c.ctx.Err(); err != nil {
		return c.refuse(CallerGone, status.FromContextError(err).Code(), "the call's context ended before anything was sent", err)
	}
	if left, has := c.left(); has && left < c.rules.MinAttempt && c.forced {
		c.would(DeadlineTooShort, 0)
	} else if has && left < c.rules.MinAttempt {
		spanEvent(c.span, "deadline too short", attribute.Float64("belay.deadline.left", left.Seconds()))
		return c.refuse(DeadlineTooShort, codes.DeadlineExceeded,
			"nothing was sent: "+left.String()+" left, MinAttempt is "+c.rules.MinAttempt.String(), context.DeadlineExceeded)
	} else if has && c.hopeless(left) {
		return c.refuse(DeadlineTooShort, codes.DeadlineExceeded,
			"nothing was sent: too little chance to finish in "+left.String(), context.DeadlineExceeded)
	}
	return nil
}

// errCallTimeout and errAttemptTimeout are causes, for who asks context.Cause.
var (
	errCallTimeout    = errors.New("belay: the policy's Timeout passed")
	errAttemptTimeout = errors.New("belay: the policy's AttemptTimeout passed")
)

func (c *call) left() (time.Duration, bool) {
	deadline, has := c.ctx.Deadline()
	if !has {
		return 0, false
	}
	return deadline.Sub(c.now), true
}

// admit asks the breaker for the next attempt. A refusal ends the call: with
// the breaker's own error before the first attempt, with the last one after. The
// permit of an attempt that is made in spite of one is the zero one.
func (c *call) admit() (breakerPermit, error) {
	permit, err := c.allow()
	if err == nil {
		return permit, nil
	}
	if c.forced {
		c.would(BreakerOpen, 0)
		return permit, nil
	}
	spanEvent(c.span, "breaker refused")
	c.returnUnused()
	if c.made > 0 {
		return permit, c.stopped(BreakerOpen, err)
	}
	return permit, c.fail(BreakerOpen, c.method.refused(), err)
}

func (c *call) allow() (permit breakerPermit, err error) {
	switch {
	case c.channel.breakers != nil:
		permit.belay, err = c.channel.breakers.Get(c.method.service).AllowAt(c.now)
	case c.client.config.ownBreaker != nil:
		permit.done, err = c.client.config.ownBreaker.Allow(c.method.service)
	}
	if err != nil {
		return breakerPermit{}, err // whatever came with the refusal
	}
	return permit, nil
}

// breakerRefuses reports whether Belay's breaker would refuse an attempt now. A
// breaker of the user's own is only asked when there is one to admit.
func (c *call) breakerRefuses() bool {
	return c.channel.breakers != nil && !c.channel.breakers.Get(c.method.service).ReadyAt(c.now)
}

// begin readies the next attempt: its context, metadata and targets. Beside is
// the attempt that it is a hedge of, nil for most.
func (c *call) begin(permit breakerPermit, poll bool, beside *attempt) *attempt {
	a := &c.first
	if c.total > 0 {
		a = newAttempt()
	}
	if c.stream != nil {
		a.stream = &streamAttempt{owner: c.stream}
	}
	if c.total > 0 {
		callers := c.first.opts[:len(c.first.opts)-privateTargets]
		a.target(append(a.room[:0], callers...))
	} else {
		a.target(a.opts)
	}
	c.total++
	if !poll {
		c.made++
	}
	a.permit = permit
	a.start = c.now
	a.delay = c.delay
	c.bound(a)
	kind := trace.SpanKindClient
	if c.client.config.wireTracing {
		kind = trace.SpanKindInternal
	}
	a.ctx, a.span = c.client.tracer.startAttempt(a.ctx, c.span, &c.method.span, kind, int(c.made), a.delay)
	if beside != nil && a.span != nil {
		a.span.AddLink(trace.Link{SpanContext: trace.SpanContextFromContext(beside.ctx)})
		a.span.SetAttributes(attribute.Bool("belay.hedge", true))
	}
	a.ctx = c.outgoing(a.ctx, beside != nil)
	return a
}

// bound gives an attempt its context and time: never more than the call has
// left; where that is less, the call's own deadline does.
func (c *call) bound(a *attempt) {
	a.ctx = c.ctx
	if c.learns || c.rules.AttemptTimeout != policy.Unlimited {
		left, has := c.left()
		if t, early := c.attemptTimeout(left, has); t != policy.Unlimited && (!has || t < left) {
			a.timeout, a.early = t, early
		}
	}
	switch {
	case c.stream != nil:
		a.boundStream()
	case a.early:
		a.ctx, a.cancel = context.WithDeadline(a.ctx, c.now.Add(a.timeout))
	case a.timeout > 0:
		a.ctx, a.cancel = context.WithDeadlineCause(a.ctx, c.now.Add(a.timeout), errAttemptTimeout)
	case c.hedges && c.rules.Hedge.Allows(c.class):
		a.ctx, a.cancel = context.WithCancel(a.ctx) // another attempt may supersede it
	}
}

// outgoing writes the call's metadata into an attempt's context, always from
// the caller's own, so that nothing piles up from attempt to attempt.
func (c *call) outgoing(ctx context.Context, hedge bool) context.Context {
	injects := !c.client.config.wireTracing && c.client.tracer.injects(ctx)
	if c.sent == 0 && c.key == nil && !injects && !c.client.config.trustBoundary && !hedge && !c.nested {
		return ctx
	}
	md, ok := metadata.FromOutgoingContext(ctx) // a copy
	if !ok {
		md = metadata.MD{}
	}
	if c.client.config.trustBoundary || c.nested {
		stripHopScoped(md)
	}
	if c.nested {
		delete(md, MetadataKey)
		delete(md, MetadataFirstSent)
	}
	if c.sent > 0 {
		md.Set(metadataAttempts, strconv.Itoa(int(c.sent))) // exactly one value, whatever the caller forwards
	}
	if hedge {
		md.Set(MetadataHedge, "1")
	}
	if c.key != nil {
		md.Set(MetadataKey, c.key.Value)
		md.Set(MetadataFirstSent, idempotency.FormatFirstSent(c.key.FirstSent))
	}
	if injects {
		c.client.tracer.inject(ctx, md)
	}
	return metadata.NewOutgoingContext(withOrigin(ctx, &origin{ledger: c.ledger, attempt: true}), md)
}

// judge gathers what is known of a finished attempt and asks for the verdict.
func (c *call) judge(a *attempt, err error, committed bool) (d policy.Decision, notSent bool) {
	err = a.translate(err)
	return c.judgeAs(a, err, committed, a.madeHere(status.Code(err), c.request))
}

func (c *call) judgeAs(a *attempt, err error, committed, local bool) (d policy.Decision, notSent bool) {
	ran := time.Since(a.start)
	c.now = a.start.Add(ran)
	st := statusOf(err)
	reason := a.said(MetadataReason)
	notSent = a.neverSent(c.nativeRetries())
	left, hasDeadline := c.left()
	s := policy.Situation{
		Rules:          c.rules,
		Class:          c.class,
		Code:           st.Code(),
		Call:           c.ended(),
		AttemptExpired: a.expired(ran),
		AttemptTimeout: a.timeout,
		Ran:            ran,
		NotSent:        notSent,
		NotExecuted:    a.said(MetadataExecuted) == "no",
		InFlight:       reason == string(idempotency.ReasonInFlight),
		OwnRefusal:     reason != "" && reason != reasonDeadline,
		Local:          local,
		Asked:          asked(a, st),
		Committed:      committed,
		Off:            c.off,
		Attempts:       int(c.made),
		HasDeadline:    hasDeadline,
		Left:           left,
		Backoff:        c.rules.Backoff.Next(int(c.made)-1, c.delay),

		DeadlineTooShort: reason == reasonDeadline && st.Code() == codes.DeadlineExceeded,
	}
	switch {
	case a.stream != nil:
		s.AttemptTimeout = 0 // no deadline that a peer could have answered for
	case a.early:
		s.AttemptTimeout, s.AttemptExpired = 0, false
		if a.expired(ran) && s.Call == policy.CallLives {
			s.Call = policy.CallExpired
		}
	case a.timeout > 0:
		s.AttemptLeft = a.timeout - ran
	}
	if notSent {
		s.GraceLeft = c.channel.grace.notSent(c.channel.clock.at(c.now), c.rules.ConnectGrace, c.total == 1)
	} else {
		c.sent++
		if a.peer.Addr != nil {
			c.channel.grace.sent()
		}
	}
	if s.Asked.Given || s.Asked.Stop || s.Code == codes.ResourceExhausted {
		c.channel.hedges.shed(c.channel.clock.at(c.now))
	}
	d = policy.Decide(s)
	// A peer's word about an attempt's own timeout is about a deadline of our making.
	c.outOfTime = s.DeadlineTooShort && s.AttemptTimeout == 0 || d.Stop == CallerGone && s.Call != policy.CallCancelled
	a.report(d.Health, ran, c.now)
	if d.Retry && c.breakerRefuses() { // asked after it was told about this attempt
		s.BreakerRefuses = true
		d = policy.Decide(s)
	}
	c.remember(a, st, err, notSent, local, ran)
	if c.client.config.dryRun && !c.noRetry {
		c.imagine(s)
	}
	return d, notSent
}

// imagine reports what enforcement would have done about a failure. Whether the
// retry would have worked is not known, so it is paid for as one that failed.
func (c *call) imagine(s policy.Situation) {
	s.Off = false
	s.BreakerRefuses = c.breakerRefuses()
	d := policy.Decide(s)
	if d.Retry && !d.Free {
		permit, ok := c.channel.bank.Withdraw()
		if !ok {
			c.would(BudgetSpent, 0)
			return
		}
		permit.Spend()
	}
	c.would(d.Stop, d.Delay)
}

// ended says whether the call's own context is done.
func (c *call) ended() policy.CallEnd {
	switch err := c.ctx.Err(); {
	case err == nil:
		// The server's clock fires at the same moment as ours, and its answer can
		// be here before our context has noticed.
		if left, has := c.left(); has && left <= 0 {
			return policy.CallExpired
		}
		return policy.CallLives
	case errors.Is(err, context.DeadlineExceeded):
		return policy.CallExpired
	default:
		return policy.CallCancelled
	}
}

// nativeRetries reports whether gRPC may retry this method by itself, below.
// Such a channel is reported once: its retries multiply with ours.
func (c *call) nativeRetries() bool {
	if c.bundled || c.cc == nil {
		return false
	}
	if c.cc.GetMethodConfig(c.method.full).RetryPolicy == nil {
		return false
	}
	c.stacked("service config",
		"the channel's service config has a retryPolicy too, so retries multiply; dial with Client.DialOptions, or with grpc.WithDisableRetry")
	return true
}

// stacked reports, once for each place, that another layer retries as well.
func (c *call) stacked(layer, message string) {
	place := c.method.service
	if c.cc != nil {
		place += " at " + c.cc.CanonicalTarget()
	}
	if !c.client.warned.first(layer, place) {
		return
	}
	c.client.config.logger.WarnContext(c.ctx, "belay: "+message, "method", c.method.full, "place", place)
	c.client.config.observe(c.ctx, Event{Kind: EventStacked, Method: c.method.full, Detail: layer})
}

// asked is what the server asked for, by trailer and by detail; the larger
// delay wins.
func asked(a *attempt, st *status.Status) policy.Asked {
	p := readPushback(a.trailer)
	if p.stop {
		return policy.Asked{Stop: true}
	}
	info, given := retryInfo(st)
	return policy.Asked{Given: p.given || given, Delay: max(p.delay, info)}
}

// remember keeps what is known of a finished attempt, for the error, and tells
// the span and the observer.
func (c *call) remember(a *attempt, st *status.Status, err error, notSent, local bool, ran time.Duration) {
	executed := a.executed(err, notSent, local)
	c.executed = max(c.executed, executed)
	if c.failed == nil {
		c.failed = &failed{attempts: make([]Attempt, 0, min(c.rules.MaxAttempts, maxKeptAttempts))}
	}
	c.last, c.lastErr = a, err
	if len(c.attempts) == maxKeptAttempts {
		// The middle one goes: how it began and how it ended is what matters.
		c.attempts = append(c.attempts[:maxKeptAttempts/2], c.attempts[maxKeptAttempts/2+1:]...)
	}
	c.attempts = append(c.attempts, Attempt{
		Code: st.Code(), Start: a.start, Duration: ran, Delay: a.delay, Sent: !notSent,
		Executed: executed, Origin: a.origin(notSent, local), Err: err,
	})
	a.end(st.Code(), st.Message())
	if a.finishes.Load() > 1 {
		c.stacked("an inner interceptor", "an interceptor below Belay's retries too, so retries multiply; take it out")
	} else if md, ok := metadata.FromOutgoingContext(c.ctx); ok && len(md["x-retry-attempt"]) > 0 {
		c.stacked("an outer interceptor", "an interceptor above Belay's retries too, so retries multiply; take it out")
	}
	c.client.config.observe(c.ctx, Event{
		Kind: EventAttempt, Method: c.method.full, Attempt: int(c.made), Code: st.Code(), Duration: ran, Sent: !notSent,
	})
}

// succeed is what a successful attempt means.
func (c *call) succeed(a *attempt) {
	ran := time.Since(a.start) // reads one clock, where time.Now reads two
	c.now = a.start.Add(ran)
	c.channel.grace.sent()
	latency := ran
	if a.stream != nil && a.stream.answered > 0 {
		latency = a.stream.answered // a long stream is not a slow one
	}
	a.report(policy.Healthy, latency, c.now)
	switch {
	case c.paid:
		c.bank.Refund() // a retry that works is free
		c.paid = false
	case a == &c.first:
		c.channel.bank.Deposit()
	}
	if c.hedges {
		c.channel.hedges.bank.Deposit()
	}
	if l := c.latencies(); l != nil {
		l.add(ran, c.now)
	}
	if c.key != nil && c.class == policy.Keyed {
		c.checkPromise(a)
	}
	if a.span != nil {
		if status := a.said(MetadataStatus); status != "" {
			a.span.SetAttributes(attribute.String("belay.idempotency.status", status))
		}
	}
	a.end(codes.OK, "")
	if c.client.config.observer != nil {
		c.client.config.observe(c.ctx, Event{
			Kind: EventAttempt, Method: c.method.full, Attempt: int(c.made), Duration: ran, Sent: true,
		})
	}
}

// settle pays, or does not, for the retry that has just ended without success.
// Never sent, or answered by a server that works: free. Failed: spent.
func (c *call) settle(d policy.Decision, notSent bool) {
	if !c.paid {
		return
	}
	c.paid = false
	if notSent || d.Outcome == policy.OutcomeInFlight || d.Outcome == policy.OutcomeFinal && d.Health == policy.Healthy {
		c.bank.Refund()
		return
	}
	c.bank.Spend()
}

// returnUnused gives back what a retry that will not be made was to cost.
func (c *call) returnUnused() {
	if c.paid {
		c.paid = false
		c.bank.Refund()
	}
}

// next carries out a decision: it returns nil when another attempt is to be
// made now, else the error of the call.
func (c *call) next(d policy.Decision) error {
	if d.Outcome == policy.OutcomeStopAsked {
		spanEvent(c.span, "pushback", attribute.Bool("belay.pushback.stop", true))
	}
	if !d.Retry {
		return c.stopped(d.Stop, nil)
	}
	// Paid before the wait: retries that wait in backoff count, or all who
	// passed the check while asleep would come back together.
	if !d.Free {
		permit, ok := c.channel.bank.Withdraw()
		if !ok {
			spanEvent(c.span, "budget refused")
			return c.stopped(BudgetSpent, nil)
		}
		c.bank, c.paid = permit, true
	}
	c.delay = d.Delay
	kind, name := EventBackoff, "backoff"
	if d.Poll {
		kind, name = EventPoll, "poll"
	}
	spanEvent(c.span, name, attribute.Float64("belay.retry.delay", d.Delay.Seconds()))
	c.client.config.observe(c.ctx, Event{Kind: kind, Method: c.method.full, Attempt: int(c.made), Delay: d.Delay})
	if err := c.pause(d); err != nil {
		c.returnUnused()
		return err
	}
	return nil
}

// pause waits out the delay and, where nothing could be sent, for the channel
// to connect.
func (c *call) pause(d policy.Decision) error {
	if d.Delay > 0 {
		timer := time.NewTimer(d.Delay)
		select {
		case <-timer.C:
		case <-c.ctx.Done():
			timer.Stop()
		}
	}
	if d.Connect && c.ctx.Err() == nil {
		grace := c.channel.grace.notSent(c.channel.clock.at(time.Now()), c.rules.ConnectGrace, false)
		c.channel.grace.wait(c.ctx, c.cc, min(grace, c.rules.AttemptTimeout))
	}
	c.now = time.Now()
	if err := c.ctx.Err(); err != nil {
		return c.gone(err)
	}
	if left, has := c.left(); has && (left < c.rules.MinAttempt || c.hopeless(left)) {
		return c.stopped(DeadlineTooShort, nil) // timers and connections may be late
	}
	return nil
}

// stopped ends a call with the result of its last attempt. A single attempt on
// which nothing was withheld keeps its own error.
func (c *call) stopped(stop StopReason, cause error) error {
	if c.last != nil {
		c.user.deliver(c.last)
	}
	if c.total == 1 && (stop == Final || stop == CallerGone || stop == LocalRefusal || stop == Disabled || stop == Committed) {
		c.finish(stop, statusOf(c.lastErr), int(c.total))
		return c.lastErr
	}
	causes := []error{c.lastErr}
	if cause != nil {
		causes = append(causes, cause)
	}
	if stop == DeadlineTooShort {
		// The code stays the server's; that it was the deadline which left no
		// room for another attempt must show as well.
		causes = append(causes, context.DeadlineExceeded)
	}
	if stop == CallerGone {
		switch err := c.ctx.Err(); {
		case err != nil:
			causes = append(causes, err)
		case c.outOfTime || c.ended() == policy.CallExpired:
			causes = append(causes, context.DeadlineExceeded)
		}
		// What the server said before is the reason that the caller is still
		// looking for.
		if n := len(c.attempts); n > 1 {
			causes = append(causes, c.attempts[n-2].Err)
		}
	}
	return c.callError(stop, statusOf(c.lastErr), causes)
}

// gone ends a call whose context ended between two attempts. The status is the
// context's, so no attempt decides and nothing of one is published.
func (c *call) gone(err error) error {
	c.last = nil
	return c.callError(CallerGone, statusOfContext(c.ctx), []error{err, c.lastErr})
}

// refuse ends a call before its first attempt.
func (c *call) refuse(stop StopReason, code codes.Code, message string, cause error) error {
	return c.fail(stop, status.New(code, message), cause)
}

func (c *call) fail(stop StopReason, st *status.Status, cause error) error {
	return c.callError(stop, st, []error{cause})
}

func (c *call) callError(stop StopReason, st *status.Status, causes []error) error {
	c.finish(stop, st, int(c.total))
	e := &CallError{
		method: c.method.full, stop: stop, executed: c.executed, total: int(c.total), status: st, causes: causes,
	}
	if c.failed != nil {
		e.attempts = c.attempts
	}
	return e
}

// ranOut reports whether the call ended for want of time. One that was refused
// before its first attempt did; one whose next retry does not fit in what is left
// failed of what its last attempt failed of.
func (c *call) ranOut(stop StopReason) bool {
	switch stop {
	case NotStopped:
		return false
	case DeadlineTooShort:
		return c.total == 0 || c.outOfTime
	case CallerGone:
		return c.outOfTime || c.ended() == policy.CallExpired
	default:
		return c.outOfTime
	}
}

// finish is the last thing that happens in a call, however it ended.
// A nil status is OK.
func (c *call) finish(stop StopReason, st *status.Status, attempts int) {
	c.ledger.record(c.method.full, stop, c.ranOut(stop) && c.ledger.inherited(c.ctx))
	if c.client.config.dryRun {
		c.client.dry.call(c.now, st != nil)
	}
	if c.span != nil {
		more := []attribute.KeyValue{attribute.Int("belay.attempts", attempts)}
		if stop != NotStopped {
			more = append(more, attribute.String("belay.stop", stop.String()))
		}
		endSpan(c.span, st.Code(), st.Message(), more...)
	}
	if c.client.config.observer != nil {
		c.client.config.observe(c.ctx, Event{
			Kind: EventCall, Method: c.method.full, Attempt: int(c.made), Code: st.Code(), Stop: stop, Duration: c.now.Sub(c.first.start),
		})
	}
}

// abandon is for a panic of an inner interceptor, which goes on its way: what
// the call holds is given back. A panic says nothing about the server.
func (c *call) abandon(a *attempt) {
	a.report(policy.Neutral, 0, time.Now())
	if c.paid {
		c.paid = false
		c.bank.Spend()
	}
	a.end(codes.Internal, "panic")
	endSpan(c.span, codes.Internal, "panic")
}
