package policy

import (
	"fmt"
)

// Idempotency says what is known about calling a method more than once.
//
// The zero value, Unspecified, means "inherit" in a [Policy].
type Idempotency uint8

const (
	// Unspecified inherits: what the .proto declares stands.
	Unspecified Idempotency = iota

	// Undeclared methods are not repeated, unless nothing was sent or the
	// answering server says that it did not execute. A second execution is
	// worse than an error.
	Undeclared

	// NoSideEffects is `idempotency_level = NO_SIDE_EFFECTS`: safe to repeat,
	// and to hedge.
	NoSideEffects

	// Idempotent is `idempotency_level = IDEMPOTENT`: two executions have the
	// effect of one.
	Idempotent

	// Keyed methods are safe to repeat with the same idempotency key, because
	// the server remembers it: `(belay.v1.method).key` OPTIONAL or REQUIRED.
	Keyed
)

var idempotencyNames = [...]string{"", "undeclared", "no_side_effects", "idempotent", "keyed"}

// String returns the name used in JSON and in explanations; "" for Unspecified.
func (i Idempotency) String() string {
	if int(i) < len(idempotencyNames) {
		return idempotencyNames[i]
	}
	return fmt.Sprintf("idempotency(%d)", uint8(i))
}

// MarshalText implements [encoding.TextMarshaler].
func (i Idempotency) MarshalText() ([]byte, error) {
	if int(i) >= len(idempotencyNames) {
		return nil, fmt.Errorf("policy: Idempotency %d is not one of the constants of this package", uint8(i))
	}
	return []byte(i.String()), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler].
func (i *Idempotency) UnmarshalText(text []byte) error {
	for n, name := range idempotencyNames {
		if name == string(text) {
			*i = Idempotency(n)
			return nil
		}
	}
	return fmt.Errorf("policy: Idempotency %q: want one of undeclared, no_side_effects, idempotent, keyed", text)
}

// Repeatable reports whether a call that may have been executed may be sent
// again. For Keyed that holds with the same key only, which the client sees to.
func (i Idempotency) Repeatable() bool {
	return i == NoSideEffects || i == Idempotent || i == Keyed
}
