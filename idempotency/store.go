package idempotency

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Store keeps one record per identity and decides who may run a call.
//
// The rules, which package storetest checks on any implementation:
//
//   - R1. Every transition is ONE atomic step of the store, guarded by the
//     record's state and owner. Read-then-write in two steps is not a store.
//   - R2. Leases and retention are measured by the store's clock, never by the
//     caller's: app hosts disagree, the store agrees with itself. A store
//     inside a SQL transaction must not use a clock that the transaction froze.
//   - R3. Retention runs from the claim and starts again at the finish. The
//     lease is a field of the record, never its time to live: a record outlives
//     its lease.
//   - R4. Finish, Release and Abandon are idempotent for the owner: a repeated
//     call whose first reply was lost succeeds.
//   - R5. The lease ends being a promise, not being an owner: Finish, Release
//     and Abandon succeed after it as long as the record still has their owner,
//     in state RUNNING or UNKNOWN.
//   - R6. A claim by the owner that the record already has is the same claim:
//     Begin returns the Execution again (RUNNING and UNKNOWN), not "in flight".
//     A reply that was lost on the way must not lock its own sender out.
//   - R7. A row that conflicted and is then gone is no permission to run: claim
//     again. Nothing runs without a record of its own that is durable as far as
//     the store promises (or, in a store that records in the handler's own
//     transaction, without the uncommitted row that blocks every rival).
//   - R8. DONE never changes, until Sweep removes it after its retention.
//
// What Begin decides, the first line that applies:
//
//	record                             | Begin returns
//	none, c.Late                       | Record{State: StateAbsent}; nothing is written
//	none                               | Execution, epoch 1
//	fingerprint not c.Accepts(stored)  | Record{Mismatch: true}, in EVERY state, before anything below
//	DONE                               | Record{StateDone, Outcome}
//	CANCELLED                          | Record{StateCancelled}
//	FREE                               | Execution, epoch+1
//	RUNNING or UNKNOWN, owner c.Owner  | Execution, same epoch, lease started again (R6)
//	RUNNING, lease live                | Record{StateRunning, RetryIn}
//	RUNNING, lease over, atomic store  | Execution, new owner, epoch+1 (the old owner can no longer commit)
//	RUNNING, lease over, c.Rerun       | Execution, new owner, epoch+1
//	RUNNING, lease over                | the record becomes UNKNOWN, KEEPING its owner; Record{StateUnknown}
//	UNKNOWN, c.Rerun                   | Execution, new owner, epoch+1
//	UNKNOWN                            | Record{StateUnknown}
//
// A record whose retention is over may be answered from until Sweep removes it,
// or count as none; it must not count as none a moment before.
//
// A Store is safe for concurrent use. It starts no goroutine of its own.
type Store interface {
	// Begin claims the identity or returns the record that stands in the way:
	// exactly one of the first two results when the error is nil.
	//
	// The Execution outlives ctx, which bounds the claim only: a store that ties
	// a transaction to it detaches it first (context.WithoutCancel).
	//
	// ErrBusy and ErrFull say that nothing was claimed; ErrCorrupt that the
	// record cannot be read. Any other error leaves open whether the claim
	// landed: the caller claims again with the same owner (R6).
	Begin(ctx context.Context, c Claim) (Execution, *Record, error)

	// Check verifies what the store needs before it is relied on: the schema,
	// no eviction of live records, durability. It runs at start, not per call.
	Check(ctx context.Context) error

	// Sweep removes at most limit records whose retention is over and reports
	// how many. It never removes RUNNING or UNKNOWN, however old: the first is
	// somebody's claim, the second is a question that only Resolve answers.
	// A limit below 1 is an error. RunSweeper calls it in a loop.
	Sweep(ctx context.Context, limit int) (int, error)

	// Resolve is for a person on call, or a reconciler, who has found out what
	// became of a call: it turns UNKNOWN, or RUNNING whose lease is over, into
	// DONE, FREE or CANCELLED. CANCELLED is also written over FREE and where
	// there is no record, so that a delayed original cannot run either; over
	// CANCELLED it is a no-op. Everything else is ErrNotResolvable, DONE above
	// all (R8). The former owner is gone: its late Finish is ErrLost, or returns
	// the record that stands.
	Resolve(ctx context.Context, id ID, r Resolution) error
}

