package breaker

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// DefaultGroupMax is how many breakers a [Group] keeps unless told otherwise.
const DefaultGroupMax = 256

// Group keeps one breaker per key, such as the service that is called, and no more than a fixed
// number of them. The zero Group is ready: default configuration, [DefaultGroupMax] breakers. A
// Group may be used by any number of goroutines and must not be copied.
//
// When a new key finds the group full, a breaker makes room for it. Closed breakers go first,
// those that were not asked for lately before the others (an approximation of least recently used:
// one mark per breaker, cleared as the search passes by). Breakers that are open or half-open go
// only when none is closed, and forced ones last: they hold a person's decision. Calls of a
// breaker that was dropped report to it as before, but the key's next call gets a new one.
//
// Looking up a known key takes no lock and allocates nothing. A new key copies the index, so keys
// should be a modest set that is met again and again, not one per request.
type Group struct {
	cfg      Config
	max      int
	err      error
	admitAll *Breaker // what every key gets when err is set

	index atomic.Pointer[map[string]*member] // replaced under mu, never changed

	// only is the one member of a group that has one, as the channels of most clients have: they
	// call one service. It spares the lookup, which costs more than all else that Get does.
	only atomic.Pointer[member]

	mu      sync.Mutex
	members []*member // in a ring, for the eviction's hand
	hand    int
}

type member struct {
	key     string
	breaker *Breaker
	used    atomic.Bool // since the hand last passed
}

// NewGroup returns an empty group that keeps at most limit breakers made from cfg; 0 is
// [DefaultGroupMax]. Each member's Config.Name is its key, and cfg.OnTransition is told of all of
// them. Like [New] it does not fail: with an invalid cfg or a negative limit every key gets a
// breaker that admits every call, and [Group.Err] says what is wrong.
func NewGroup(cfg Config, limit int) *Group {
	err := cfg.Validate()
	if err == nil && limit < 0 {
		err = fmt.Errorf("breaker: group limit = %d: must not be negative", limit)
	}
	g := &Group{cfg: cfg, max: limit, err: err}
	if err != nil {
		g.admitAll = &Breaker{cfg: cfg, err: err}
	}
	return g
}

// Err returns what is wrong with the configuration, or nil.
func (g *Group) Err() error { return g.err }

// Get returns the breaker for key, a new one if there is none.
func (g *Group) Get(key string) *Breaker {
	if m, ok := g.lookup(key); ok {
		// Look first: all processors share the line while nobody writes to it.
		if !m.used.Load() {
			m.used.Store(true)
		}
		return m.breaker
	}
	if g.err != nil {
		return g.admitAll
	}
	return g.add(key)
}

// Len returns how many breakers there are.
func (g *Group) Len() int {
	index := g.index.Load()
	if index == nil {
		return 0
	}
	return len(*index)
}

// All returns the keys and breakers as they are when the iteration starts, in order of the keys.
// It does not count as use.
func (g *Group) All() iter.Seq2[string, *Breaker] {
	return func(yield func(string, *Breaker) bool) {
		index := g.index.Load()
		if index == nil {
			return
		}
		for _, key := range slices.Sorted(maps.Keys(*index)) {
			if !yield(key, (*index)[key].breaker) {
				return
			}
		}
	}
}

func (g *Group) lookup(key string) (*member, bool) {
	if m := g.only.Load(); m != nil && m.key == key {
		return m, true
	}
	index := g.index.Load()
	if index == nil {
		return nil, false
	}
	m, ok := (*index)[key]
	return m, ok
}

func (g *Group) add(key string) *Breaker {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m, ok := g.lookup(key); ok {
		return m.breaker // another goroutine was quicker
	}

	key = strings.Clone(key) // may be a small part of something large
	cfg := g.cfg
	cfg.Name = key
	m := &member{key: key, breaker: New(cfg)}
	m.used.Store(true)

	index := make(map[string]*member)
	if old := g.index.Load(); old != nil {
		index = maps.Clone(*old)
	}
	if len(g.members) < orDefault(g.max, DefaultGroupMax) {
		g.members = append(g.members, m)
	} else {
		i := g.victimLocked()
		delete(index, g.members[i].key)
		g.members[i] = m
		g.hand = i + 1
	}
	index[key] = m
	if len(index) == 1 {
		g.only.Store(m)
	} else {
		g.only.Store(nil)
	}
	g.index.Store(&index)
	return m.breaker
}

// victimLocked returns the index of the member to drop: the first of the lowest rank from the hand
// on. Marks are cleared on the way, so that whoever is not asked for until the hand comes round
// goes before those who are.
func (g *Group) victimLocked() int {
	best, bestRank := 0, lastRank+1
	for step := range g.members {
		i := (g.hand + step) % len(g.members)
		m := g.members[i]
		rank := rankOf(m.breaker.State())
		if !m.used.Swap(false) && rank == 0 {
			return i
		}
		if rank < bestRank {
			best, bestRank = i, rank
		}
	}
	return best
}

const lastRank = 2

// rankOf orders states by how much is lost with a breaker.
func rankOf(s State) int {
	switch s {
	case Open, HalfOpen:
		return 1
	case ForcedOpen, ForcedClosed:
		return lastRank
	case Closed:
		return 0
	default:
		return 0
	}
}
