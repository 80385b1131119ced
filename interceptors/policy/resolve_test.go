package policy_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors/policy"
)

const (
	keyedMethod  = "belay.probe.v1.ProbeService/Keyed"
	readMethod   = "belay.probe.v1.ProbeService/Read"
	probeService = "belay.probe.v1.ProbeService/*"
)

// A rule that names nothing would silently not apply: it is an error, which
// says which rule and why.
func TestRule_Validate(t *testing.T) {
	const form = `: want "pkg.Service/Method", "pkg.Service/*" or "*"`
	for _, test := range []struct {
		pattern string
		p       policy.Policy
		want    string // "" for none
	}{
		{pattern: "*"},
		{pattern: probeService},
		{pattern: keyedMethod},
		{pattern: "/" + keyedMethod},
		{pattern: "/" + probeService},

		{pattern: "", want: `rule ""` + form},
		{pattern: "/", want: `rule "/"` + form},
		{pattern: "**", want: `rule "**"` + form},
		{pattern: "/*", want: `rule "/*"` + form},
		{pattern: "*/*", want: `rule "*/*"` + form},
		{pattern: "*/Keyed", want: `rule "*/Keyed"` + form},
		{pattern: "belay.*/Keyed", want: `rule "belay.*/Keyed"` + form},
		{pattern: "belay.probe.v1.ProbeService", want: `rule "belay.probe.v1.ProbeService"` + form},
		{pattern: "belay.probe.v1.ProbeService/", want: `rule "belay.probe.v1.ProbeService/"` + form},
		{pattern: "belay.probe.v1.ProbeService/Key*", want: `rule "belay.probe.v1.ProbeService/Key*"` + form},
		{pattern: keyedMethod + "/x", want: `rule "` + keyedMethod + `/x"` + form},
		{pattern: "//" + keyedMethod, want: `rule "//` + keyedMethod + `"` + form},

		{
			pattern: "no.such.Service/*",
			want:    `rule "no.such.Service/*": service "no.such.Service": not in the protobuf registry of this program`,
		},
		{
			pattern: "no.such.Service/Method",
			want:    `rule "no.such.Service/Method": service "no.such.Service": not in the protobuf registry of this program`,
		},
		{
			pattern: "belay.probe.v1.ProbeService/Kyed",
			want:    `rule "belay.probe.v1.ProbeService/Kyed": method "belay.probe.v1.ProbeService/Kyed": service belay.probe.v1.ProbeService has no method Kyed`,
		},
		{
			pattern: "belay.probe.v1.Request/*",
			want:    `rule "belay.probe.v1.Request/*": service "belay.probe.v1.Request": the name belongs to something that is not a service`,
		},
		{pattern: "*", p: policy.Policy{MaxAttempts: -1}, want: `rule "*": MaxAttempts: -1 must not be negative; 1 means no retry`},
		{pattern: readMethod, p: policy.Policy{Timeout: -1}, want: `rule "` + readMethod + `": Timeout: -1ns must not be negative`},
	} {
		t.Run(test.pattern, func(t *testing.T) {
			got := ""
			if err := (policy.Rule{Pattern: test.pattern, Policy: test.p}).Validate(); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func TestValidateAll(t *testing.T) {
	good := policy.Rule{Pattern: "*"}
	if err := policy.ValidateAll(nil); err != nil {
		t.Errorf("no rules: %v", err)
	}
	if err := policy.ValidateAll([]policy.Rule{good, {Pattern: probeService}}); err != nil {
		t.Errorf("good rules: %v", err)
	}
	err := policy.ValidateAll([]policy.Rule{{Pattern: "one"}, good, {Pattern: "two.Two/Two"}, {Pattern: "*", Policy: policy.Policy{MinAttempt: -1}}})
	if err == nil {
		t.Fatal("bad rules are accepted")
	}
	var named []string
	for line := range strings.Lines(err.Error()) {
		named = append(named, strings.SplitN(line, `"`, 3)[1])
	}
	if diff := cmp.Diff([]string{"one", "two.Two/Two", "*"}, named); diff != "" {
		t.Errorf("rules named in %q (-want +got):\n%s", err, diff)
	}
}

// The more specific pattern wins, and between equal patterns the later rule.
func TestLayers(t *testing.T) {
	attempts := func(n int) policy.Policy { return policy.Policy{MaxAttempts: n} }
	rules := []policy.Rule{
		{Pattern: keyedMethod, Policy: attempts(1)},
		{Pattern: "*", Policy: attempts(2)},
		{Pattern: probeService, Policy: attempts(3)},
		{Pattern: "/" + keyedMethod, Policy: attempts(4)},
		{Pattern: "belay.probe.v1.ProbeService/KeyedField", Policy: attempts(5)},
		{Pattern: "belay.probe.v1.KeyedService/*", Policy: attempts(6)},
		{Pattern: "*", Policy: attempts(7)},
		{Pattern: "no pattern", Policy: attempts(8)},
	}
	for method, want := range map[string][]int{
		keyedMethod:                              {4, 1, 3, 7, 2},
		"/" + keyedMethod:                        {4, 1, 3, 7, 2},
		readMethod:                               {3, 7, 2},
		"belay.probe.v1.KeyedService/Inherits":   {6, 7, 2},
		"belay.probe.v1.ProbeServiceX/Keyed":     {7, 2},
		"x.belay.probe.v1.ProbeService/Keyed":    {7, 2},
		"belay.probe.v1.ProbeService/keyed":      {3, 7, 2},
		"belay.probe.v1.ProbeService/KeyedField": {5, 3, 7, 2},
		"":                                       {7, 2},
	} {
		var got []int
		for _, l := range policy.Layers(rules, method) {
			got = append(got, l.Policy.MaxAttempts)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", method, diff)
		}
	}
	if got := policy.Layers(nil, keyedMethod); len(got) != 0 {
		t.Errorf("no rules give %v", got)
	}
	if got, want := policy.Layers(rules, readMethod)[0].Source, `WithRule("`+probeService+`")`; got != want {
		t.Errorf("source %s, want %s", got, want)
	}
}

// Each field comes from the most specific rule that sets it, whatever else that
// rule leaves unset.
func TestStack(t *testing.T) {
	rules := []policy.Rule{
		{Pattern: "*", Policy: policy.Policy{
			Timeout: time.Minute, MaxAttempts: 9, Codes: []codes.Code{codes.Internal},
			Backoff: policy.Backoff{Jitter: policy.JitterEqual, Max: time.Hour},
		}},
		{Pattern: probeService, Policy: policy.Policy{
			MaxAttempts: 5, Codes: []codes.Code{}, Idempotency: policy.Idempotent,
			Backoff: policy.Backoff{Max: time.Minute},
		}},
		{Pattern: keyedMethod, Policy: policy.Policy{AttemptTimeout: time.Second, Backoff: policy.Backoff{Base: ms}}},
		{Pattern: keyedMethod, Policy: policy.Policy{Backoff: policy.Backoff{Base: 2 * ms}}},
	}
	want := policy.Policy{
		Timeout:        time.Minute,                                                                // from "*"
		AttemptTimeout: time.Second,                                                                // from the method's first rule
		MaxAttempts:    5,                                                                          // from the service's
		Backoff:        policy.Backoff{Base: 2 * ms, Max: time.Minute, Jitter: policy.JitterEqual}, // from all of them
		Codes:          []codes.Code{},                                                             // from the service's: none is a value
		Idempotency:    policy.Idempotent,
	}
	if diff := cmp.Diff(want, policy.Stack(policy.Layers(rules, keyedMethod))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(policy.Policy{}, policy.Stack(nil)); diff != "" {
		t.Errorf("no layers (-want +got):\n%s", diff)
	}
	for _, f := range fields {
		t.Run(f.name, func(t *testing.T) {
			layers := policy.Layers([]policy.Rule{
				{Pattern: keyedMethod}, {Pattern: probeService, Policy: f.specific}, {Pattern: "*", Policy: f.general},
			}, keyedMethod)
			if diff := cmp.Diff(f.has(f.specific), f.has(policy.Stack(layers))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
