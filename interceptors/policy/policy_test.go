package policy_test

import (
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/interceptors/policy"
)

// Every error names the field, the value and the rule.
func TestPolicy_Validate(t *testing.T) {
	for _, test := range []struct {
		p    policy.Policy
		want string
	}{
		{policy.Policy{Timeout: -1}, "Timeout: -1ns must not be negative"},
		{policy.Policy{AttemptTimeout: -time.Second}, "AttemptTimeout: -1s must not be negative"},
		{policy.Policy{MinAttempt: -time.Minute}, "MinAttempt: -1m0s must not be negative"},
		{policy.Policy{MinAttempt: policy.Unlimited}, "MinAttempt: unlimited must be a time that a call can have left"},
		{policy.Policy{ConnectGrace: -1}, "ConnectGrace: -1ns must not be negative"},
		{policy.Policy{MaxIdle: -1}, "MaxIdle: -1ns must not be negative"},
		{policy.Policy{ReplayBytes: -1}, "ReplayBytes: -1 must not be negative; 1 keeps nothing"},
		{policy.Policy{MaxAttempts: -1}, "MaxAttempts: -1 must not be negative; 1 means no retry"},
		{policy.Policy{AttemptTimeout: ms, MinAttempt: 2 * ms}, "AttemptTimeout: 1ms must not be less than MinAttempt 2ms"},
		{policy.Policy{Idempotency: 5}, "Idempotency: 5 must be one of the Idempotency constants"},
		{policy.Policy{Backoff: policy.Backoff{Base: -1}}, "Backoff.Base: -1ns must not be negative"},
		{policy.Policy{Backoff: policy.Backoff{Base: policy.Unlimited}}, "Backoff.Base: unlimited must be a time that a call can wait"},
		{policy.Policy{Backoff: policy.Backoff{Max: -1}}, "Backoff.Max: -1ns must not be negative"},
		{policy.Policy{Backoff: policy.Backoff{Base: 2, Max: 1}}, "Backoff.Max: 1ns must not be less than Backoff.Base 2ns"},
		{policy.Policy{Backoff: policy.Backoff{Multiplier: -2}}, "Backoff.Multiplier: -2 must be a number of at least 1"},
		{policy.Policy{Backoff: policy.Backoff{Multiplier: 0.99}}, "Backoff.Multiplier: 0.99 must be a number of at least 1"},
		{policy.Policy{Backoff: policy.Backoff{Multiplier: math.NaN()}}, "Backoff.Multiplier: NaN must be a number of at least 1"},
		{policy.Policy{Backoff: policy.Backoff{Multiplier: math.Inf(1)}}, "Backoff.Multiplier: +Inf must be a number of at least 1"},
		{policy.Policy{Backoff: policy.Backoff{Jitter: 6}}, "Backoff.Jitter: 6 must be one of the Jitter constants"},
		{policy.Policy{Backoff: policy.Backoff{Spread: -0.1}}, "Backoff.Spread: -0.1 must be between 0 and 1"},
		{policy.Policy{Backoff: policy.Backoff{Spread: 1.1}}, "Backoff.Spread: 1.1 must be between 0 and 1"},
		{policy.Policy{Backoff: policy.Backoff{Spread: math.NaN()}}, "Backoff.Spread: NaN must be between 0 and 1"},
		{hedgeOf(policy.Hedge{After: -1}), "Hedge.After: -1ns must not be negative"},
		{hedgeOf(policy.Hedge{Quantile: -0.1}), "Hedge.Quantile: -0.1 must be at least 0 and below 1"},
		{hedgeOf(policy.Hedge{Quantile: 1}), "Hedge.Quantile: 1 must be at least 0 and below 1"},
		{hedgeOf(policy.Hedge{Quantile: math.NaN()}), "Hedge.Quantile: NaN must be at least 0 and below 1"},
		{hedgeOf(policy.Hedge{Max: -1}), "Hedge.Max: -1 must be between 0 and 8"},
		{hedgeOf(policy.Hedge{Max: 9}), "Hedge.Max: 9 must be between 0 and 8"},
		{learnOf(policy.Learn{AttemptQuantile: -0.1}), "Learn.AttemptQuantile: -0.1 must be at least 0 and below 1"},
		{learnOf(policy.Learn{AttemptQuantile: 1}), "Learn.AttemptQuantile: 1 must be at least 0 and below 1"},
		{learnOf(policy.Learn{MinChance: math.NaN()}), "Learn.MinChance: NaN must be at least 0 and below 1"},
		{learnOf(policy.Learn{AttemptFactor: 0.5}), "Learn.AttemptFactor: 0.5 must be a number of at least 1"},
		{learnOf(policy.Learn{AttemptFactor: math.Inf(1)}), "Learn.AttemptFactor: +Inf must be a number of at least 1"},
		{learnOf(policy.Learn{AttemptFloor: -1}), "Learn.AttemptFloor: -1ns must not be negative"},
		{learnOf(policy.Learn{MinSamples: -1}), "Learn.MinSamples: -1 must not be negative"},
		{policy.Policy{Codes: []codes.Code{codes.OK}}, "Codes: OK success is not retried"},
		{policy.Policy{Codes: []codes.Code{codes.Canceled}}, "Codes: CANCELLED is judged by whose deadline passed; set AttemptTimeout to have slow attempts repeated"},
		{policy.Policy{Codes: []codes.Code{codes.DeadlineExceeded}}, "Codes: DEADLINE_EXCEEDED is judged by whose deadline passed; set AttemptTimeout to have slow attempts repeated"},
		{policy.Policy{Codes: []codes.Code{17}}, "Codes: 17 must be one of gRPC's 17 codes"},
	} {
		t.Run(test.want, func(t *testing.T) {
			if err := test.p.Validate(); err == nil || err.Error() != test.want {
				t.Errorf("got %v", err)
			}
		})
	}
}

