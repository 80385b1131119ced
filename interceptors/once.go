package interceptors

import "sync"

// maxSaid bounds what once remembers; beyond it nothing new is said. Places can
// be named by peers, and a log must not be theirs to fill.
const maxSaid = 1024

// once remembers what has been said about which place. The zero value is ready.
type once struct {
	mu   sync.Mutex // guards said
	said map[[2]string]bool
}

// first reports whether something about a place has not been said yet.
func (o *once) first(what, where string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := [2]string{what, where}
	if o.said[key] || len(o.said) >= maxSaid {
		return false
	}
	if o.said == nil {
		o.said = make(map[[2]string]bool)
	}
	o.said[key] = true
	return true
}
