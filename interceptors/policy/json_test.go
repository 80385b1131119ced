package policy_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/interceptors/policy"
)

// fullJSON sets every field.
const fullJSON = `{
	"timeout": "5s",
	"attemptTimeout": "unlimited",
	"minAttempt": "2ms",
	"maxAttempts": 3,
	"backoff": {"base": "50ms", "max": "1s", "multiplier": 1.5, "jitter": "proportional", "spread": 0.3},
	"codes": ["UNAVAILABLE", "CANCELLED"],
	"idempotency": "no_side_effects",
	"connectGrace": "1m0.5s",
	"replayBytes": 1024,
	"maxIdle": "1h0m0s",
	"hedge": {"after": "10ms", "quantile": 0.98, "max": 2, "repeatable": true},
	"learn": {
		"attemptQuantile": 0.99, "attemptFactor": 2, "attemptFloor": "20ms",
		"minChance": 0.05, "shortenDeadline": true, "minSamples": 50
	}
}`

func fullPolicy() policy.Policy {
	return policy.Policy{
		Timeout:        5 * time.Second,
		AttemptTimeout: policy.Unlimited,
		MinAttempt:     2 * ms,
		MaxAttempts:    3,
		Backoff:        policy.Backoff{Base: 50 * ms, Max: time.Second, Multiplier: 1.5, Jitter: policy.JitterProportional, Spread: 0.3},
		Codes:          []codes.Code{codes.Unavailable, codes.Canceled},
		Idempotency:    policy.NoSideEffects,
		ConnectGrace:   time.Minute + 500*ms,
		ReplayBytes:    1024,
		MaxIdle:        time.Hour,
		Hedge:          policy.Hedge{After: 10 * ms, Quantile: 0.98, Max: 2, Repeatable: true},
		Learn: policy.Learn{
			AttemptQuantile: 0.99, AttemptFactor: 2, AttemptFloor: 20 * ms,
			MinChance: 0.05, ShortenDeadline: true, MinSamples: 50,
		},
	}
}