// A bad configuration is told of whole, not one field a run.
func TestPolicy_Validate_all(t *testing.T) {
	err := policy.Policy{
		Timeout: -1, AttemptTimeout: -1, MinAttempt: -1, ConnectGrace: -1, MaxIdle: -1, MaxAttempts: -1, ReplayBytes: -1, Idempotency: 99,
		Backoff: policy.Backoff{Base: -1, Max: -1, Multiplier: -1, Jitter: 99, Spread: -1},
		Hedge:   policy.Hedge{After: -1, Quantile: -1, Max: -1},
		Learn:   policy.Learn{AttemptQuantile: -1, AttemptFactor: -1, AttemptFloor: -1, MinChance: -1, MinSamples: -1},
		Codes:   []codes.Code{codes.OK, codes.Unavailable, 99},
	}.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	var fields []string
	for line := range strings.Lines(err.Error()) {
		field, _, _ := strings.Cut(line, ":")
		fields = append(fields, field)
	}
	want := []string{
		"Timeout", "AttemptTimeout", "MinAttempt", "ConnectGrace", "MaxIdle", "MaxAttempts", "ReplayBytes",
		"Backoff.Base", "Backoff.Max", "Backoff.Multiplier", "Backoff.Jitter", "Backoff.Spread",
		"Hedge.After", "Hedge.Quantile", "Hedge.Max",
		"Learn.AttemptQuantile", "Learn.MinChance", "Learn.AttemptFactor", "Learn.AttemptFloor", "Learn.MinSamples",
		"Codes", "Codes", "Idempotency",
	}
	if diff := cmp.Diff(want, fields); diff != "" {
		t.Errorf("the fields named in %q (-want +got):\n%s", err, diff)
	}
}