// Execution is the right to run one call once. The engine that got it from
// Begin ends it with exactly one of Finish, Release and Abandon (each of which
// it may repeat after an error when Atomic is false).
//
// Renew may run concurrently with the handler and with Context; the three that
// end it run after the handler has returned, one at a time.
type Execution interface {
	// Context returns the context that the handler sees: the store's
	// transaction, if it has one, and the epoch (ContextWithEpoch).
	Context(ctx context.Context) context.Context

	// Atomic reports whether Release undoes every effect that the handler had
	// through Context: true for a transaction, false where the effect and the
	// record live apart.
	Atomic() bool

	// Renew starts the lease again and returns how much of it is left; UNKNOWN of
	// the same owner is RUNNING again, since nobody else was authorised and the
	// owner is evidently alive. A store without leases returns 0 and nil.
	// ErrLost: the record has another owner, or is gone; the handler must stop.
	Renew(ctx context.Context) (time.Duration, error)

	// Finish records the outcome, RUNNING or UNKNOWN → DONE, and, in an atomic
	// store, commits the handler's writes in the same step, or undoes them when
	// o.Undo is set (the verdict is kept, its writes are not).
	//
	// It returns the record that STANDS: ours, or the DONE record of another
	// owner that was faster, whose outcome is then everybody's answer.
	//
	// ErrLost: the record has another owner, or is gone, and no outcome stands.
	// ErrConflict: the database refused to commit; everything is undone and the
	// key is free. ErrInDoubt: the commit was sent and its fate is not known.
	// Any other error of an ATOMIC store means that nothing was committed, so a
	// store that is not sure must say ErrInDoubt; of a non-atomic store it means
	// that the record was not written as far as the store knows.
	//
	// The store does not keep o, nor write to it: it is part of the engine's
	// record of the call, all of which would stay with it. Of o.Data it keeps a
	// copy.
	Finish(ctx context.Context, o *Outcome) (*Record, error)

	// Release gives the key back, RUNNING or UNKNOWN → FREE: the execution
	// provably had no effect, or its effects are undone by this very call
	// (Atomic). The fingerprint and the epoch stay. ErrLost as for Finish;
	// nothing of the new owner's is touched. Whatever it returns, an atomic
	// store has not committed and will not commit the effects. A store that
	// records in the handler's own transaction may leave no record at all, which
	// says the same less the fingerprint and the epoch.
	Release(ctx context.Context) error

	// Abandon records that nobody knows whether there was an effect, RUNNING →
	// UNKNOWN, keeping the owner. An atomic store first undoes what it can and
	// then records UNKNOWN in a step of its own: the handler has said that it
	// had effects elsewhere. ErrLost as for Finish.
	Abandon(ctx context.Context) error
}

// Described is implemented by stores whose engine defaults differ from a
// leased, durable, non-atomic store's. It is read once, by NewEngine.
type Described interface {
	Traits() Traits
}

// Traits are a store's own defaults. The zero value is the careful one.
type Traits struct {
	// Retention is used when Config.Retention is zero. Zero means 24 hours.
	Retention time.Duration

	// NoLease says that an execution is bound to something better than a lease,
	// such as the connection of its transaction: the engine sends no renewals
	// and does not stop the handler when Claim.Lease is over.
	NoLease bool

	// Immediate says that no step of the store ever blocks, so that the engine
	// spares it the contexts with deadlines that bound a store across a network.
	Immediate bool

	// ReleaseOnError says that a handler that RETURNED an error of the transient
	// kind frees the key, though the store is not atomic. See
	// Config.OnTransientError.
	ReleaseOnError bool
}

// ID is the identity of a keyed call: see IDOf. It holds no secret and no text
// of the key, so it may be logged and looked up.
type ID [32]byte

// String returns the ID as 64 lower-case hexadecimal digits.
func (id ID) String() string { return hex.EncodeToString(id[:]) }

// ParseID reads what ID.String printed, for tools that look a record up.
func ParseID(s string) (ID, error) {
	var id ID
	if len(s) != 2*len(id) {
		return ID{}, fmt.Errorf("idempotency: ID has %d characters: must be %d hexadecimal digits", len(s), 2*len(id))
	}
	if _, err := hex.Decode(id[:], []byte(s)); err != nil {
		return ID{}, fmt.Errorf("idempotency: ID %q: must be hexadecimal: %w", s, err)
	}
	return id, nil
}