func TestPolicy_UnmarshalJSON(t *testing.T) {
	for _, test := range []struct {
		name string
		json string
		want policy.Policy
	}{
		{"every field", fullJSON, fullPolicy()},
		{"nothing", `{}`, policy.Policy{}},
		{"null says no more than nothing", `null`, policy.Policy{}},
		{"no codes", `{"codes": []}`, policy.Policy{Codes: []codes.Code{}}},
		{"codes inherited", `{"codes": null}`, policy.Policy{}},
		{"part of a backoff", `{"backoff": {"max": "2s"}}`, policy.Policy{Backoff: policy.Backoff{Max: 2 * time.Second}}},
		{"values are not judged here", `{"timeout": "-1s", "maxAttempts": -1}`, policy.Policy{Timeout: -time.Second, MaxAttempts: -1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := policy.Policy{MaxAttempts: 99, Codes: []codes.Code{codes.DataLoss}} // nothing of it may stay
			if err := json.Unmarshal([]byte(test.json), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestPolicy_MarshalJSON(t *testing.T) {
	for _, f := range fields {
		if reflect.ValueOf(f.has(fullPolicy())).IsZero() {
			t.Errorf("the test of every field leaves %s out", f.name)
		}
	}
	for _, test := range []struct {
		name string
		p    policy.Policy
		want string
	}{
		{"every field", fullPolicy(), fullJSON},
		{"nothing", policy.Policy{}, `{}`},
		{"no codes", policy.Policy{Codes: []codes.Code{}}, `{"codes": []}`},
		{"part of a backoff", backoffOf(policy.Backoff{Jitter: policy.JitterNone}), `{"backoff": {"jitter": "none"}}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := json.Marshal(test.p)
			if err != nil {
				t.Fatal(err)
			}
			want := strings.Join(strings.Fields(test.want), "")
			if string(got) != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

// The message names the field, shows the value and says what is wanted.
func TestPolicy_UnmarshalJSON_refuses(t *testing.T) {
	for _, test := range []struct {
		json string
		want string // every word of it in the message
	}{
		{`{"maxAttemps": 3}`, `policy: unknown field "maxAttemps"`},
		{`{"backoff": {"maximum": "1s"}}`, `policy: backoff: unknown field "maximum"`},
		{`{"timeout": "5 minutes"}`, `policy: timeout: "5 minutes": want a duration like "50ms" or "unlimited"`},
		{`{"timeout": ""}`, `policy: timeout: "": want a duration`},
		{`{"minAttempt": "Unlimited"}`, `policy: minAttempt: "Unlimited": want a duration`},
		{`{"connectGrace": 5}`, `policy: connectGrace: number: want a duration`},
		{`{"hedge": {"after": "soon"}}`, `policy: hedge: after: "soon": want a duration`},
		{`{"hedge": {"delay": "1s"}}`, `policy: hedge: unknown field "delay"`},
		{`{"learn": {"attemptFloor": 10}}`, `policy: learn: attemptFloor: number: want a duration`},
		{`{"learn": {"chance": 0.5}}`, `policy: learn: unknown field "chance"`},
		{`{"backoff": {"base": "soon"}}`, `policy: backoff: base: "soon": want a duration`},
		{`{"backoff": {"jitter": "lots"}}`, `Jitter "lots": want one of full, equal, decorrelated, proportional, none`},
		{`{"codes": ["Unavailable"]}`, `code "Unavailable" is not one of gRPC's 17 codes`},
		{`{"codes": ["CANCELED"]}`, `code "CANCELED" is not one of gRPC's 17 codes`},
		{`{"codes": "UNAVAILABLE"}`, `codes string`},
		{`{"codes": [14]}`, `codes number`},
		{`{"idempotency": "safe"}`, `Idempotency "safe": want one of undeclared, no_side_effects, idempotent, keyed`},
		{`{"maxAttempts": "3"}`, `maxAttempts string`},
		{`{"maxAttempts": 2.5}`, `maxAttempts number 2.5`},
		{`{"maxAttempts": 99999999999999999999}`, `maxAttempts 99999999999999999999`},
		{`[]`, `policy: array`},
		{`{`, `unexpected end of JSON input`},
	} {
		t.Run(test.json, func(t *testing.T) {
			var p policy.Policy
			err := json.Unmarshal([]byte(test.json), &p)
			if err == nil {
				t.Fatalf("accepted as %+v", p)
			}
			for word := range strings.FieldsSeq(test.want) {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q does not say %s", err, word)
				}
			}
		})
	}
}

// What has no name has no JSON: it is an error, not a number that the reader refuses.
func TestPolicy_MarshalJSON_refuses(t *testing.T) {
	for _, test := range []struct {
		p    policy.Policy
		want string
	}{
		{policy.Policy{Codes: []codes.Code{codes.Unavailable, 17}}, "Codes: 17 is not one of gRPC's 17 codes"},
		{policy.Policy{Idempotency: 5}, "Idempotency 5 is not one of the constants"},
		{backoffOf(policy.Backoff{Jitter: 6}), "Jitter 6 is not one of the constants"},
	} {
		if got, err := json.Marshal(test.p); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("got %s, error %v, want one that says %q", got, err, test.want)
		}
	}
}

func TestPolicy_JSON_roundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := validPolicy().Draw(t, "policy")
		data, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var back policy.Policy
		if err := json.Unmarshal(data, &back); err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		if diff := cmp.Diff(p, back); diff != "" {
			t.Fatalf("%s (-before +after):\n%s", data, diff)
		}
	})
}

func FuzzPolicyJSON(f *testing.F) {
	f.Add([]byte(fullJSON))
	f.Add([]byte(`{"codes":[],"backoff":{"jitter":"none"}}`))
	f.Add([]byte(`{"timeout":"-9223372036854775808ns","backoff":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var p policy.Policy
		if json.Unmarshal(data, &p) != nil {
			return
		}
		again, err := json.Marshal(p)
		if err != nil {
			t.Fatalf("%s was read as %+v, which cannot be written: %v", data, p, err)
		}
		var back policy.Policy
		if err := json.Unmarshal(again, &back); err != nil {
			t.Fatalf("%s was written as %s, which cannot be read: %v", data, again, err)
		}
		if diff := cmp.Diff(p, back); diff != "" {
			t.Fatalf("%s (-before +after):\n%s", again, diff)
		}
		_ = p.Validate() // whatever it says: it does not panic
	})
}
