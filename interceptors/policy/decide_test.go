package policy_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors/policy"
)

// fact is one thing that is known about an attempt.
type fact func(*policy.Situation)

// failed is a first attempt at an idempotent method that was sent, ran for
// 10 ms and ended with a code, under the default policy and without a deadline.
// The backoff drawn for the next is 50 ms.
func failed(code codes.Code, facts ...fact) policy.Situation {
	rules := policy.Compile(policy.Policy{})
	s := policy.Situation{
		Rules:     &rules,
		Class:     policy.Idempotent,
		Code:      code,
		Ran:       10 * ms,
		Attempts:  1,
		Backoff:   50 * ms,
		GraceLeft: time.Second,
	}
	for _, f := range facts {
		f(&s)
	}
	return s
}

func under(p policy.Policy) fact {
	rules := policy.Compile(p)
	return func(s *policy.Situation) { s.Rules = &rules }
}

func class(c policy.Idempotency) fact { return func(s *policy.Situation) { s.Class = c } }
func ok(s *policy.Situation)          { s.OK = true }
func cancelled(s *policy.Situation)   { s.Call = policy.CallCancelled }
func expired(s *policy.Situation)     { s.Call = policy.CallExpired }
func ran(d time.Duration) fact        { return func(s *policy.Situation) { s.Ran = d } }
func notSent(s *policy.Situation)     { s.NotSent = true }
func notExecuted(s *policy.Situation) { s.NotExecuted = true }
func inFlight(s *policy.Situation)    { s.InFlight = true }
func ownRefusal(s *policy.Situation)  { s.OwnRefusal = true }
func tooShort(s *policy.Situation)    { s.DeadlineTooShort = true }
func local(s *policy.Situation)       { s.Local = true }
func stopAsked(s *policy.Situation)   { s.Asked = policy.Asked{Stop: true} }
func asked(d time.Duration) fact {
	return func(s *policy.Situation) { s.Asked = policy.Asked{Given: true, Delay: d} }
}
func ownTimePassed(s *policy.Situation) { s.AttemptExpired = true }
func ownTime(given, left time.Duration) fact {
	return func(s *policy.Situation) { s.AttemptTimeout, s.AttemptLeft = given, left }
}
func committed(s *policy.Situation) { s.Committed = true }
func off(s *policy.Situation)       { s.Off = true }
func made(attempts int) fact        { return func(s *policy.Situation) { s.Attempts = attempts } }

func left(d time.Duration) fact          { return func(s *policy.Situation) { s.HasDeadline, s.Left = true, d } }
func backoff(d time.Duration) fact       { return func(s *policy.Situation) { s.Backoff = d } }
func breakerRefuses(s *policy.Situation) { s.BreakerRefuses = true }
func grace(d time.Duration) fact         { return func(s *policy.Situation) { s.GraceLeft = d } }

var healthNames = map[policy.Health]string{
	policy.Healthy: "healthy", policy.Neutral: "neutral", policy.Unhealthy: "unhealthy",
}

// verdict writes a decision as the table below does. What a decision says about
// the next attempt is part of it only if there is one.
func verdict(d policy.Decision) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v, %s", d.Outcome, healthNames[d.Health])
	switch {
	case d.Retry && d.Stop != policy.NotStopped:
		fmt.Fprintf(&b, ": BOTH retry and stop %v", d.Stop)
	case d.Stop != policy.NotStopped:
		fmt.Fprintf(&b, ": stop, %v", d.Stop)
	case d.Retry:
		fmt.Fprintf(&b, ": retry after %v", d.Delay)
		for _, flag := range []struct {
			set  bool
			name string
		}{{d.Free, "free"}, {d.Poll, "poll"}, {d.Connect, "connect"}} {
			if flag.set {
				b.WriteString(", " + flag.name)
			}
		}
	}
	return b.String()
}

