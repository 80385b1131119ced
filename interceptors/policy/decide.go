package policy

import (
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
)

// StopReason says what ended a call that did not succeed. It is a closed set.
type StopReason uint8

const (
	// NotStopped is the zero value: the call goes on, or succeeded.
	NotStopped StopReason = iota

	// Final: the answer says that asking again will not help.
	Final

	// Exhausted: MaxAttempts were made.
	Exhausted

	// BudgetSpent: the retry bank had nothing left to pay with.
	BudgetSpent

	// DeadlineTooShort: what is left of the deadline would not leave MinAttempt
	// after the wait.
	DeadlineTooShort

	// BreakerOpen: the circuit breaker refused.
	BreakerOpen

	// Pushback: the server asked for no more attempts, or for a longer wait
	// than a call may make.
	Pushback

	// NotDeclared: the failure was transient, but the call may have been
	// executed and nothing declares that it may be repeated.
	NotDeclared

	// CallerGone: the caller cancelled, or its deadline passed.
	CallerGone

	// Unreachable: nothing was sent, and the channel did not connect within
	// ConnectGrace.
	Unreachable

	// LocalRefusal: this side refused, before anything was sent or on what came
	// back: a bad option, a size limit.
	LocalRefusal

	// Committed: part of the answer was already delivered to the application.
	Committed

	// Disabled: retries are switched off, by NoRetry, Client.Disable or
	// MaxAttempts 1. Layers above may retry: this one did not.
	Disabled
)

var stopNames = [...]string{
	"", "final", "exhausted", "budget_spent", "deadline_too_short", "breaker_open", "pushback",
	"not_declared", "caller_gone", "unreachable", "local_refusal", "committed", "disabled",
}

// String returns a short name, stable, as metrics and spans carry it.
func (r StopReason) String() string {
	if int(r) < len(stopNames) {
		return stopNames[r]
	}
	return fmt.Sprintf("stop(%d)", uint8(r))
}

// Spent reports whether the reason means that retries were made, or were
// rightly withheld, at this layer, so that no layer above should start its own.
func (r StopReason) Spent() bool {
	return r == Exhausted || r == BudgetSpent || r == BreakerOpen || r == Pushback
}

// Outcome is what an attempt's end means, before anything is decided.
type Outcome uint8

const (
	// OutcomeOK is success.
	OutcomeOK Outcome = iota
	// OutcomeFinal: asking again will not help.
	OutcomeFinal
	// OutcomeTransient: it may work the next time.
	OutcomeTransient
	// OutcomeAttemptTimeout: the attempt's own time ran out while the call's had not.
	OutcomeAttemptTimeout
	// OutcomeInFlight: another execution with the same key is under way.
	OutcomeInFlight
	// OutcomeCallerGone: the call's own context ended.
	OutcomeCallerGone
	// OutcomeLocal: this side refused.
	OutcomeLocal
	// OutcomeStopAsked: the server asked for no more attempts.
	OutcomeStopAsked
)

var outcomeNames = [...]string{
	"ok", "final", "transient", "attempt_timeout", "in_flight", "caller_gone", "local", "stop_asked",
}

// String returns a short stable name.
func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// Health is what an attempt says about the server, for a circuit breaker.
type Health uint8

const (
	// Neutral says nothing about the server.
	Neutral Health = iota
	// Healthy: the server works.
	Healthy
	// Unhealthy: the server, or the way to it, does not work.
	Unhealthy
)

// CallEnd says whether, and how, the context of the whole call ended.
type CallEnd uint8

const (
	// CallLives: the call's context is not done.
	CallLives CallEnd = iota
	// CallCancelled: the caller cancelled.
	CallCancelled
	// CallExpired: the call's deadline passed.
	CallExpired
)

// Asked is what the server asked for about the next attempt.
type Asked struct {
	// Stop: a negative pushback, one that is not a number, or more than one
	// value (gRFC A6).
	Stop bool

	// Given tells that Delay was asked for, by pushback or RetryInfo, however
	// short it is.
	Given bool

	// Delay is the longer of pushback and RetryInfo, never negative.
	Delay time.Duration
}

// maxAskedDelay is the longest wait a server can ask for that a call will make.
// A server that asks for more says "come back later", and a goroutine parked
// for hours is no way to do that. Documented at Decide.
const maxAskedDelay = 5 * time.Minute

// hungAfter is how long a sent attempt must have run for the call's own
// deadline, when it passes, to say something about the server.
const hungAfter = 100 * time.Millisecond

// inFlightGap is the least wait between two questions about a running execution.
const inFlightGap = 50 * time.Millisecond

// Rules is a Policy in the form Decide reads: complete, with its code list as
// sets. [Compile] makes it.
type Rules struct {
	Policy

	transient codeSet // transient as such
	hinted    codeSet // transient when the server asked for a delay
}

