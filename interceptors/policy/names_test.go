package policy_test

import (
	"encoding"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors/policy"
)

// Names are in metrics, spans and configuration files: they do not change.
func TestNames(t *testing.T) {
	for _, test := range []struct {
		kind  string
		name  func(uint8) string
		names []string
		next  string // of the first number that is none
	}{
		{
			"StopReason", func(n uint8) string { return policy.StopReason(n).String() },
			[]string{
				"", "final", "exhausted", "budget_spent", "deadline_too_short", "breaker_open", "pushback",
				"not_declared", "caller_gone", "unreachable", "local_refusal", "committed", "disabled",
			},
			"stop(13)",
		},
		{
			"Outcome", func(n uint8) string { return policy.Outcome(n).String() },
			[]string{"ok", "final", "transient", "attempt_timeout", "in_flight", "caller_gone", "local", "stop_asked"},
			"outcome(8)",
		},
		{
			"Idempotency", func(n uint8) string { return policy.Idempotency(n).String() },
			[]string{"", "undeclared", "no_side_effects", "idempotent", "keyed"},
			"idempotency(5)",
		},
		{
			"Jitter", func(n uint8) string { return policy.Jitter(n).String() },
			[]string{"", "full", "equal", "decorrelated", "proportional", "none"},
			"jitter(6)",
		},
		{
			"Code", func(n uint8) string { return policy.CodeName(codes.Code(n)) },
			[]string{
				"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
				"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
				"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
			},
			"CODE(17)",
		},
	} {
		t.Run(test.kind, func(t *testing.T) {
			for n, want := range append(test.names, test.next) {
				if got := test.name(uint8(n)); got != want {
					t.Errorf("%d is %q, want %q", n, got, want)
				}
			}
		})
	}
}

// The canonical names are those that gRPC itself reads in a service config.
func TestCodeName_isCanonical(t *testing.T) {
	for c := range codes.Code(17) {
		var back codes.Code
		if err := back.UnmarshalJSON([]byte(fmt.Sprintf("%q", policy.CodeName(c)))); err != nil || back != c {
			t.Errorf("%s reads as %v, error %v", policy.CodeName(c), back, err)
		}
	}
}

func TestText_roundTrip(t *testing.T) {
	type text interface {
		encoding.TextMarshaler
		fmt.Stringer
	}
	for _, test := range []struct {
		kind string
		n    int
		of   func(int) text
		read func([]byte) (text, error)
	}{
		{"Idempotency", 5, func(n int) text { return policy.Idempotency(n) }, func(b []byte) (text, error) {
			var i policy.Idempotency
			err := i.UnmarshalText(b)
			return i, err
		}},
		{"Jitter", 6, func(n int) text { return policy.Jitter(n) }, func(b []byte) (text, error) {
			var j policy.Jitter
			err := j.UnmarshalText(b)
			return j, err
		}},
	} {
		t.Run(test.kind, func(t *testing.T) {
			for n := range test.n {
				b, err := test.of(n).MarshalText()
				if err != nil {
					t.Fatal(err)
				}
				if back, err := test.read(b); err != nil || back != test.of(n) {
					t.Errorf("%q reads as %v, error %v", b, back, err)
				}
			}
			if b, err := test.of(test.n).MarshalText(); err == nil {
				t.Errorf("%d is written as %q", test.n, b)
			}
			if got, err := test.read([]byte("bogus")); err == nil {
				t.Errorf(`"bogus" reads as %v`, got)
			}
		})
	}
}

func TestIdempotency_Repeatable(t *testing.T) {
	for i, want := range []bool{false, false, true, true, true, false, false} {
		if got := policy.Idempotency(i).Repeatable(); got != want {
			t.Errorf("%v.Repeatable() = %v, want %v", policy.Idempotency(i), got, want)
		}
	}
}
