package idempotency

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

const (
	// DefaultMemoryBytes is MemoryConfig.MaxBytes when it is zero.
	DefaultMemoryBytes = 64 << 20

	// DefaultMemoryRetention is how long the memory store keeps a record when
	// Config.Retention is zero.
	DefaultMemoryRetention = 10 * time.Minute

	// entryOverhead is what an entry costs beside its data: the struct, its
	// share of the map and of the queue.
	entryOverhead = 320

	// sweepOnBegin is how many expired records one Begin takes out. More than
	// one, or a store that was once full of expired records would stay so.
	sweepOnBegin = 2
)

// MemoryConfig configures a MemoryStore. The zero value is ready to use.
type MemoryConfig struct {
	// MaxBytes bounds the records' size. Zero means 64 MiB; negative is an
	// error. When it is reached, new keys are refused with ErrFull: a record is
	// never dropped to make room, since its call could then run twice. The
	// outcome of a call that was let in is always stored, so the bound may be
	// exceeded by MaxReply per execution under way.
	MaxBytes int64
}

// MemoryStore keeps records in this process: at most one execution of a key at
// a time, and none after one that succeeded, while the process lives. It is for
// tests and for a server of one instance whose keys need not survive a restart.
//
// It is not atomic (it cannot undo what a handler did), releases the key on a
// transient error (see Config.OnTransientError), and keeps records for 10
// minutes by default. Expired records are swept by Begin as it goes; RunSweeper
// is not needed. It starts no goroutine and is safe for concurrent use.
type MemoryStore struct {
	maxBytes int64

	mu      sync.Mutex // guards what follows
	entries map[ID]*memoryEntry
	expiry  expiryQueue // the entries that may be swept: DONE, FREE, CANCELLED
	bytes   int64
}

type memoryEntry struct {
	id          ID
	owner       Owner
	fingerprint Fingerprint
	state       State
	epoch       uint64
	until       time.Time // end of the lease
	retention   time.Duration
	expires     time.Time
	created     time.Time
	data        []byte // of the outcome
	index       int    // in the expiry queue, -1 outside
}

// NewMemoryStore returns an empty store. A wrong configuration is reported by
// Validate, which NewEngine calls, by Check, and by every Begin.
func NewMemoryStore(cfg MemoryConfig) *MemoryStore {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultMemoryBytes
	}
	return &MemoryStore{maxBytes: cfg.MaxBytes, entries: make(map[ID]*memoryEntry)}
}

// Validate reports a configuration that breaks its rule.
func (s *MemoryStore) Validate() error {
	if s == nil || s.entries == nil {
		return errors.New("idempotency: a MemoryStore must be made with NewMemoryStore")
	}
	if s.maxBytes < 0 {
		return fmt.Errorf("idempotency: MemoryConfig.MaxBytes is %d: must not be negative", s.maxBytes)
	}
	return nil
}

// Check implements Store. Memory needs nothing but a valid configuration.
func (s *MemoryStore) Check(context.Context) error { return s.Validate() }

// Traits implements Described.
func (s *MemoryStore) Traits() Traits {
	return Traits{Retention: DefaultMemoryRetention, Immediate: true, ReleaseOnError: true}
}

// MemoryStats is a snapshot of a MemoryStore.
type MemoryStats struct {
	// Records and Bytes held, expired ones included.
	Records int
	Bytes   int64
	// Unknown records, which only Resolve ends.
	Unknown int
}

// Stats returns a snapshot, for a page or a gauge. It reads every record.
func (s *MemoryStore) Stats() MemoryStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := MemoryStats{Records: len(s.entries), Bytes: s.bytes}
	for _, en := range s.entries {
		if en.state == StateUnknown {
			stats.Unknown++
		}
	}
	return stats
}

// Begin implements Store.
func (s *MemoryStore) Begin(_ context.Context, c Claim) (Execution, *Record, error) {
	if err := s.Validate(); err != nil {
		return nil, nil, err
	}
	if err := c.Validate(); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.beginLocked(&c, time.Now())
}

// beginLocked is the table of the Store's documentation, line by line.
func (s *MemoryStore) beginLocked(c *Claim, now time.Time) (Execution, *Record, error) {
	s.sweepLocked(now, sweepOnBegin)
	en := s.entries[c.ID]
	if en != nil && en.expiredAt(now) {
		s.removeLocked(en)
		en = nil
	}
	switch {
	case en == nil && c.Late:
		return nil, &Record{State: StateAbsent}, nil
	case en == nil:
		return s.createLocked(c, now)
	case !c.Accepts(en.fingerprint):
		return nil, &Record{State: en.state, Mismatch: true, Fingerprint: en.fingerprint}, nil
	}
	switch en.state {
	case StateFree:
		return s.grantLocked(en, c, now, en.epoch+1), nil, nil
	case StateRunning, StateUnknown:
		return s.contendLocked(en, c, now)
	default:
		return nil, en.record(now), nil
	}
}