// Owner names one claim: 128 random bits that no two claims share. A store
// compares it, and never interprets it.
type Owner [16]byte

// Fingerprint tells requests with one key apart. It is opaque to a store, which
// keeps it byte for byte and compares it with Claim.Accepts: it says itself
// which version of the algorithm and which secret made it.
type Fingerprint string

// Claim asks for the right to run one call.
type Claim struct {
	// ID is the record's primary key: 32 bytes, compared as bytes.
	ID ID

	// Owner is new for every call of the state machine and the same for every
	// repetition of one claim (R6).
	Owner Owner

	// Fingerprint of the request, kept with the record. It is never empty.
	Fingerprint Fingerprint

	// Alternates are fingerprints of the same request made with other secrets
	// or versions, so that a record from before a rotation still matches.
	Alternates []Fingerprint

	// Scope and Method are for operators and metrics; both are already in ID.
	// A store may keep them and must not decide by them.
	Scope, Method string

	// Lease is for how long the claim is respected without a renewal. Positive.
	Lease time.Duration

	// Retention is for how long, at least, the record is kept: from the claim,
	// and again from the finish. Positive, and longer than Lease.
	Retention time.Duration

	// Late says that the key is so old that its record may already have been
	// swept: absence proves nothing, so absence must not be claimed.
	Late bool

	// Rerun declares that the effect is itself keyed or naturally idempotent,
	// so an execution whose end is unknown may be run again. Atomic stores do
	// not need it and ignore it for RUNNING.
	Rerun bool
}

// Accepts reports whether a record with the stored fingerprint belongs to the
// same request as c. The empty fingerprint belongs to a record that nobody
// claimed (CANCELLED where there was none) and matches every request.
func (c *Claim) Accepts(stored Fingerprint) bool {
	if stored == "" || stored == c.Fingerprint {
		return true
	}
	return slices.Contains(c.Alternates, stored)
}

// Validate reports the first field of c that no store may be given. A store
// calls it first thing in Begin: a lease of zero would never end.
func (c *Claim) Validate() error {
	switch {
	case c.Owner == Owner{}:
		return errors.New("idempotency: Claim.Owner is zero: must be random")
	case c.Fingerprint == "":
		return errors.New("idempotency: Claim.Fingerprint is empty: must be set")
	case c.Lease <= 0:
		return fmt.Errorf("idempotency: Claim.Lease is %v: must be positive", c.Lease)
	case c.Retention <= c.Lease:
		return fmt.Errorf("idempotency: Claim.Retention is %v: must be longer than Lease (%v)", c.Retention, c.Lease)
	}
	return nil
}

// State is what a record says about its call. The numbers are stored.
type State uint8

// The states of a record.
const (
	// StateAbsent: there is no record. Stores return it for a late claim only.
	StateAbsent State = 0
	// StateRunning: one execution is authorised.
	StateRunning State = 1
	// StateDone: the outcome is final.
	StateDone State = 2
	// StateFree: provably no effect; the next claim runs. The fingerprint is kept.
	StateFree State = 3
	// StateUnknown: an execution ended without a verdict. Nobody runs it again
	// until Resolve, a late Finish by its owner, or a claim with Rerun.
	StateUnknown State = 4
	// StateCancelled: a tombstone; the call never runs.
	StateCancelled State = 5
)

// String returns the state's name in upper case, as the documentation has it.
func (s State) String() string {
	switch s {
	case StateAbsent:
		return "ABSENT"
	case StateRunning:
		return "RUNNING"
	case StateDone:
		return "DONE"
	case StateFree:
		return "FREE"
	case StateUnknown:
		return "UNKNOWN"
	case StateCancelled:
		return "CANCELLED"
	default:
		return fmt.Sprintf("State(%d)", uint8(s))
	}
}

