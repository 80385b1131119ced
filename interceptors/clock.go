package interceptors

import "time"

// clock turns times into numbers that fit an atomic: nanoseconds since it was
// made, by the monotonic clock, so that steps of the wall clock do not show.
// The first is 1, so that 0 can mean "never". A clock belongs to what it serves,
// not to the process, so that it also holds in tests with a time of their own.
type clock struct{ made time.Time }

func newClock() clock { return clock{time.Now()} }

func (c clock) at(now time.Time) int64 { return int64(now.Sub(c.made)) + 1 }