// contendLocked decides about a record that somebody holds.
func (s *MemoryStore) contendLocked(en *memoryEntry, c *Claim, now time.Time) (Execution, *Record, error) {
	over := en.state == StateUnknown || !now.Before(en.until)
	switch {
	case en.owner == c.Owner:
		return s.grantLocked(en, c, now, en.epoch), nil, nil
	case over && c.Rerun:
		return s.grantLocked(en, c, now, en.epoch+1), nil, nil
	case over:
		// The owner stays: it may still come back with the outcome, and nobody
		// else was authorised meanwhile.
		en.state = StateUnknown
	}
	return nil, en.record(now), nil
}

func (s *MemoryStore) createLocked(c *Claim, now time.Time) (Execution, *Record, error) {
	if cost := int64(entryOverhead + len(c.Fingerprint)); s.bytes+cost > s.maxBytes {
		return nil, nil, fmt.Errorf("%w: %d bytes of %d are used", ErrFull, s.bytes, s.maxBytes)
	}
	en := &memoryEntry{id: c.ID, fingerprint: c.Fingerprint, created: now, index: -1}
	s.entries[c.ID] = en
	s.bytes += en.size()
	return s.grantLocked(en, c, now, 1), nil, nil
}

func (s *MemoryStore) grantLocked(en *memoryEntry, c *Claim, now time.Time, epoch uint64) Execution {
	s.unqueueLocked(en)
	en.state, en.owner, en.epoch = StateRunning, c.Owner, epoch
	en.until = now.Add(c.Lease)
	en.retention = c.Retention
	en.expires = now.Add(c.Retention)
	return &memoryExecution{store: s, id: c.ID, owner: c.Owner, epoch: epoch, lease: c.Lease}
}