func TestPolicy_Validate_accepts(t *testing.T) {
	for name, p := range map[string]policy.Policy{
		"zero":      {},
		"defaults":  policy.Default(),
		"compiled":  policy.Compile(policy.Policy{}).Policy,
		"no codes":  {Codes: []codes.Code{}},
		"unlimited": {Timeout: policy.Unlimited, AttemptTimeout: policy.Unlimited, ConnectGrace: policy.Unlimited, Backoff: policy.Backoff{Max: policy.Unlimited}},
		"limits":    {AttemptTimeout: ms, MinAttempt: ms, MaxAttempts: 1, Backoff: policy.Backoff{Base: ms, Max: ms, Multiplier: 1, Spread: 1}},
	} {
		if err := p.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDefault(t *testing.T) {
	want := policy.Policy{
		Timeout:        policy.Unlimited,
		AttemptTimeout: policy.Unlimited,
		MinAttempt:     2 * ms,
		MaxAttempts:    4,
		Backoff:        policy.Backoff{Base: 50 * ms, Max: time.Second, Multiplier: 2, Jitter: policy.JitterFull, Spread: 0.2},
		ConnectGrace:   time.Second,
		ReplayBytes:    64 << 10,
		MaxIdle:        policy.Unlimited,
		Hedge:          policy.Hedge{Max: 1},
		Learn:          policy.Learn{AttemptFactor: 3, AttemptFloor: 10 * ms, MinSamples: 100},
	}
	if diff := cmp.Diff(want, policy.Default()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	want.Codes = []codes.Code{codes.Unavailable}
	if diff := cmp.Diff(want, policy.Compile(policy.Policy{}).Policy); diff != "" {
		t.Errorf("compiled (-want +got):\n%s", diff)
	}
}

// fields are all fields of a Policy: two values that differ from each other, from
// zero and from the default.
var fields = []struct {
	name     string
	specific policy.Policy
	general  policy.Policy
	has      func(policy.Policy) any
}{
	{"Timeout", policy.Policy{Timeout: 1}, policy.Policy{Timeout: 2}, func(p policy.Policy) any { return p.Timeout }},
	{"AttemptTimeout", policy.Policy{AttemptTimeout: 1}, policy.Policy{AttemptTimeout: 2}, func(p policy.Policy) any { return p.AttemptTimeout }},
	{"MinAttempt", policy.Policy{MinAttempt: 1}, policy.Policy{MinAttempt: 2}, func(p policy.Policy) any { return p.MinAttempt }},
	{"MaxAttempts", policy.Policy{MaxAttempts: 1}, policy.Policy{MaxAttempts: 2}, func(p policy.Policy) any { return p.MaxAttempts }},
	{"ConnectGrace", policy.Policy{ConnectGrace: 1}, policy.Policy{ConnectGrace: 2}, func(p policy.Policy) any { return p.ConnectGrace }},
	{"ReplayBytes", policy.Policy{ReplayBytes: 1}, policy.Policy{ReplayBytes: 2}, func(p policy.Policy) any { return p.ReplayBytes }},
	{"MaxIdle", policy.Policy{MaxIdle: 1}, policy.Policy{MaxIdle: 2}, func(p policy.Policy) any { return p.MaxIdle }},
	{"Hedge.After", hedgeOf(policy.Hedge{After: 1}), hedgeOf(policy.Hedge{After: 2}), func(p policy.Policy) any { return p.Hedge.After }},
	{"Hedge.Quantile", hedgeOf(policy.Hedge{Quantile: 0.1}), hedgeOf(policy.Hedge{Quantile: 0.2}), func(p policy.Policy) any { return p.Hedge.Quantile }},
	{"Hedge.Max", hedgeOf(policy.Hedge{Max: 2}), hedgeOf(policy.Hedge{Max: 3}), func(p policy.Policy) any { return p.Hedge.Max }},
	{"Hedge.Repeatable", hedgeOf(policy.Hedge{Repeatable: true}), hedgeOf(policy.Hedge{Repeatable: true}), func(p policy.Policy) any { return p.Hedge.Repeatable }},
	{"Learn.AttemptQuantile", learnOf(policy.Learn{AttemptQuantile: 0.1}), learnOf(policy.Learn{AttemptQuantile: 0.2}), func(p policy.Policy) any { return p.Learn.AttemptQuantile }},
	{"Learn.AttemptFactor", learnOf(policy.Learn{AttemptFactor: 1}), learnOf(policy.Learn{AttemptFactor: 2}), func(p policy.Policy) any { return p.Learn.AttemptFactor }},
	{"Learn.AttemptFloor", learnOf(policy.Learn{AttemptFloor: 1}), learnOf(policy.Learn{AttemptFloor: 2}), func(p policy.Policy) any { return p.Learn.AttemptFloor }},
	{"Learn.MinChance", learnOf(policy.Learn{MinChance: 0.1}), learnOf(policy.Learn{MinChance: 0.2}), func(p policy.Policy) any { return p.Learn.MinChance }},
	{"Learn.ShortenDeadline", learnOf(policy.Learn{ShortenDeadline: true}), learnOf(policy.Learn{ShortenDeadline: true}), func(p policy.Policy) any { return p.Learn.ShortenDeadline }},
	{"Learn.MinSamples", learnOf(policy.Learn{MinSamples: 1}), learnOf(policy.Learn{MinSamples: 2}), func(p policy.Policy) any { return p.Learn.MinSamples }},
	{"Idempotency", policy.Policy{Idempotency: policy.Keyed}, policy.Policy{Idempotency: policy.Idempotent}, func(p policy.Policy) any { return p.Idempotency }},
	{"Codes", policy.Policy{Codes: []codes.Code{}}, policy.Policy{Codes: []codes.Code{codes.Internal}}, func(p policy.Policy) any { return p.Codes }},
	{"Backoff.Base", backoffOf(policy.Backoff{Base: 1}), backoffOf(policy.Backoff{Base: 2}), func(p policy.Policy) any { return p.Backoff.Base }},
	{"Backoff.Max", backoffOf(policy.Backoff{Max: 3 * time.Second}), backoffOf(policy.Backoff{Max: 2 * time.Second}), func(p policy.Policy) any { return p.Backoff.Max }},
	{"Backoff.Multiplier", backoffOf(policy.Backoff{Multiplier: 3}), backoffOf(policy.Backoff{Multiplier: 4}), func(p policy.Policy) any { return p.Backoff.Multiplier }},
	{"Backoff.Jitter", backoffOf(policy.Backoff{Jitter: policy.JitterNone}), backoffOf(policy.Backoff{Jitter: policy.JitterEqual}), func(p policy.Policy) any { return p.Backoff.Jitter }},
	{"Backoff.Spread", backoffOf(policy.Backoff{Spread: 0.3}), backoffOf(policy.Backoff{Spread: 0.4}), func(p policy.Policy) any { return p.Backoff.Spread }},
}

func hedgeOf(h policy.Hedge) policy.Policy { return policy.Policy{Hedge: h} }
func learnOf(l policy.Learn) policy.Policy { return policy.Policy{Learn: l} }

// leaves counts the fields of a struct and of the structs in it.
func leaves(t reflect.Type) int {
	if t.Kind() != reflect.Struct {
		return 1
	}
	n := 0
	for f := range t.Fields() {
		n += leaves(f.Type)
	}
	return n
}

func TestPolicy_Over(t *testing.T) {
	if want := leaves(reflect.TypeFor[policy.Policy]()); len(fields) != want {
		t.Errorf("%d fields are tested, there are %d", len(fields), want)
	}
	for _, f := range fields {
		t.Run(f.name, func(t *testing.T) {
			specific, general := f.has(f.specific), f.has(f.general)
			for _, test := range []struct {
				name string
				p    policy.Policy
				want any
			}{
				{"set over set", f.specific.Over(f.general), specific},
				{"set over unset", f.specific.Over(policy.Policy{}), specific},
				{"unset over set", policy.Policy{}.Over(f.general), general},
				{"set, compiled", policy.Compile(f.specific).Policy, specific},
			} {
				if diff := cmp.Diff(test.want, f.has(test.p)); diff != "" {
					t.Errorf("%s (-want +got):\n%s", test.name, diff)
				}
			}
			// Each field is inherited for itself: the others stay unset.
			if diff := cmp.Diff(f.general, policy.Policy{}.Over(f.general)); diff != "" {
				t.Errorf("more than the field came over (-want +got):\n%s", diff)
			}
		})
	}
}

// The order in which sources are folded together makes no difference, only
// their rank. Left out are Base and Max: how far an inherited one yields to the
// other depends on what it meets first.
func TestPolicy_Over_isAssociative(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := validPolicy().Draw(t, "a"), validPolicy().Draw(t, "b"), validPolicy().Draw(t, "c")
		left, right := a.Over(b).Over(c), a.Over(b.Over(c))
		left.Backoff.Base, left.Backoff.Max = 0, 0
		right.Backoff.Base, right.Backoff.Max = 0, 0
		if diff := cmp.Diff(left, right); diff != "" {
			t.Fatalf("(a over b) over c differs from a over (b over c):\n%s", diff)
		}
		if diff := cmp.Diff(a, a.Over(policy.Policy{})); diff != "" {
			t.Fatalf("the zero Policy changes something:\n%s", diff)
		}
		if diff := cmp.Diff(a, policy.Policy{}.Over(a)); diff != "" {
			t.Fatalf("the zero Policy does not inherit everything:\n%s", diff)
		}
	})
}

// Sources that are valid by themselves make a policy whose backoff is valid.
func TestPolicy_Over_keepsBackoffValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := validBackoff().Draw(t, "a"), validBackoff().Draw(t, "b")
		stacked := policy.Policy{Backoff: a}.Over(policy.Policy{Backoff: b})
		if err := stacked.Validate(); err != nil {
			t.Fatalf("stacked: %v", err)
		}
		if err := policy.Compile(stacked).Validate(); err != nil {
			t.Fatalf("compiled: %v", err)
		}
	})
}