// Record is what stands in a claim's way, or what stands after a Finish. The
// caller owns it; a store hands out no memory that it will change.
type Record struct {
	// State of the record.
	State State

	// Mismatch says that the key was used for another request: nothing else of
	// the record may be revealed, and State and Fingerprint are all that is set.
	Mismatch bool

	// Fingerprint as stored.
	Fingerprint Fingerprint

	// Epoch counts the executions authorised so far, from 1.
	Epoch uint64

	// RetryIn, for StateRunning: how much of the holder's lease is left, by the
	// store's clock. Zero when the store has no lease; never negative.
	RetryIn time.Duration

	// Outcome, for StateDone.
	Outcome *Outcome

	// Created is when the identity was first claimed, by the store's clock.
	// Zero when the store does not keep it.
	Created time.Time
}

// Outcome is the verdict on a call, as a store sees it.
type Outcome struct {
	// Data is an encoded belay.v1.Outcome (NewOutcome), kept byte for byte.
	Data []byte

	// Undo says that the verdict is an error, so an atomic store keeps the
	// verdict and undoes the handler's own writes. It is an instruction to
	// Finish and is not stored.
	Undo bool
}

// Resolution is a person's verdict on a call whose outcome is UNKNOWN.
type Resolution struct {
	// State is StateDone, StateFree or StateCancelled.
	State State

	// Outcome is what later calls are answered; required with StateDone and
	// forbidden otherwise. See NewOutcome.
	Outcome *Outcome

	// Retention from now. Zero means 24 hours.
	Retention time.Duration
}

// Validate reports the first field of r that breaks its rule.
func (r *Resolution) Validate() error {
	switch {
	case r.State != StateDone && r.State != StateFree && r.State != StateCancelled:
		return fmt.Errorf("idempotency: Resolution.State is %v: must be DONE, FREE or CANCELLED", r.State)
	case r.State == StateDone && r.Outcome == nil:
		return errors.New("idempotency: Resolution.Outcome is nil: must be set when State is DONE")
	case r.State != StateDone && r.Outcome != nil:
		return fmt.Errorf("idempotency: Resolution.Outcome is set: must be nil when State is %v", r.State)
	case r.Retention < 0:
		return fmt.Errorf("idempotency: Resolution.Retention is %v: must not be negative", r.Retention)
	}
	return nil
}

// Errors of stores. They are matched with errors.Is; stores wrap them.
var (
	// ErrLost is returned when the record has another owner or is gone: the
	// caller's execution is over and nothing it does counts any more.
	ErrLost = errors.New("idempotency: the claim was lost to another owner")

	// ErrInDoubt is returned by Finish when the commit was sent and neither
	// success nor failure could be established in time.
	ErrInDoubt = errors.New("idempotency: the fate of the commit is not known")

	// ErrConflict is returned by Finish when the database refused the commit
	// (serialization, a deferred constraint): all undone, the key is free.
	ErrConflict = errors.New("idempotency: the transaction was refused and rolled back")

	// ErrBusy is returned by Begin when the store has no capacity for another
	// execution just now (its share of a connection pool): nothing was claimed.
	ErrBusy = errors.New("idempotency: the store is busy")

	// ErrFull is returned by Begin when a bounded store has no room for a new
	// key: nothing was claimed. Live records are never evicted to make room.
	ErrFull = errors.New("idempotency: the store is full")

	// ErrCorrupt is returned by Begin when a record exists and cannot be read.
	// The call must not run: nobody can say that it has not already.
	ErrCorrupt = errors.New("idempotency: the record is corrupt")

	// ErrNotResolvable is returned by Resolve when the record's state is not
	// one that a resolution may end.
	ErrNotResolvable = errors.New("idempotency: the record cannot be resolved")
)

type epochKey struct{}

// ContextWithEpoch returns a context that carries the epoch of an execution.
// Stores call it in Execution.Context.
func ContextWithEpoch(ctx context.Context, epoch uint64) context.Context {
	return context.WithValue(ctx, epochKey{}, epoch)
}

// Epoch returns the epoch of the execution that ctx belongs to, from 1, or 0
// outside one. It grows with every execution of one identity, so a resource
// that remembers the highest it has seen can turn a stale writer away. That
// stops stale writers only: an execution that takes over has a higher epoch,
// and only an effect that is itself unique per key stops a duplicate.
func Epoch(ctx context.Context) uint64 {
	epoch, _ := ctx.Value(epochKey{}).(uint64)
	return epoch
}