// The rules of how an attempt is judged, each with the cases on both sides of it.
func TestDecide(t *testing.T) {
	const (
		retry    = "transient, unhealthy: retry after 50ms"
		timedOut = "attempt_timeout, unhealthy: retry after 50ms"
	)
	deadline, cancelledCode, unavailable := codes.DeadlineExceeded, codes.Canceled, codes.Unavailable

	for _, test := range []struct {
		name string
		s    policy.Situation
		want string
	}{
		// "ok: err == nil." It comes before all that may have ended meanwhile.
		{"ok", failed(codes.OK, ok), "ok, healthy"},
		{"ok, and the caller left", failed(codes.OK, ok, cancelled), "ok, healthy"},
		{"ok, with a stop asked", failed(codes.OK, ok, stopAsked, breakerRefuses, off), "ok, healthy"},

		// "caller gone: the call's ctx is done. Cancel, or deadline before
		// anything was sent: neutral to the breaker."
		{"cancelled", failed(cancelledCode, cancelled), "caller_gone, neutral: stop, caller_gone"},
		{"cancelled after long", failed(cancelledCode, cancelled, ran(time.Hour)), "caller_gone, neutral: stop, caller_gone"},
		{"cancelled as the server failed", failed(unavailable, cancelled), "caller_gone, neutral: stop, caller_gone"},
		{"expired, not sent", failed(deadline, expired, notSent, ran(time.Hour)), "caller_gone, neutral: stop, caller_gone"},
		// The peer's reserve makes it the first to notice the call's own deadline:
		// that a caller had little time is not the server's ill health.
		{"the peer was first, soon", failed(deadline, left(9*ms), ran(20*ms)), "caller_gone, neutral: stop, caller_gone"},
		{"the peer was first, of a hung call", failed(deadline, left(50*ms), ran(time.Second)), "caller_gone, unhealthy: stop, caller_gone"},
		{"the peer says so, soon", failed(deadline, left(time.Second), ran(20*ms), tooShort), "caller_gone, neutral: stop, caller_gone"},
		{"the peer says so, of a hung call", failed(deadline, left(time.Second), ran(100*ms), tooShort), "caller_gone, unhealthy: stop, caller_gone"},
		{"the peer says so, and never again", failed(deadline, left(time.Second), ran(20*ms), tooShort, stopAsked), "stop_asked, neutral: stop, pushback"},
		{"the peer says so, of an attempt's time", failed(deadline, left(time.Second), ran(20*ms), tooShort, ownTime(time.Second, 500*ms)), "final, unhealthy: stop, final"},
		{"the peer's own, long before", failed(deadline, left(time.Second), ran(20*ms)), "final, unhealthy: stop, final"},
		{"expired, refused here", failed(deadline, expired, local, ran(time.Hour)), "caller_gone, neutral: stop, caller_gone"},

		// "Deadline hit on a SENT attempt that ran ≥ 100 ms: never retried,
		// breaker failure (a hung backend must open it)."
		{"expired on a hung server", failed(deadline, expired, ran(100*ms)), "caller_gone, unhealthy: stop, caller_gone"},
		{"expired on an attempt just begun", failed(deadline, expired, ran(100*ms-1)), "caller_gone, neutral: stop, caller_gone"},

		// "local refusal: our own errors, size limits, marshal errors: final, neutral."
		{"size limit here", failed(codes.ResourceExhausted, local, asked(ms)), "local, neutral: stop, local_refusal"},
		{"marshal error", failed(codes.Internal, local, notSent), "local, neutral: stop, local_refusal"},
		{"local refusal, any code", failed(unavailable, local, stopAsked, inFlight), "local, neutral: stop, local_refusal"},

		// "stop asked: pushback trailer negative, not a number, or more than one
		// value: final."
		{"stop asked", failed(unavailable, stopAsked), "stop_asked, unhealthy: stop, pushback"},
		{"stop asked, not executed", failed(unavailable, stopAsked, notExecuted), "stop_asked, unhealthy: stop, pushback"},
		{"stop asked on a verdict", failed(codes.NotFound, stopAsked), "stop_asked, healthy: stop, pushback"},
		{"stop asked as the time ran out", failed(deadline, stopAsked, ownTimePassed), "stop_asked, unhealthy: stop, pushback"},
		{"stop asked by a dedupe refusal", failed(unavailable, stopAsked, ownRefusal), "stop_asked, neutral: stop, pushback"},

		// "attempt timeout: only the attempt's ctx is done": transient.
		{"own time passed", failed(deadline, ownTimePassed), timedOut},
		{"own time passed, no code is transient", failed(deadline, ownTimePassed, under(policy.Policy{Codes: []codes.Code{}})), timedOut},
		{"own time passed, server made it CANCELLED", failed(cancelledCode, ownTimePassed), timedOut},

		// "OR the peer's DEADLINE_EXCEEDED/CANCELLED arrives while the call's ctx
		// lives and the attempt has ≤ max(10 ms, 10 %) of its own time left."
		{"peer's deadline, 10% left", failed(deadline, ownTime(time.Second, 100*ms)), timedOut},
		{"peer's cancel, 10% left", failed(cancelledCode, ownTime(time.Second, 100*ms)), timedOut},
		{"peer's deadline, more left", failed(deadline, ownTime(time.Second, 100*ms+1)), "final, unhealthy: stop, final"},
		{"peer's cancel, more left", failed(cancelledCode, ownTime(time.Second, 100*ms+1)), "final, neutral: stop, final"},
		{"peer's deadline, 10 ms left of 20", failed(deadline, ownTime(20*ms, 10*ms)), timedOut},
		{"peer's deadline, more left of 20", failed(deadline, ownTime(20*ms, 10*ms+1)), "final, unhealthy: stop, final"},
		{"peer's deadline, no attempt timeout", failed(deadline), "final, unhealthy: stop, final"},
		{"another code near the timeout", failed(codes.Internal, ownTime(time.Second, 0)), "final, unhealthy: stop, final"},

		// "delay asked: pushback ≥ 0 or RetryInfo on a code that may be
		// transient: transient, delay ≥ asked".
		{"longer wait asked", failed(unavailable, asked(time.Second)), "transient, unhealthy: retry after 1s"},
		{"shorter wait asked", failed(unavailable, asked(ms)), retry},
		{"no wait asked, but retry", failed(codes.ResourceExhausted, asked(0)), retry},
		{"quota with a hint", failed(codes.ResourceExhausted, asked(100*ms)), "transient, unhealthy: retry after 100ms"},
		{"quota without a hint", failed(codes.ResourceExhausted), "final, unhealthy: stop, final"},
		{"conflict with a hint", failed(codes.Aborted, asked(100*ms)), "transient, healthy: retry after 100ms"},
		{"conflict without a hint", failed(codes.Aborted), "final, healthy: stop, final"},
		{"a hint on a verdict", failed(codes.InvalidArgument, asked(100*ms)), "final, healthy: stop, final"},
		{"a hint on INTERNAL", failed(codes.Internal, asked(100*ms)), "final, unhealthy: stop, final"},

		// "longer than the time left → stop now."
		{"longer wait asked than is left", failed(unavailable, asked(time.Second), left(time.Second)), "transient, unhealthy: stop, pushback"},
		{"longer wait asked than any call makes", failed(unavailable, asked(5*time.Minute+1)), "transient, unhealthy: stop, pushback"},
		{"the longest wait a call makes", failed(unavailable, asked(5*time.Minute)), "transient, unhealthy: retry after 5m0s"},

		// "RetryInfo never lifts the class gate."
		{"a hint for an undeclared method", failed(unavailable, asked(ms), class(policy.Undeclared)), "transient, unhealthy: stop, not_declared"},

		// "transient: code in the policy's set."
		{"UNAVAILABLE", failed(unavailable), retry},
		{"a configured code", failed(codes.Internal, under(policy.Policy{Codes: []codes.Code{codes.Internal}})), retry},
		{"UNAVAILABLE when not in the list", failed(unavailable, under(policy.Policy{Codes: []codes.Code{codes.Internal}})), "final, unhealthy: stop, final"},
		{"UNAVAILABLE when no code is", failed(unavailable, asked(ms), under(policy.Policy{Codes: []codes.Code{}})), "final, unhealthy: stop, final"},

		// "final: the rest, unknown codes, a non-nil error whose status says OK."
		{"INTERNAL", failed(codes.Internal), "final, unhealthy: stop, final"},
		{"a code that gRPC does not have", failed(17), "final, unhealthy: stop, final"},
		{"a huge code", failed(1<<32 - 1), "final, unhealthy: stop, final"},
		{"an error that says OK", failed(codes.OK), "final, healthy: stop, final"},
		{"a verdict that was not executed", failed(codes.FailedPrecondition, notExecuted), "final, healthy: stop, final"},

		// "class gate on transient: passes for IDEMPOTENT, NO_SIDE_EFFECTS and
		// keyed methods"
		{"keyed", failed(unavailable, class(policy.Keyed)), retry},
		{"no side effects", failed(unavailable, class(policy.NoSideEffects)), retry},
		{"nothing known", failed(unavailable, class(policy.Unspecified)), "transient, unhealthy: stop, not_declared"},
		{"undeclared", failed(unavailable, class(policy.Undeclared)), "transient, unhealthy: stop, not_declared"},
		{"undeclared, timed out", failed(deadline, class(policy.Undeclared), ownTimePassed), "attempt_timeout, unhealthy: stop, not_declared"},

		// "for undeclared ones only if not sent … or not executed".
		{"undeclared, not sent", failed(unavailable, class(policy.Undeclared), notSent), "transient, neutral: retry after 50ms, free, connect"},
		{"undeclared, not executed", failed(unavailable, class(policy.Undeclared), notExecuted), retry},

		// "Waiting on the dedupe's IN_FLIGHT answer costs nothing and is not an
		// attempt (≥ 50 ms apart, until MinAttempt)."
		{"in flight", failed(codes.Aborted, inFlight, ownRefusal, backoff(0)), "in_flight, neutral: retry after 50ms, free, poll"},
		{"in flight, backoff is for failures", failed(codes.Aborted, inFlight, backoff(time.Second)), "in_flight, neutral: retry after 50ms, free, poll"},
		{"in flight, wait asked", failed(codes.Aborted, inFlight, asked(80*ms)), "in_flight, neutral: retry after 80ms, free, poll"},
		{"in flight, no attempts left", failed(codes.Aborted, inFlight, made(99)), "in_flight, neutral: retry after 50ms, free, poll"},
		{"in flight, breaker open", failed(codes.Aborted, inFlight, breakerRefuses), "in_flight, neutral: retry after 50ms, free, poll"},
		{"in flight, leaves MinAttempt", failed(codes.Aborted, inFlight, left(52*ms)), "in_flight, neutral: retry after 50ms, free, poll"},
		{"in flight, leaves less", failed(codes.Aborted, inFlight, left(52*ms-1)), "in_flight, neutral: stop, deadline_too_short"},
		{"in flight, of an undeclared method", failed(codes.Aborted, inFlight, class(policy.Undeclared)), "in_flight, neutral: stop, not_declared"},
		{"in flight, retries off", failed(codes.Aborted, inFlight, off), "in_flight, neutral: stop, disabled"},

		// "A not-sent retry waits for the connection (wait-for-ready) at most
		// ConnectGrace …; after that not-sent attempts fail at once. It costs
		// nothing from the bank".
		{"not sent", failed(unavailable, notSent), "transient, neutral: retry after 50ms, free, connect"},
		{"not sent, the last of the grace", failed(unavailable, notSent, grace(1)), "transient, neutral: retry after 50ms, free, connect"},
		{"not sent, grace over", failed(unavailable, notSent, grace(0)), "transient, neutral: stop, unreachable"},
		{"not sent, grace long over", failed(unavailable, notSent, grace(-time.Hour)), "transient, neutral: stop, unreachable"},
		{"sent, grace over", failed(unavailable, grace(0)), retry},
		{"not sent, timed out as it waited", failed(deadline, notSent, ownTimePassed, grace(0)), "attempt_timeout, neutral: retry after 50ms, free, connect"},

		// "Belay's own dedupe refusals: neutral".
		{"dedupe: store down", failed(unavailable, ownRefusal, notExecuted, asked(ms)), "transient, neutral: retry after 50ms"},
		{"dedupe: refused as the time ran out", failed(deadline, ownRefusal, ownTime(time.Second, 0)), "attempt_timeout, neutral: retry after 50ms"},
		{"dedupe: key used otherwise", failed(codes.FailedPrecondition, ownRefusal), "final, neutral: stop, final"},

		// MaxAttempts: "first included".
		{"attempts left", failed(unavailable, made(3)), retry},
		{"no attempts left", failed(unavailable, made(4)), "transient, unhealthy: stop, exhausted"},
		{"one attempt allowed", failed(unavailable, under(policy.Policy{MaxAttempts: 1})), "transient, unhealthy: stop, disabled"},
		{"not sent attempts count", failed(unavailable, made(4), notSent), "transient, neutral: stop, exhausted"},

		// "would not leave MinAttempt → stop NOW with the last error".
		{"wait leaves MinAttempt", failed(unavailable, left(52*ms)), retry},
		{"wait leaves less", failed(unavailable, left(52*ms-1)), "transient, unhealthy: stop, deadline_too_short"},
		{"nothing left", failed(unavailable, left(0), backoff(0)), "transient, unhealthy: stop, deadline_too_short"},
		{"less than nothing left", failed(unavailable, left(-1<<63), backoff(0)), "transient, unhealthy: stop, deadline_too_short"},

		// "breaker no longer ready → stop with the last error".
		{"breaker open", failed(unavailable, breakerRefuses), "transient, unhealthy: stop, breaker_open"},
		{"breaker open, nothing sent", failed(unavailable, breakerRefuses, notSent), "transient, neutral: stop, breaker_open"},

		// "Commit when the APPLICATION has seen something": no retry after it.
		{"committed", failed(unavailable, committed), "transient, unhealthy: stop, committed"},
		{"committed, undeclared", failed(unavailable, committed, class(policy.Undeclared)), "transient, unhealthy: stop, committed"},

		// "kill switch: one attempt, nothing refused, still observed".
		{"off", failed(unavailable, off), "transient, unhealthy: stop, disabled"},
		{"off, not sent", failed(unavailable, off, notSent), "transient, neutral: stop, disabled"},
		{"off, but a final answer is one", failed(codes.NotFound, off), "final, healthy: stop, final"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := verdict(policy.Decide(test.s)); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func TestHealthOf(t *testing.T) {
	for code, want := range breakerTable {
		if got := policy.HealthOf(code); got != want {
			t.Errorf("HealthOf(%v) = %s, want %s", code, healthNames[got], healthNames[want])
		}
	}
	if len(breakerTable) != 17 {
		t.Errorf("the table has %d codes, want 17", len(breakerTable))
	}
	for _, code := range []codes.Code{17, 99, 1<<32 - 1} {
		if got := policy.HealthOf(code); got != policy.Unhealthy {
			t.Errorf("HealthOf(%d) = %s, want unhealthy", code, healthNames[got])
		}
	}
}

func TestIsVerdict(t *testing.T) {
	verdicts := map[codes.Code]bool{
		codes.InvalidArgument: true, codes.NotFound: true, codes.AlreadyExists: true, codes.PermissionDenied: true,
		codes.Unauthenticated: true, codes.FailedPrecondition: true, codes.OutOfRange: true, codes.Unimplemented: true,
	}
	for code := range codes.Code(40) {
		if got := policy.IsVerdict(code); got != verdicts[code] {
			t.Errorf("IsVerdict(%v) = %v, want %v", code, got, verdicts[code])
		}
	}
}

// "A call made under its ctx stopped as Exhausted, BudgetSpent, BreakerOpen or
// Pushback": only these tell the layer above not to start over.
func TestStopReason_Spent(t *testing.T) {
	spent := map[policy.StopReason]bool{
		policy.Exhausted: true, policy.BudgetSpent: true, policy.BreakerOpen: true, policy.Pushback: true,
	}
	for r := policy.NotStopped; r <= policy.Disabled; r++ {
		if got := r.Spent(); got != spent[r] {
			t.Errorf("%v.Spent() = %v, want %v", r, got, spent[r])
		}
	}
}

func TestDecide_allocations(t *testing.T) {
	s := failed(codes.Unavailable, left(time.Second))
	retries := 0
	n := testing.AllocsPerRun(100, func() {
		if policy.Decide(s).Retry {
			retries++
		}
	})
	if n != 0 {
		t.Errorf("Decide allocates %v times, want 0", n)
	}
	if retries == 0 {
		t.Error("Decide did not retry")
	}
}
