package probe

import (
	"fmt"
	"sync"
)

// scripts hands out the steps: a method's own first, then those for any method,
// then the default.
type scripts struct {
	mu       sync.Mutex
	byMethod map[string][]Step
	shared   []Step
	fallback Step
}

// next takes the step for one entry of method's handler.
func (s *scripts) next(method string) Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	if own := s.byMethod[method]; len(own) > 0 {
		s.byMethod[method] = own[1:]
		return own[0]
	}
	if len(s.shared) > 0 {
		first := s.shared[0]
		s.shared = s.shared[1:]
		return first
	}
	return s.fallback
}

// Script sets the steps of one method, replacing what was left of an earlier
// script. Each entry of the handler takes one; after the last one the steps of
// [Server.ScriptAll] are taken, then the one of [Server.Default].
//
// It panics on a method that the probe does not have and on a step that cannot
// mean anything for it, since a test built on either would prove nothing.
func (s *Server) Script(method string, steps ...Step) {
	k := mustKnow("Script", method)
	for i := range steps {
		if err := steps[i].check(k); err != nil {
			panic(fmt.Sprintf("probe: Script %s: step %d %v", method, i, err))
		}
	}
	s.scripts.mu.Lock()
	defer s.scripts.mu.Unlock()
	s.scripts.byMethod[method] = append([]Step(nil), steps...)
}

// ScriptAll sets the steps that are taken, in order, by whichever method has no
// script of its own left. A step that means nothing for that method is answered
// with INTERNAL, which says so.
func (s *Server) ScriptAll(steps ...Step) {
	s.scripts.mu.Lock()
	defer s.scripts.mu.Unlock()
	s.scripts.shared = append([]Step(nil), steps...)
}

// Default sets the step that is taken when every script is used up. Until then
// it is the zero [Step], which succeeds.
func (s *Server) Default(step Step) {
	s.scripts.mu.Lock()
	defer s.scripts.mu.Unlock()
	s.scripts.fallback = step
}

// Left returns how many steps of the method's own script were not taken.
func (s *Server) Left(method string) int {
	mustKnow("Left", method)
	s.scripts.mu.Lock()
	defer s.scripts.mu.Unlock()
	return len(s.scripts.byMethod[method])
}
