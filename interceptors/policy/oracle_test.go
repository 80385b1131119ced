package policy_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/interceptors/policy"
)

// breakerTable is what each code tells the circuit breaker.
var breakerTable = map[codes.Code]policy.Health{
	codes.OK:                 policy.Healthy,
	codes.Canceled:           policy.Neutral,
	codes.Unknown:            policy.Unhealthy,
	codes.InvalidArgument:    policy.Healthy,
	codes.DeadlineExceeded:   policy.Unhealthy,
	codes.NotFound:           policy.Healthy,
	codes.AlreadyExists:      policy.Healthy,
	codes.PermissionDenied:   policy.Healthy,
	codes.ResourceExhausted:  policy.Unhealthy,
	codes.FailedPrecondition: policy.Healthy,
	codes.Aborted:            policy.Healthy,
	codes.OutOfRange:         policy.Healthy,
	codes.Unimplemented:      policy.Healthy,
	codes.Internal:           policy.Unhealthy,
	codes.Unavailable:        policy.Unhealthy,
	codes.DataLoss:           policy.Unhealthy,
	codes.Unauthenticated:    policy.Healthy,
}

// setting is a policy beside what it means in the oracle's own terms.
type setting struct {
	name        string
	policy      policy.Policy
	rules       *policy.Rules
	always      []codes.Code // transient
	onlyHinted  []codes.Code // transient when the server asked for a delay
	maxAttempts int
	minAttempt  time.Duration
}

func settings() []setting {
	all := []setting{
		{
			name:        "defaults",
			always:      []codes.Code{codes.Unavailable},
			onlyHinted:  []codes.Code{codes.ResourceExhausted, codes.Aborted},
			maxAttempts: 4, minAttempt: 2 * ms,
		},
		{
			name:        "no code",
			policy:      policy.Policy{Codes: []codes.Code{}, MaxAttempts: 2},
			maxAttempts: 2, minAttempt: 2 * ms,
		},
		{
			name: "own codes",
			policy: policy.Policy{
				Codes:      []codes.Code{codes.ResourceExhausted, codes.Aborted, codes.Internal, codes.NotFound},
				MinAttempt: 30 * ms,
			},
			always:      []codes.Code{codes.Aborted, codes.Internal, codes.NotFound},
			onlyHinted:  []codes.Code{codes.ResourceExhausted},
			maxAttempts: 4, minAttempt: 30 * ms,
		},
		{
			name:        "one attempt",
			policy:      policy.Policy{MaxAttempts: 1},
			always:      []codes.Code{codes.Unavailable},
			onlyHinted:  []codes.Code{codes.ResourceExhausted, codes.Aborted},
			maxAttempts: 1, minAttempt: 2 * ms,
		},
	}
	for i := range all {
		rules := policy.Compile(all[i].policy)
		all[i].rules = &rules
	}
	return all
}

// oracle is the design once more, written as lists: of what ends a call by
// itself, and of objections to a retry. The first that holds counts.
func oracle(set setting, s policy.Situation) policy.Decision {
	health, known := breakerTable[s.Code]
	if !known {
		health = policy.Unhealthy
	}
	refusedInTime := s.HasDeadline && s.DeadlineTooShort && s.Asked.Stop && s.AttemptTimeout == 0 && s.Ran < 100*ms
	if s.OwnRefusal || s.NotSent || refusedInTime {
		health = policy.Neutral
	}
	outcome, health := oracleOutcome(set, s, health)

	end, ends := map[policy.Outcome]policy.StopReason{
		policy.OutcomeOK:         policy.NotStopped,
		policy.OutcomeCallerGone: policy.CallerGone,
		policy.OutcomeLocal:      policy.LocalRefusal,
		policy.OutcomeStopAsked:  policy.Pushback,
		policy.OutcomeFinal:      policy.Final,
	}[outcome]
	if ends {
		return policy.Decision{Outcome: outcome, Health: health, Stop: end}
	}

	d := policy.Decision{Outcome: outcome, Health: health, Connect: s.NotSent, Poll: outcome == policy.OutcomeInFlight}
	d.Free = d.Poll || d.Connect
	own := s.Backoff // the wait that we would choose
	if d.Poll {
		own = 50 * ms
	}
	d.Delay = max(own, s.Asked.Delay)

	safe := map[policy.Idempotency]bool{policy.Idempotent: true, policy.NoSideEffects: true, policy.Keyed: true}[s.Class]
	tooLate := s.HasDeadline && (s.Left < set.minAttempt || s.Left-set.minAttempt < d.Delay)
	serverIsWhy := !d.Poll && d.Delay > own
	for _, objection := range []struct {
		holds bool
		stop  policy.StopReason
	}{
		{s.Off, policy.Disabled},
		{s.Committed, policy.Committed},
		{!safe && !s.NotSent && !s.NotExecuted, policy.NotDeclared},
		{!d.Poll && set.maxAttempts == 1, policy.Disabled}, // no retry was withheld here: layers above may
		{!d.Poll && s.Attempts >= set.maxAttempts, policy.Exhausted},
		{s.NotSent && s.GraceLeft <= 0 && outcome != policy.OutcomeAttemptTimeout, policy.Unreachable},
		{s.Asked.Delay > 5*time.Minute, policy.Pushback},
		{tooLate && serverIsWhy, policy.Pushback},
		{tooLate, policy.DeadlineTooShort},
		{!d.Poll && s.BreakerRefuses, policy.BreakerOpen},
	} {
		if objection.holds {
			return policy.Decision{Outcome: outcome, Health: health, Stop: objection.stop}
		}
	}
	d.Retry = true
	return d
}

