//go:build race

package breaker_test

// raceEnabled: the race detector makes sync.Pool drop things at random, which then allocate.
const raceEnabled = true