// validPolicy draws policies with any fields set that Validate accepts.
func validPolicy() *rapid.Generator[policy.Policy] {
	duration := rapid.OneOf(
		rapid.Just(time.Duration(0)),
		rapid.Just(policy.Unlimited),
		rapid.Map(rapid.Int64Range(1, math.MaxInt64), func(n int64) time.Duration { return time.Duration(n) }),
	)
	share := rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(0, lastDraw))
	retryable := []codes.Code{
		codes.Unknown, codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied,
		codes.ResourceExhausted, codes.FailedPrecondition, codes.Aborted, codes.OutOfRange, codes.Unimplemented,
		codes.Internal, codes.Unavailable, codes.DataLoss, codes.Unauthenticated,
	}
	return rapid.Custom(func(t *rapid.T) policy.Policy {
		p := policy.Policy{
			Timeout:        duration.Draw(t, "timeout"),
			AttemptTimeout: duration.Draw(t, "attempt timeout"),
			MinAttempt:     min(duration.Draw(t, "min attempt"), policy.Unlimited-1),
			MaxAttempts:    rapid.IntRange(0, math.MaxInt).Draw(t, "max attempts"),
			Backoff:        validBackoff().Draw(t, "backoff"),
			Idempotency:    policy.Idempotency(rapid.Uint8Range(0, uint8(policy.Keyed)).Draw(t, "idempotency")),
			ConnectGrace:   duration.Draw(t, "grace"),
			ReplayBytes:    rapid.IntRange(0, math.MaxInt).Draw(t, "replay bytes"),
			MaxIdle:        duration.Draw(t, "max idle"),
			Hedge: policy.Hedge{
				After:      duration.Draw(t, "hedge after"),
				Quantile:   share.Draw(t, "hedge quantile"),
				Max:        rapid.IntRange(0, 8).Draw(t, "hedges"),
				Repeatable: rapid.Bool().Draw(t, "hedge repeatable"),
			},
			Learn: policy.Learn{
				AttemptQuantile: share.Draw(t, "attempt quantile"),
				AttemptFactor:   rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1, math.MaxFloat64)).Draw(t, "attempt factor"),
				AttemptFloor:    duration.Draw(t, "attempt floor"),
				MinChance:       share.Draw(t, "chance"),
				ShortenDeadline: rapid.Bool().Draw(t, "shorten"),
				MinSamples:      rapid.IntRange(0, math.MaxInt).Draw(t, "samples"),
			},
		}
		if p.AttemptTimeout > 0 {
			p.MinAttempt = min(p.MinAttempt, p.AttemptTimeout)
		}
		if rapid.Bool().Draw(t, "with codes") {
			p.Codes = rapid.SliceOfDistinct(rapid.SampledFrom(retryable), rapid.ID[codes.Code]).Draw(t, "codes")
			if p.Codes == nil {
				p.Codes = []codes.Code{}
			}
		}
		return p
	})
}