func oracleOutcome(set setting, s policy.Situation, ofCode policy.Health) (policy.Outcome, policy.Health) {
	if s.OK {
		return policy.OutcomeOK, policy.Healthy
	}
	hung := s.Call == policy.CallExpired && s.Ran >= 100*ms && !s.NotSent && !s.Local
	if hung {
		return policy.OutcomeCallerGone, policy.Unhealthy
	}
	if s.Call == policy.CallExpired || s.Call == policy.CallCancelled {
		return policy.OutcomeCallerGone, policy.Neutral
	}
	if s.Local {
		return policy.OutcomeLocal, policy.Neutral
	}
	endedByTime := s.Code == codes.DeadlineExceeded || s.Code == codes.Canceled
	callNear := s.HasDeadline && (s.DeadlineTooShort && !s.Asked.Stop || s.Left <= 10*ms || s.Left <= s.Left/10+s.Ran/10)
	if endedByTime && callNear && s.AttemptTimeout == 0 && !s.OwnRefusal {
		if s.Ran >= 100*ms {
			return policy.OutcomeCallerGone, policy.Unhealthy
		}
		return policy.OutcomeCallerGone, policy.Neutral
	}
	if s.Asked.Stop {
		return policy.OutcomeStopAsked, ofCode
	}
	near := s.AttemptLeft <= 10*ms || s.AttemptLeft*10 <= s.AttemptTimeout
	if s.AttemptExpired || s.AttemptTimeout > 0 && endedByTime && near {
		if s.OwnRefusal || s.NotSent {
			return policy.OutcomeAttemptTimeout, policy.Neutral
		}
		return policy.OutcomeAttemptTimeout, policy.Unhealthy
	}
	if s.InFlight {
		return policy.OutcomeInFlight, policy.Neutral
	}
	if slices.Contains(set.always, s.Code) || slices.Contains(set.onlyHinted, s.Code) && s.Asked.Given {
		return policy.OutcomeTransient, ofCode
	}
	return policy.OutcomeFinal, ofCode
}

// judged compares Decide with the oracle on one situation, and with itself.
func judged(t interface {
	Helper()
	Fatalf(format string, args ...any)
}, set setting, s policy.Situation,
) policy.Decision {
	t.Helper()
	s.Rules = set.rules
	got, want := policy.Decide(s), oracle(set, s)
	if again := policy.Decide(s); again != got {
		t.Fatalf("Decide gives %+v and then %+v for the same input", got, again)
	}
	compared := got
	if !got.Retry { // what it says about a next attempt has no meaning
		compared = policy.Decision{Outcome: got.Outcome, Health: got.Health, Stop: got.Stop}
	}
	if compared != want {
		s.Rules = nil
		t.Fatalf("policy %q, situation %+v:\ngot  %s\nwant %s", set.name, s, verdict(got), verdict(want))
	}
	return got
}

var sides = []bool{false, true}

// allCodes are gRPC's and two that it does not have.
func allCodes() []codes.Code {
	list := []codes.Code{17, math.MaxUint32}
	for c := range breakerTable {
		list = append(list, c)
	}
	return list
}

var allAsked = []policy.Asked{
	{}, {Stop: true}, {Given: true}, {Given: true, Delay: 70 * ms}, {Given: true, Delay: math.MaxInt64},
}

