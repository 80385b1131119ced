//go:build race

package budget_test

// raceEnabled: the race detector allocates on its own account.
const raceEnabled = true
