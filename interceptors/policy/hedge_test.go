package policy_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/belayrpc/belay/interceptors/policy"
)

// A second copy is sent only where a second execution changes nothing, unless
// more was asked for.
func TestHedge_Allows(t *testing.T) {
	const classes = 5
	allowed := func(h policy.Hedge) (list [classes]bool) {
		for i := range list {
			list[i] = h.Allows(policy.Idempotency(i))
		}
		return list
	}
	readOnly := [classes]bool{policy.NoSideEffects: true}
	repeatable := [classes]bool{policy.NoSideEffects: true, policy.Idempotent: true, policy.Keyed: true}
	for _, test := range []struct {
		name string
		h    policy.Hedge
		want [classes]bool
	}{
		{"nothing set", policy.Hedge{}, [classes]bool{}},
		{"default", policy.Default().Hedge, [classes]bool{}},
		{"repeatable, but no time", policy.Hedge{Repeatable: true, Max: 3}, [classes]bool{}},
		{"cleared", policy.Hedge{After: policy.Unlimited, Quantile: 0.9, Repeatable: true}, [classes]bool{}},
		{"after a time", policy.Hedge{After: ms}, readOnly},
		{"after a quantile", policy.Hedge{Quantile: 0.9}, readOnly},
		{"repeatable", policy.Hedge{After: ms, Repeatable: true}, repeatable},
	} {
		if diff := cmp.Diff(test.want, allowed(test.h)); diff != "" {
			t.Errorf("%s: hedged classes (-want +got):\n%s", test.name, diff)
		}
	}
}

// After and Quantile say together when: half of one source and half of another
// would be a time that nobody asked for.
func TestHedge_whenComesFromOneSource(t *testing.T) {
	general := hedgeOf(policy.Hedge{After: 2 * ms, Quantile: 0.5, Max: 2})
	for _, test := range []struct {
		name           string
		specific, want policy.Hedge
	}{
		{"neither", policy.Hedge{Max: 3}, policy.Hedge{After: 2 * ms, Quantile: 0.5, Max: 3}},
		{"After", policy.Hedge{After: ms}, policy.Hedge{After: ms, Max: 2}},
		{"Quantile", policy.Hedge{Quantile: 0.9}, policy.Hedge{Quantile: 0.9, Max: 2}},
		{"cleared", policy.Hedge{After: policy.Unlimited}, policy.Hedge{After: policy.Unlimited, Max: 2}},
	} {
		if diff := cmp.Diff(test.want, hedgeOf(test.specific).Over(general).Hedge); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}

func TestLearn_Enabled(t *testing.T) {
	for _, test := range []struct {
		l    policy.Learn
		want bool
	}{
		{policy.Learn{}, false},
		{policy.Default().Learn, false},
		{policy.Learn{AttemptFactor: 5, AttemptFloor: ms, MinSamples: 1}, false},
		{policy.Learn{AttemptQuantile: 0.9}, true},
		{policy.Learn{MinChance: 0.1}, true},
		{policy.Learn{ShortenDeadline: true}, true},
	} {
		if got := test.l.Enabled(); got != test.want {
			t.Errorf("%+v.Enabled() = %v, want %v", test.l, got, test.want)
		}
	}
}