// Every combination of what classifies an attempt, with every gate open.
func TestDecide_allEvidence(t *testing.T) {
	n := 0
	for _, set := range settings() {
		for _, s := range evidence() {
			judged(t, set, s)
			n++
		}
	}
	if n < 200_000 {
		t.Errorf("%d situations, want all", n)
	}
}

func evidence() []policy.Situation {
	list := []policy.Situation{failed(codes.OK)}
	// vary replaces the list by its product with a set of facts.
	vary := func(facts ...fact) {
		var next []policy.Situation
		for _, s := range list {
			for _, f := range facts {
				v := s
				f(&v)
				next = append(next, v)
			}
		}
		list = next
	}
	nothing := func(*policy.Situation) {}
	var ofCodes []fact
	for _, c := range allCodes() {
		ofCodes = append(ofCodes, func(s *policy.Situation) { s.Code = c })
	}
	var ofAsked []fact
	for _, a := range allAsked {
		ofAsked = append(ofAsked, func(s *policy.Situation) { s.Asked = a })
	}
	vary(ofCodes...)
	vary(ofAsked...)
	vary(nothing, ok)
	vary(nothing, cancelled, expired)
	vary(ran(100*ms-1), ran(100*ms))
	vary(nothing, local)
	vary(nothing, notSent, notExecuted)
	vary(nothing, inFlight)
	vary(nothing, ownRefusal)
	vary(nothing, ownTimePassed, ownTime(time.Second, 100*ms), ownTime(time.Second, 101*ms), ownTime(50*ms, 9*ms))
	return list
}

// Every combination of what a retry is asked for, after each kind of failure
// that may be retried. It reaches all that Decide can stop with.
func TestDecide_allGates(t *testing.T) {
	set := settings()[0]
	kinds := []policy.Situation{
		failed(codes.Unavailable),
		failed(codes.DeadlineExceeded, ownTimePassed),
		failed(codes.Aborted, inFlight, ownRefusal),
	}
	reached := map[policy.StopReason]int{}
	retries := 0
	for _, s := range kinds {
		for _, s.Class = range []policy.Idempotency{policy.Unspecified, policy.Undeclared, policy.NoSideEffects, policy.Idempotent, policy.Keyed} {
			for _, s.Asked = range allAsked {
				for _, s.Attempts = range []int{1, 3, 4, math.MaxInt} {
					for _, s.Backoff = range []time.Duration{0, 50 * ms, math.MaxInt64} {
						for _, sent := range []fact{func(*policy.Situation) {}, notSent, notExecuted} {
							s := s
							sent(&s)
							for _, s := range gates(s) {
								d := judged(t, set, s)
								reached[d.Stop]++
								if d.Retry {
									retries++
								}
							}
						}
					}
				}
			}
		}
	}
	if retries == 0 || retries != reached[policy.NotStopped] {
		t.Errorf("%d retries, and %d calls that were not stopped", retries, reached[policy.NotStopped])
	}

	// These three end a call before the gates.
	for _, s := range []policy.Situation{failed(codes.NotFound), failed(codes.Internal, local), failed(codes.Canceled, cancelled)} {
		reached[judged(t, set, s).Stop]++
	}
	for r := policy.NotStopped; r <= policy.Disabled; r++ {
		// The bank is asked after Decide, and only for what it would retry.
		if want := r != policy.BudgetSpent; (reached[r] > 0) != want {
			t.Errorf("stop reason %q was reached %d times", r, reached[r])
		}
	}
}

// gates returns s with every combination of what stands between it and a retry.
func gates(s policy.Situation) []policy.Situation {
	var list []policy.Situation
	for _, s.Off = range sides {
		for _, s.Committed = range sides {
			for _, s.BreakerRefuses = range sides {
				for _, s.GraceLeft = range []time.Duration{-1, 0, 1} {
					s.HasDeadline = false
					list = append(list, s)
					s.HasDeadline = true
					for _, s.Left = range []time.Duration{math.MinInt64, 0, 2 * ms, 52*ms - 1, 52 * ms, 72*ms - 1, 72 * ms, math.MaxInt64} {
						list = append(list, s)
					}
				}
			}
		}
	}
	return list
}

