// Package storetest is the contract of idempotency.Store as a suite of tests
// that runs on any implementation, in real or in fake time.
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) idempotency.Store { return newStore(t) })
//	}
//
// Run checks the store by itself, rule by rule and against a reference model.
// Cases drives whole engines over it through the public failure cases that
// idempotency libraries are known for.
package storetest
