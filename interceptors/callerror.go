package interceptors

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors/policy"
)

// StopReason says what ended a call that did not succeed. The set is closed.
type StopReason = policy.StopReason

// The reasons, as package policy documents them.
const (
	NotStopped       = policy.NotStopped
	Final            = policy.Final
	Exhausted        = policy.Exhausted
	BudgetSpent      = policy.BudgetSpent
	DeadlineTooShort = policy.DeadlineTooShort
	BreakerOpen      = policy.BreakerOpen
	Pushback         = policy.Pushback
	NotDeclared      = policy.NotDeclared
	CallerGone       = policy.CallerGone
	Unreachable      = policy.Unreachable
	LocalRefusal     = policy.LocalRefusal
	Committed        = policy.Committed
	Disabled         = policy.Disabled
)

// Executed says whether the effect of a call may have happened.
type Executed uint8

const (
	// No: no handler ran.
	No Executed = iota
	// Maybe: it is not known. That is an answer, not a guess.
	Maybe
	// Yes: a server says that the effect happened.
	Yes
)

// String returns "no", "maybe" or "yes", as the trailer belay-executed has it.
func (e Executed) String() string {
	switch e {
	case No:
		return "no"
	case Yes:
		return "yes"
	default:
		return "maybe"
	}
}

// Origin says who made the answer to an attempt.
type Origin uint8

const (
	// OriginLocal: this process, before or after the wire.
	OriginLocal Origin = iota
	// OriginTransport: the connection; no status came from the other side.
	OriginTransport
	// OriginProxy: something in between that does not speak gRPC.
	OriginProxy
	// OriginPeer: a gRPC server.
	OriginPeer
)

// String returns a short stable name.
func (o Origin) String() string {
	return [...]string{"local", "transport", "proxy", "peer"}[min(o, OriginPeer)]
}

// Attempt is one finished attempt of a call.
type Attempt struct {
	// Code is the attempt's status code.
	Code codes.Code
	// Start is when it began, after Delay, the wait that preceded it.
	Start           time.Time
	Duration, Delay time.Duration
	// Sent is false only where it is certain that nothing was sent.
	Sent bool
	// Executed is what is known of the attempt's effect.
	Executed Executed
	// Origin says who made the answer.
	Origin Origin
	// Err is the attempt's error, as the transport returned it; nil for OK.
	Err error
}

// maxKeptAttempts bounds the list in a CallError. Waiting for an execution in
// flight asks many times; what matters is how it began and how it ended.
const maxKeptAttempts = 32

// CallError is the error of a call on which the suite did something: tried
// again, or withheld an attempt. Find it with [errors.As].
//
// Its status, by which status.Code and status.Convert see it, is that of the
// deciding attempt with its details intact; a caller that is gone is CANCELLED
// or DEADLINE_EXCEEDED. errors.Is and errors.As reach the deciding attempt's
// error, the context's error where it ended the call, and breaker.ErrOpen where
// the breaker did. A CallError is immutable.
type CallError struct {
	method   string
	stop     StopReason
	executed Executed
	attempts []Attempt
	total    int
	status   *status.Status
	causes   []error
}

// Attempts returns the attempts in order. Of more than 32, the first 16 and the
// last 16. Questions about an execution in flight are listed too.
func (e *CallError) Attempts() []Attempt { return append([]Attempt(nil), e.attempts...) }

// Stop returns what ended the call.
func (e *CallError) Stop() StopReason { return e.stop }

// Executed says whether the effect may have happened: the worst that is known
// over all attempts.
func (e *CallError) Executed() Executed { return e.executed }

// Method returns the full method, such as "/pkg.Service/Method".
func (e *CallError) Method() string { return e.method }

// GRPCStatus returns the deciding attempt's status.
func (e *CallError) GRPCStatus() *status.Status { return e.status }

// Unwrap returns the errors that ended the call, the deciding one first.
func (e *CallError) Unwrap() []error { return e.causes }

// Error begins with the status, as any gRPC error does.
func (e *CallError) Error() string {
	return fmt.Sprintf("rpc error: code = %s desc = %s (belay: %s after %d attempt(s), effect: %s)",
		e.status.Code(), e.status.Message(), e.stop, e.total, e.executed)
}

// statusOfContext is the status of a context's end, UNKNOWN if it has not ended.
func statusOfContext(ctx context.Context) *status.Status {
	return status.FromContextError(ctx.Err())
}

// asCallError finds a CallError in err's chain.
func asCallError(err error) (*CallError, bool) {
	var ce *CallError
	ok := errors.As(err, &ce)
	return ce, ok
}