// Compile completes p with [Default] and returns it in the form Decide reads.
func Compile(p Policy) Rules {
	r := Rules{Policy: p.Over(Default()).Clone()}
	if r.Codes == nil {
		r.Codes = []codes.Code{codes.Unavailable}
		r.transient = setOf(r.Codes)
		r.hinted = setOf([]codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Aborted})
		return r
	}
	r.hinted = setOf(r.Codes)
	r.transient = r.hinted &^ setOf([]codes.Code{codes.ResourceExhausted})
	return r
}

// Situation is everything that the verdict about one finished attempt depends
// on. It holds facts, with no judgement in them.
type Situation struct {
	// Rules are those of this call.
	Rules *Rules

	// Class is the idempotency that may be relied on for this call. Keyed means
	// that this call carries a key.
	Class Idempotency

	// OK: the attempt returned no error.
	OK bool

	// Code is the status code of the error.
	Code codes.Code

	// Call says whether the call's own context ended.
	Call CallEnd

	// AttemptExpired: the attempt's own context passed its deadline.
	AttemptExpired bool

	// AttemptTimeout is the time this attempt was given by AttemptTimeout, 0 for
	// none, and AttemptLeft what it had left of it when it ended.
	AttemptTimeout, AttemptLeft time.Duration

	// Ran is how long the attempt took.
	Ran time.Duration

	// NotSent: it is certain that no stream was ever made for the attempt.
	NotSent bool

	// NotExecuted: the server that answered says so, in its trailer.
	NotExecuted bool

	// InFlight: the server that answered says, in its trailer, that another
	// execution with this key is under way.
	InFlight bool

	// OwnRefusal: the answer is one of Belay's own dedupe refusals, which say
	// nothing about the health of the server.
	OwnRefusal bool

	// DeadlineTooShort: the server that answered says, in its trailer, that the
	// deadline it was given is what ended the call.
	DeadlineTooShort bool

	// Local: this side made the error.
	Local bool

	// Asked is what the server asked for.
	Asked Asked

	// Committed: part of the answer was delivered to the application.
	Committed bool

	// Off: retries are switched off for this call.
	Off bool

	// Attempts is the number of attempts made, this one included.
	Attempts int

	// HasDeadline and Left tell what is left of the call.
	HasDeadline bool
	Left        time.Duration

	// Backoff is the delay drawn for the next retry.
	Backoff time.Duration

	// BreakerRefuses: the breaker would not admit another attempt now.
	BreakerRefuses bool

	// GraceLeft is what is left of ConnectGrace; it matters when NotSent.
	GraceLeft time.Duration
}

// Decision is the verdict on a Situation.
type Decision struct {
	// Outcome is what the attempt's end means.
	Outcome Outcome

	// Health is what it tells the breaker.
	Health Health

	// Retry tells that another attempt may be made, after Delay.
	Retry bool

	// Delay is the wait before it.
	Delay time.Duration

	// Free: the retry costs the bank nothing, because nothing was executed or
	// asked of the server.
	Free bool

	// Poll: the next attempt only asks again about a running execution. It does
	// not count as an attempt.
	Poll bool

	// Connect: the next attempt may wait for the channel to connect.
	Connect bool

	// Stop says why there is no retry. NotStopped on success.
	Stop StopReason
}

// Decide says what an attempt's end means and what is done next. It is pure.
//
// The evidence, in this order: success; the call's own context; local
// refusals; what the server asked for; whose time ran out; the code. Then the
// gates, in this order: the declared idempotency, the attempts, the connection
// grace, the deadline, the breaker. The text and details of a message are
// never evidence, except that RetryInfo can ask for a wait: a Go handler that
// returns a downstream error forwards them, so they may be about another hop.
//
// A server that asks for a wait of more than five minutes is taken to ask for
// no retry within this call.
func Decide(s Situation) Decision {
	d := classify(s)
	if d.Outcome == OutcomeOK || d.Stop != NotStopped {
		return d
	}
	return gate(s, d)
}

