package probe

import "sync"

// Exec counts by name: handler runs by method, effects by key, whatever a test
// must prove happened exactly n times.
//
// The zero value counts from zero. Safe for concurrent use.
type Exec struct {
	mu     sync.Mutex
	counts map[string]int
	total  int
}

// Add counts one more for name, and returns how many name has now.
func (e *Exec) Add(name string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.counts == nil {
		e.counts = map[string]int{}
	}
	e.counts[name]++
	e.total++
	return e.counts[name]
}

// Count returns how often name was added; 0 for a name never seen.
func (e *Exec) Count(name string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.counts[name]
}

// Total returns how often any name was added.
func (e *Exec) Total() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.total
}