// All of it at once, at random: what no enumeration crosses.
func TestDecide_properties(t *testing.T) {
	sets := settings()
	all := allCodes()
	rapid.Check(t, func(t *rapid.T) {
		flag := func(name string) bool { return rapid.Bool().Draw(t, name) }
		span := func(name string) time.Duration {
			return rapid.OneOf(
				rapid.SampledFrom([]time.Duration{math.MinInt64, -1, 0, 1, 2 * ms, 10 * ms, 30 * ms, 50 * ms, 100 * ms, math.MaxInt64}),
				rapid.Map(rapid.Int64Range(-int64(time.Second), int64(time.Hour)), func(n int64) time.Duration { return time.Duration(n) }),
			).Draw(t, name)
		}
		set := rapid.SampledFrom(sets).Draw(t, "policy")
		s := policy.Situation{
			Class:          policy.Idempotency(rapid.Uint8Range(0, uint8(policy.Keyed)).Draw(t, "class")),
			OK:             rapid.IntRange(0, 9).Draw(t, "ok") == 9,
			Code:           rapid.SampledFrom(all).Draw(t, "code"),
			Call:           policy.CallEnd(rapid.SampledFrom([]uint8{0, 0, 0, 1, 2}).Draw(t, "call")),
			AttemptExpired: flag("attempt expired"),
			AttemptTimeout: max(0, min(span("attempt timeout"), time.Hour)),
			AttemptLeft:    max(-time.Hour, min(span("attempt left"), time.Hour)),
			Ran:            max(0, span("ran")),
			NotSent:        flag("not sent"),
			NotExecuted:    flag("not executed"),
			InFlight:       flag("in flight"),
			OwnRefusal:     flag("own refusal"),

			DeadlineTooShort: flag("deadline too short"),
			Local:            rapid.IntRange(0, 9).Draw(t, "local") == 9,
			Committed:        rapid.IntRange(0, 9).Draw(t, "committed") == 9,
			Off:              rapid.IntRange(0, 9).Draw(t, "off") == 9,
			Attempts:         rapid.IntRange(1, 6).Draw(t, "attempts"),
			HasDeadline:      flag("has deadline"),
			Left:             span("left"),
			Backoff:          max(0, span("backoff")),
			BreakerRefuses:   rapid.IntRange(0, 3).Draw(t, "breaker") == 3,
			GraceLeft:        span("grace"),
		}
		if flag("asked") {
			s.Asked = policy.Asked{Stop: rapid.IntRange(0, 9).Draw(t, "stop") == 9, Given: true, Delay: max(0, span("delay"))}
		}
		invariants(t, set, s, judged(t, set, s))
	})
}

// invariants are what must hold of any verdict, whatever led to it.
func invariants(t *rapid.T, set setting, s policy.Situation, d policy.Decision) {
	if d.Retry == (d.Stop != policy.NotStopped) && d.Outcome != policy.OutcomeOK {
		t.Fatalf("a failure is either retried or stopped: %s", verdict(d))
	}
	if !d.Retry {
		return
	}
	switch {
	case s.OK || s.Call != policy.CallLives || s.Committed || s.Off || s.Asked.Stop || s.Local:
		t.Fatalf("retried although it must not be: %s", verdict(d))
	case !s.Class.Repeatable() && !s.NotSent && !s.NotExecuted:
		t.Fatalf("an undeclared method that may have been executed is repeated: %s", verdict(d))
	case d.Delay < 0 || d.Delay < s.Asked.Delay:
		t.Fatalf("waits %v where %v was asked", d.Delay, s.Asked.Delay)
	case s.HasDeadline && s.Left-d.Delay < set.minAttempt:
		t.Fatalf("waits %v of %v left, which leaves less than MinAttempt %v", d.Delay, s.Left, set.minAttempt)
	case s.Attempts >= set.maxAttempts && !d.Poll:
		t.Fatalf("attempt %d of %d is followed by another", s.Attempts, set.maxAttempts)
	case d.Poll && d.Delay < 50*ms:
		t.Fatalf("asks again about a running execution after %v, want 50ms at least", d.Delay)
	}
}

// Decide writes to nothing that it was given.
func TestDecide_leavesItsInput(t *testing.T) {
	rules := policy.Compile(policy.Policy{Codes: []codes.Code{codes.Unavailable, codes.Internal}})
	before := rules.Clone()
	s := failed(codes.Internal)
	s.Rules = &rules
	policy.Decide(s)
	if diff := cmp.Diff(before, rules.Policy); diff != "" {
		t.Errorf("the rules changed (-before +after):\n%s", diff)
	}
}
