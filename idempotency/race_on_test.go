//go:build race

package idempotency_test

// raceEnabled: the race detector allocates for its own purposes.
const raceEnabled = true
