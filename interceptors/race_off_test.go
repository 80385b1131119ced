//go:build !race

package interceptors_test

const raceEnabled = false
