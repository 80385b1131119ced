// Package policy says what may be done about a failed attempt, and where that
// rule comes from.
//
// It has three parts. [Policy] and [Backoff] are the tuning a client may set.
// [Declared] is what the API's owner promised in the .proto: the idempotency of
// a method, read from descriptors at run time. [Decide] is the verdict: one
// pure function from what is known about an attempt ([Situation]) to what is
// done next ([Decision]). The loops of package interceptors call it, Explain
// prints it and tests enumerate it, so there is no second place where a retry
// is judged.
//
// The package knows gRPC's codes and nothing else of gRPC.
package policy