// Sweep implements Store.
func (s *MemoryStore) Sweep(_ context.Context, limit int) (int, error) {
	if limit < 1 {
		return 0, fmt.Errorf("idempotency: Sweep: limit is %d: must be at least 1", limit)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sweepLocked(time.Now(), limit), nil
}

func (s *MemoryStore) sweepLocked(now time.Time, limit int) int {
	n := 0
	for n < limit && len(s.expiry) > 0 && s.expiry[0].expiredAt(now) {
		s.removeLocked(s.expiry[0])
		n++
	}
	return n
}

// Resolve implements Store.
func (s *MemoryStore) Resolve(_ context.Context, id ID, r Resolution) error {
	if err := r.Validate(); err != nil {
		return err
	}
	retention := r.Retention
	if retention == 0 {
		retention = DefaultRetention
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	en := s.entries[id]
	if en != nil && en.expiredAt(now) {
		s.removeLocked(en)
		en = nil
	}
	switch {
	case en == nil && r.State == StateCancelled:
		if s.bytes+entryOverhead > s.maxBytes {
			return fmt.Errorf("%w: %d bytes of %d are used", ErrFull, s.bytes, s.maxBytes)
		}
		en = &memoryEntry{id: id, created: now, index: -1}
		s.entries[id] = en
		s.bytes += en.size()
	case en == nil:
		return fmt.Errorf("%w: there is no record", ErrNotResolvable)
	case en.state == StateCancelled && r.State == StateCancelled:
		return nil
	case en.state == StateUnknown, en.state == StateRunning && !now.Before(en.until), en.state == StateFree && r.State == StateCancelled:
	default:
		return fmt.Errorf("%w: it is %v", ErrNotResolvable, en.state)
	}
	en.retention = retention
	s.closeLocked(en, r.State, now)
	en.owner = Owner{} // the former owner's late word no longer counts
	if r.State == StateDone {
		s.keepLocked(en, r.Outcome.Data)
	}
	return nil
}

// closeLocked puts an entry into a state that may be swept.
func (s *MemoryStore) closeLocked(en *memoryEntry, state State, now time.Time) {
	en.state = state
	en.expires = now.Add(en.retention)
	s.unqueueLocked(en)
	heap.Push(&s.expiry, en)
}

func (s *MemoryStore) keepLocked(en *memoryEntry, data []byte) {
	s.bytes -= en.size()
	en.data = append([]byte{}, data...)
	s.bytes += en.size()
}

func (s *MemoryStore) removeLocked(en *memoryEntry) {
	s.unqueueLocked(en)
	delete(s.entries, en.id)
	s.bytes -= en.size()
}

func (s *MemoryStore) unqueueLocked(en *memoryEntry) {
	if en.index >= 0 {
		heap.Remove(&s.expiry, en.index)
	}
}

func (en *memoryEntry) size() int64 {
	return int64(entryOverhead + len(en.fingerprint) + len(en.data))
}

// expiredAt reports whether the entry may be swept. RUNNING and UNKNOWN never
// may, whatever their age.
func (en *memoryEntry) expiredAt(now time.Time) bool {
	return en.state != StateRunning && en.state != StateUnknown && !now.Before(en.expires)
}

func (en *memoryEntry) record(now time.Time) *Record {
	made := &struct {
		record  Record
		outcome Outcome // its own, where it has one
	}{record: Record{State: en.state, Fingerprint: en.fingerprint, Epoch: en.epoch, Created: en.created}}
	rec := &made.record
	switch en.state { //nolint:exhaustive // the other states have nothing to add
	case StateRunning:
		rec.RetryIn = max(0, en.until.Sub(now))
	case StateDone:
		// The data is never written again (R8), and readers only read.
		made.outcome.Data = slices.Clip(en.data)
		rec.Outcome = &made.outcome
	}
	return rec
}

// memoryExecution is one granted claim. It holds no state of its own: whether it
// still counts is the entry's to say.
type memoryExecution struct {
	store *MemoryStore
	id    ID
	owner Owner
	epoch uint64
	lease time.Duration
}

func (x *memoryExecution) Context(ctx context.Context) context.Context {
	return ContextWithEpoch(ctx, x.epoch)
}

func (x *memoryExecution) Atomic() bool { return false }

// heldLocked returns the entry when it still has this owner, in whatever state.
func (x *memoryExecution) heldLocked() (*memoryEntry, error) {
	en := x.store.entries[x.id]
	if en == nil || en.owner != x.owner {
		return nil, ErrLost
	}
	return en, nil
}

func (x *memoryExecution) Renew(context.Context) (time.Duration, error) {
	x.store.mu.Lock()
	defer x.store.mu.Unlock()
	en, err := x.heldLocked()
	if err != nil {
		return 0, err
	}
	if en.state != StateRunning && en.state != StateUnknown {
		return 0, ErrLost
	}
	now := time.Now()
	en.state = StateRunning
	en.until = now.Add(x.lease)
	return x.lease, nil
}

func (x *memoryExecution) Finish(_ context.Context, o *Outcome) (*Record, error) {
	if o == nil {
		return nil, errors.New("idempotency: Finish: outcome is nil: must be set")
	}
	s := x.store
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	en, err := x.heldLocked()
	if err != nil {
		// Another owner's outcome, if there is one, is the call's.
		if other := s.entries[x.id]; other != nil && other.state == StateDone {
			return other.record(now), nil
		}
		return nil, err
	}
	switch en.state {
	case StateRunning, StateUnknown:
		s.keepLocked(en, o.Data)
		s.closeLocked(en, StateDone, now)
	case StateDone: // our own, whose reply was lost (R4): it stands as it is (R8)
	default:
		return nil, ErrLost
	}
	return en.record(now), nil
}

func (x *memoryExecution) Release(context.Context) error { return x.end(StateFree) }

func (x *memoryExecution) Abandon(context.Context) error { return x.end(StateUnknown) }

// end leaves the record without an outcome. Repeating it is the same (R4).
func (x *memoryExecution) end(state State) error {
	s := x.store
	s.mu.Lock()
	defer s.mu.Unlock()
	en, err := x.heldLocked()
	if err != nil {
		return err
	}
	switch {
	case en.state == state:
		return nil
	case en.state != StateRunning && en.state != StateUnknown:
		return ErrLost
	case state == StateFree:
		s.closeLocked(en, StateFree, time.Now())
	default:
		en.state = StateUnknown
	}
	return nil
}

// expiryQueue is a heap of entries by the time at which they expire.
type expiryQueue []*memoryEntry //nolint:recvcheck // the shape that container/heap asks for

func (q expiryQueue) Len() int           { return len(q) }
func (q expiryQueue) Less(i, j int) bool { return q[i].expires.Before(q[j].expires) }
func (q expiryQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push and Pop implement heap.Interface, whose values are of this type only.
func (q *expiryQueue) Push(v any) {
	en := v.(*memoryEntry) //nolint:forcetypeassert // see above
	en.index = len(*q)
	*q = append(*q, en)
}

func (q *expiryQueue) Pop() any {
	old := *q
	en := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	en.index = -1
	return en
}

var _ interface {
	Store
	Described
} = (*MemoryStore)(nil)
