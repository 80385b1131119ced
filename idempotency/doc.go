// Package idempotency makes one keyed call have one effect, however often it
// is sent: it names the call (Key, IDOf, Fingerprint), remembers it in a Store,
// and drives the store through claim, execution, finish and replay (Engine).
//
// It knows no gRPC. Package interceptors puts an Engine into a server; a
// handler says what it knows about its own effect with Final, NoEffect and
// UnknownEffect; a store of your own implements Store and is checked by package
// storetest.
package idempotency