// classify fills Outcome and Health, and Stop where the class alone is final.
func classify(s Situation) Decision {
	switch {
	case s.OK:
		return Decision{Outcome: OutcomeOK, Health: Healthy}
	case s.Call != CallLives:
		health := Neutral
		if s.Call == CallExpired && !s.NotSent && !s.Local && s.Ran >= hungAfter {
			health = Unhealthy // a hung backend must be able to open the breaker
		}
		return Decision{Outcome: OutcomeCallerGone, Health: health, Stop: CallerGone}
	case s.Local:
		return Decision{Outcome: OutcomeLocal, Health: Neutral, Stop: LocalRefusal}
	}

	health := HealthOf(s.Code)
	switch {
	case s.OwnRefusal, s.NotSent:
		// What was not sent says nothing about the server. A channel that cannot
		// connect fails fast by itself, and comes back by itself, which a breaker
		// that had opened meanwhile would only delay.
		health = Neutral
	case s.HasDeadline && s.DeadlineTooShort && s.Asked.Stop && s.AttemptTimeout == 0 && s.Ran < hungAfter:
		health = Neutral // refused before any work; see endedAtTheCall
	}
	switch {
	case s.endedAtTheCall():
		health = Neutral
		if s.Ran >= hungAfter {
			health = Unhealthy // as if the deadline had passed here
		}
		return Decision{Outcome: OutcomeCallerGone, Health: health, Stop: CallerGone}
	case s.Asked.Stop:
		return Decision{Outcome: OutcomeStopAsked, Health: health, Stop: Pushback}
	case s.AttemptExpired, s.endedAtItsTimeout():
		if !s.OwnRefusal && !s.NotSent {
			health = Unhealthy // whatever the code: CANCELLED as such would be neutral
		}
		return Decision{Outcome: OutcomeAttemptTimeout, Health: health}
	case s.InFlight:
		return Decision{Outcome: OutcomeInFlight, Health: Neutral}
	case s.transient():
		return Decision{Outcome: OutcomeTransient, Health: health}
	}
	return Decision{Outcome: OutcomeFinal, Health: health, Stop: Final}
}

// transient reports whether the code may be asked again. Attempts that the
// server says it did not execute still need a code that may be transient:
// "not executed" is also what a refused key says.
func (s Situation) transient() bool {
	return s.Rules.transient.has(s.Code) || s.Asked.Given && s.Rules.hinted.has(s.Code)
}

// endedAtItsTimeout recognises a peer that answered for the attempt's timeout
// just before it passed here: a server keeps a reserve, so it is the first to
// notice, and reports DEADLINE_EXCEEDED or CANCELLED.
func (s Situation) endedAtItsTimeout() bool {
	if s.AttemptTimeout == 0 || s.Code != codes.DeadlineExceeded && s.Code != codes.Canceled {
		return false
	}
	return s.AttemptLeft <= max(10*time.Millisecond, s.AttemptTimeout/10)
}

// endedAtTheCall recognises a peer that answered for the call's own deadline:
// just before it passed here, or any time before if it says so, since each hop
// below keeps a reserve and refuses what has no chance. That a caller had little
// time is not the server's ill health.
func (s Situation) endedAtTheCall() bool {
	if !s.HasDeadline || s.AttemptTimeout != 0 || s.OwnRefusal || s.Code != codes.DeadlineExceeded && s.Code != codes.Canceled {
		return false
	}
	return s.DeadlineTooShort && !s.Asked.Stop || s.Left <= max(10*time.Millisecond, s.Ran/10+s.Left/10) // a tenth of what the attempt had
}

// gate decides whether a transient outcome is tried again.
func gate(s Situation, d Decision) Decision {
	d.Poll = d.Outcome == OutcomeInFlight
	d.Free = s.NotSent || d.Poll
	d.Connect = s.NotSent
	d.Delay = max(s.Backoff, s.Asked.Delay)
	if d.Poll {
		d.Delay = max(s.Asked.Delay, inFlightGap)
	}

	switch {
	case s.Off:
		d.Stop = Disabled
	case s.Committed:
		d.Stop = Committed
	case !s.Class.Repeatable() && !s.NotSent && !s.NotExecuted:
		d.Stop = NotDeclared
	case s.Attempts >= s.Rules.MaxAttempts && !d.Poll:
		d.Stop = Exhausted
		if s.Rules.MaxAttempts == 1 {
			d.Stop = Disabled // this layer leaves retrying to others
		}
	case s.NotSent && s.GraceLeft <= 0 && d.Outcome != OutcomeAttemptTimeout:
		d.Stop = Unreachable
	case s.Asked.Delay > maxAskedDelay:
		d.Stop = Pushback
	case s.HasDeadline && d.Delay > max(s.Left, 0)-s.Rules.MinAttempt:
		d.Stop = DeadlineTooShort
		if s.Asked.Delay > s.Backoff && !d.Poll {
			d.Stop = Pushback // the server's wish is what does not fit
		}
	case s.BreakerRefuses && !d.Poll:
		d.Stop = BreakerOpen
	default:
		d.Retry = true
	}
	return d
}

// HealthOf is the table by which a status code from a server is reported to a
// circuit breaker:
//
//	OK, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED,
//	UNAUTHENTICATED, FAILED_PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED, ABORTED
//	                    Healthy: the server works
//	CANCELLED           Neutral: somebody changed their mind
//	everything else     Unhealthy
//
// It is about answers. An attempt that was never sent, one of Belay's own
// dedupe refusals, and a peer that notices the end of the call's own deadline
// within the call's first 100 ms are neutral, whatever their code: one that
// answers just before the deadline, or says that it is what ended the call.
func HealthOf(c codes.Code) Health {
	switch {
	case c == codes.OK || c == codes.Aborted || IsVerdict(c):
		return Healthy
	case c == codes.Canceled:
		return Neutral
	default:
		return Unhealthy
	}
}
