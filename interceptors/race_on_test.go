//go:build race

package interceptors_test

// raceEnabled: the race detector allocates on its own account.
const raceEnabled = true
