// Package rules switches the rules of idempotency.Store off, one at a time, and
// checks that a test of the library notices: a rule that no test holds up is one
// that the next change may break.
package rules
