package policy_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors/policy"
)

// The public failure cases, as far as a verdict without a call can show them.

// RESOURCE_EXHAUSTED that can never succeed: asked again only when the server
// gives a hint, although the code is in the list.
func TestB11_sizeLimitIsNotQuota(t *testing.T) {
	listed := under(policy.Policy{Codes: []codes.Code{codes.ResourceExhausted}})
	for _, test := range []struct {
		name string
		s    policy.Situation
		want string
	}{
		{"(a) the server's size limit", failed(codes.ResourceExhausted, listed), "final, unhealthy: stop, final"},
		{"(b) the client's size limit", failed(codes.ResourceExhausted, listed, local, notSent), "local, neutral: stop, local_refusal"},
		{"(c) RetryInfo of 50 ms", failed(codes.ResourceExhausted, listed, asked(50*ms), backoff(10*ms)), "transient, unhealthy: retry after 50ms"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := verdict(policy.Decide(test.s)); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// Outcomes that say nothing about the server must not trip its breaker, and
// those that do must.
func TestB27_whatTheBreakerIsTold(t *testing.T) {
	for _, test := range []struct {
		name string
		s    policy.Situation
		want policy.Health
	}{
		{"(a) cancelled by the caller mid-flight", failed(codes.Canceled, cancelled, ran(time.Second)), policy.Neutral},
		{"(b) begun with an expired ctx", failed(codes.DeadlineExceeded, expired, notSent, ran(0)), policy.Neutral},
		{"(c) bad input", failed(codes.InvalidArgument), policy.Healthy},
		{"(c) not there", failed(codes.NotFound), policy.Healthy},
		{"(c) not now", failed(codes.FailedPrecondition), policy.Healthy},
		{"(d) control: unavailable", failed(codes.Unavailable), policy.Unhealthy},
		{"(e) control: the server's deadline, with a live ctx", failed(codes.DeadlineExceeded), policy.Unhealthy},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := policy.Decide(test.s).Health; got != test.want {
				t.Errorf("the breaker is told %s, want %s", healthNames[got], healthNames[test.want])
			}
		})
	}
}

// The wait that a server asks for: enormous, sub-second, negative, none.
func TestB29_askedDelay(t *testing.T) {
	const enormous = 9_223_372_036 * time.Second // the most seconds that a Duration holds
	for _, test := range []struct {
		name string
		s    policy.Situation
		want string
	}{
		{"(a) 292 years, a second left", failed(codes.Unavailable, asked(enormous), left(time.Second)), "transient, unhealthy: stop, pushback"},
		{"(b) 292 years, no deadline", failed(codes.Unavailable, asked(enormous)), "transient, unhealthy: stop, pushback"},
		{"(b) saturated", failed(codes.Unavailable, asked(math.MaxInt64), left(math.MaxInt64)), "transient, unhealthy: stop, pushback"},
		{"(c) half a second is not cut to none", failed(codes.Unavailable, asked(500*ms), left(2*time.Second)), "transient, unhealthy: retry after 500ms"},
		{"(c) nor to whole milliseconds", failed(codes.Unavailable, asked(500*ms+1), left(2*time.Second)), "transient, unhealthy: retry after 500.000001ms"},
		{"(d) negative", failed(codes.Unavailable, asked(-5*time.Second), left(2*time.Second)), "transient, unhealthy: retry after 50ms"},
		{"(d) most negative", failed(codes.Unavailable, asked(math.MinInt64)), "transient, unhealthy: retry after 50ms"},
		{"(e) zero", failed(codes.Unavailable, asked(0), left(2*time.Second)), "transient, unhealthy: retry after 50ms"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := verdict(policy.Decide(test.s)); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// Why a call ended is told apart: attempts used up, or its time, or its caller.
func TestB35_whatEndedTheCall(t *testing.T) {
	for _, test := range []struct {
		name string
		s    policy.Situation
		want policy.StopReason
	}{
		{"(a) attempts exhausted", failed(codes.Unavailable, made(4)), policy.Exhausted},
		{"(b) the wait is longer than the deadline", failed(codes.Unavailable, left(51*ms)), policy.DeadlineTooShort},
		{"(b) the server's wait is", failed(codes.Unavailable, asked(time.Second), left(500*ms)), policy.Pushback},
		{"(b) the deadline passed", failed(codes.Unavailable, expired), policy.CallerGone},
		{"(c) the caller cancelled", failed(codes.Unavailable, cancelled), policy.CallerGone},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := policy.Decide(test.s).Stop; got != test.want {
				t.Errorf("stopped by %v, want %v", got, test.want)
			}
		})
	}
}

// attemptsUnder counts the attempts that a server that is always unavailable gets.
func attemptsUnder(t *testing.T, p policy.Policy) int {
	t.Helper()
	for n := 1; n <= 100; n++ {
		if !policy.Decide(failed(codes.Unavailable, under(p), made(n))).Retry {
			return n
		}
	}
	t.Fatalf("more than 100 attempts under %+v", p)
	return 0
}

// "attempts" are not "retries", zero has one meaning and negative is an error.
func TestB45_maxAttempts(t *testing.T) {
	for given, want := range map[int]int{1: 1, 2: 2, 3: 3, 0: policy.DefaultMaxAttempts} {
		p := policy.Policy{MaxAttempts: given}
		if err := p.Validate(); err != nil {
			t.Errorf("MaxAttempts %d: %v", given, err)
		}
		if got := attemptsUnder(t, p); got != want {
			t.Errorf("MaxAttempts %d: %d attempts, want %d", given, got, want)
		}
	}
	for _, negative := range []int{-1, math.MinInt} {
		p := policy.Policy{MaxAttempts: negative}
		if p.Validate() == nil {
			t.Errorf("MaxAttempts %d is accepted", negative)
		}
		if got := attemptsUnder(t, p); got != 1 {
			t.Errorf("MaxAttempts %d, not validated: %d attempts, want 1", negative, got)
		}
	}
}

// One caller's slice of codes is its own: editing it changes no policy, and no
// policy's edit changes the defaults.
func TestB45_codesAreNotShared(t *testing.T) {
	list := []codes.Code{codes.Internal}
	a := policy.Compile(policy.Policy{Codes: list})
	list[0] = codes.Unknown
	s := failed(codes.Internal)
	s.Rules = &a
	if !policy.Decide(s).Retry {
		t.Error("a policy lost its code when the slice it was made from was edited")
	}
	if want := []codes.Code{codes.Internal}; !slices.Equal(a.Codes, want) {
		t.Errorf("the compiled policy shows the codes %v, want %v", a.Codes, want)
	}

	first := policy.Compile(policy.Policy{})
	first.Codes[0] = codes.DataLoss
	b := policy.Compile(policy.Policy{})
	if want := []codes.Code{codes.Unavailable}; !slices.Equal(b.Codes, want) {
		t.Errorf("the default codes became %v, want %v", b.Codes, want)
	}
	s = failed(codes.DataLoss)
	s.Rules = &b
	if policy.Decide(s).Retry {
		t.Error("the edit of one policy's codes reached another")
	}
}

func TestB45_cloneSharesNothing(t *testing.T) {
	p := policy.Policy{MaxAttempts: 3, Codes: []codes.Code{codes.Unavailable, codes.Internal}}
	c := p.Clone()
	if diff := cmp.Diff(p, c); diff != "" {
		t.Errorf("the clone differs (-original +clone):\n%s", diff)
	}
	c.Codes[0] = codes.DataLoss
	if p.Codes[0] != codes.Unavailable {
		t.Error("an edit of the clone's codes reached the original")
	}
	// nil inherits and empty retries nothing: a clone must not confuse them.
	if (policy.Policy{}).Clone().Codes != nil {
		t.Error("the clone of no codes is not nil")
	}
	if got := (policy.Policy{Codes: []codes.Code{}}).Clone().Codes; got == nil || len(got) != 0 {
		t.Errorf("the clone of an empty list is %#v, want empty and not nil", got)
	}
}

// A per-call value wins for that call, and nothing is left of it afterwards.
func TestB45_overrideIsForOneCall(t *testing.T) {
	client := policy.Policy{MaxAttempts: 3}
	if got := attemptsUnder(t, policy.Policy{MaxAttempts: 1}.Over(client)); got != 1 {
		t.Errorf("the override gives %d attempts, want 1", got)
	}
	if got := attemptsUnder(t, client); got != 3 {
		t.Errorf("the next call has %d attempts, want 3", got)
	}
}
