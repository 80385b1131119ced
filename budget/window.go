package budget

import "time"

const (
	windowSteps = 64
	// busyStep is the number of successes within one step from which on the
	// clock is read for one deposit in sixteen only.
	busyStep = 64
)

// window counts the successes of the last windowSteps steps of time, the
// running step included. The zero window is at step 0 and empty. It is not safe
// for concurrent use.
type window struct {
	counts [windowSteps]uint64 // by step modulo windowSteps
	step   int64               // the running one
	sum    uint64              // of counts
}

// stepOf numbers the step that now, the time since the bank was made, falls in.
func stepOf(now, width time.Duration) int64 { return int64(now / width) }

// advance makes step the running one and forgets what has become too old. A
// step that has passed already changes nothing.
func (w *window) advance(step int64) {
	// After a long silence every count is dropped once, not once per step missed.
	for range min(step-w.step, windowSteps) {
		w.step++
		oldest := w.at(w.step)
		w.sum -= *oldest
		*oldest = 0
	}
	w.step = max(w.step, step)
}

func (w *window) add(n uint64) {
	*w.at(w.step) += n
	w.sum += n
}

// busy reports whether so many successes arrive that a few of them are small
// change within a step.
func (w *window) busy() bool {
	return *w.at(w.step) >= busyStep || *w.at(w.step + windowSteps - 1) >= busyStep
}

func (w *window) at(step int64) *uint64 { return &w.counts[step%windowSteps] }
