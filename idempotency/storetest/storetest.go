//nolint:thelper // the functions that take a store are the tests themselves: a failure is theirs
package storetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// Run checks a store against the contract of idempotency.Store. NewStore
// returns a ready store; its records may be shared between tests, which use
// identities that nobody else has, except that Sweep takes whatever it finds.
func Run(t *testing.T, newStore func(t *testing.T) idempotency.Store, opts ...Option) {
	t.Helper()
	s := newSuite(newStore, opts)
	s.test(t, "Check", s.testCheck)
	s.test(t, "ClaimIsValidated", s.testClaimIsValidated)
	s.test(t, "ClaimIsGrantedOnce", s.testClaimIsGrantedOnce)
	s.test(t, "ContextCarriesTheEpoch", s.testContextCarriesTheEpoch)
	s.test(t, "ExecutionOutlivesTheClaimsContext", s.testExecutionOutlivesTheClaimsContext)
	s.test(t, "OutcomeIsKeptByteForByte", s.testOutcomeIsKept)
	s.test(t, "IdentitiesAreBytes", s.testIdentitiesAreBytes)
	s.test(t, "ReleaseFreesTheKey", s.testReleaseFreesTheKey)
	s.test(t, "AbandonIsUnknown", s.testAbandonIsUnknown)
	s.test(t, "MismatchComesFirst", s.testMismatchComesFirst)
	s.test(t, "AlternateFingerprintsMatch", s.testAlternatesMatch)
	s.test(t, "LateClaimsTakeNothingNew", s.testLateClaims)
	s.test(t, "DoneNeverChanges", s.testDoneNeverChanges)
	s.test(t, "OneOfManyIsGranted", s.testOneOfMany)
	s.test(t, "Resolve", s.testResolve)
	s.test(t, "RetentionRunsFromTheFinish", s.testRetentionRunsFromTheFinish)
	s.test(t, "SweepTakesOnlyWhatIsOver", s.testSweep)
	s.test(t, "Model", s.testModel)
	if !s.atomic {
		s.test(t, "EndingTwiceIsTheSame", s.testEndingTwice)
	}
	if s.noLease {
		return
	}
	s.test(t, "OwnerMayClaimAgain", s.testOwnerMayClaimAgain)
	s.test(t, "RenewKeepsTheClaim", s.testRenewKeepsTheClaim)
	s.test(t, "FinishAfterTheLease", s.testFinishAfterTheLease)
	s.test(t, "RecordOutlivesTheLease", s.testRecordOutlivesTheLease)
	s.test(t, "TakeoverLeavesTheFirstOwnerNothing", s.testTakeover)
	s.test(t, "ExpiredClaimIsTakenOnce", s.testExpiredClaimIsTakenOnce)
	if !s.atomic {
		s.test(t, "LeaseOverIsUnknown", s.testLeaseOverIsUnknown)
	}
}

// claim returns a claim on a new identity. Its lease does not run out in a test
// that does not wait for it, and its retention is longer still.
func (s *suite) claim() idempotency.Claim {
	c := idempotency.Claim{
		Owner: newOwner(), Fingerprint: "\x01\x00one\xff\x00request", Scope: "storetest", Method: "/storetest.Store/Test",
		Lease: time.Minute, Retention: time.Hour,
	}
	_, _ = rand.Read(c.ID[:])
	return c
}

// another returns the same call's claim by somebody else.
func another(c idempotency.Claim) idempotency.Claim {
	c.Owner = newOwner()
	return c
}

func newOwner() idempotency.Owner {
	var o idempotency.Owner
	_, _ = rand.Read(o[:])
	return o
}

func outcome(text string) *idempotency.Outcome { return &idempotency.Outcome{Data: []byte(text)} }

// tb is what the helpers need of a test, or of one run of a property.
type tb interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

func begin(t tb, store idempotency.Store, c idempotency.Claim) (idempotency.Execution, *idempotency.Record) {
	t.Helper()
	exec, rec, err := store.Begin(context.Background(), c)
	if err != nil {
		t.Fatalf("Begin: %v", err)
	}
	if (exec == nil) == (rec == nil) {
		t.Fatalf("Begin returned execution %v and record %v: want exactly one", exec, rec)
	}
	return exec, rec
}

func mustGrant(t tb, store idempotency.Store, c idempotency.Claim) idempotency.Execution {
	t.Helper()
	exec, rec := begin(t, store, c)
	if exec == nil {
		t.Fatalf("Begin returned a record in state %v (mismatch %v): want an execution", rec.State, rec.Mismatch)
	}
	return exec
}

func mustRecord(t tb, store idempotency.Store, c idempotency.Claim, want idempotency.State) *idempotency.Record {
	t.Helper()
	exec, rec := begin(t, store, c)
	if rec == nil {
		_ = exec.Release(context.Background())
		t.Fatalf("Begin granted the claim: want a record in state %v", want)
	}
	if rec.State != want || rec.Mismatch {
		t.Fatalf("Begin returned state %v, mismatch %v: want %v, no mismatch", rec.State, rec.Mismatch, want)
	}
	return rec
}

func mustReplay(t tb, store idempotency.Store, c idempotency.Claim, want string) {
	t.Helper()
	rec := mustRecord(t, store, c, idempotency.StateDone)
	if rec.Outcome == nil || string(rec.Outcome.Data) != want {
		t.Fatalf("the record's outcome is %v: want data %q", rec.Outcome, want)
	}
}

func mustFinish(t tb, exec idempotency.Execution, data string) {
	t.Helper()
	rec, err := exec.Finish(context.Background(), outcome(data))
	if err != nil {
		t.Fatalf("Finish: %v", err)
	}
	mustStand(t, rec, data)
}

func mustStand(t tb, rec *idempotency.Record, data string) {
	t.Helper()
	if rec == nil || rec.State != idempotency.StateDone || rec.Outcome == nil || string(rec.Outcome.Data) != data {
		t.Fatalf("the record that stands is %+v: want DONE with data %q", rec, data)
	}
}

func mustDo(t tb, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func mustFail(t tb, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s returned %v: want %v", what, err, want)
	}
}

// mustBeLost checks that no step of an execution counts any more.
func mustBeLost(t tb, exec idempotency.Execution) {
	t.Helper()
	ctx := context.Background()
	_, err := exec.Renew(ctx)
	mustFail(t, "Renew of a lost claim", err, idempotency.ErrLost)
	rec, err := exec.Finish(ctx, outcome("too late"))
	mustFail(t, "Finish of a lost claim", err, idempotency.ErrLost)
	if rec != nil {
		t.Errorf("Finish of a lost claim returned record %+v: want none", rec)
	}
	mustFail(t, "Release of a lost claim", exec.Release(ctx), idempotency.ErrLost)
	mustFail(t, "Abandon of a lost claim", exec.Abandon(ctx), idempotency.ErrLost)
}

func (s *suite) testCheck(t *testing.T, store idempotency.Store) {
	mustDo(t, "Check", store.Check(context.Background()))
}

func (s *suite) testClaimIsValidated(t *testing.T, store idempotency.Store) {
	for name, spoil := range map[string]func(*idempotency.Claim){
		"no owner":          func(c *idempotency.Claim) { c.Owner = idempotency.Owner{} },
		"no fingerprint":    func(c *idempotency.Claim) { c.Fingerprint = "" },
		"no lease":          func(c *idempotency.Claim) { c.Lease = 0 },
		"negative lease":    func(c *idempotency.Claim) { c.Lease = -1 },
		"short retention":   func(c *idempotency.Claim) { c.Retention = c.Lease },
		"neither of either": func(c *idempotency.Claim) { c.Lease, c.Retention = 0, 0 },
	} {
		c := s.claim()
		spoil(&c)
		if exec, rec, err := store.Begin(context.Background(), c); err == nil {
			t.Errorf("Begin with %s returned %v, %v and no error", name, exec, rec)
		}
	}
}

func (s *suite) testClaimIsGrantedOnce(t *testing.T, store idempotency.Store) {
	c := s.claim()
	exec := mustGrant(t, store, c)
	if exec.Atomic() != s.atomic {
		t.Errorf("Atomic is %v: the suite was told %v", exec.Atomic(), s.atomic)
	}
	rec := mustRecord(t, store, another(c), idempotency.StateRunning)
	if rec.RetryIn < 0 || rec.RetryIn > c.Lease || (rec.RetryIn == 0 && !s.noLease) {
		t.Errorf("RetryIn is %v: want more than 0 and at most the lease, %v", rec.RetryIn, c.Lease)
	}
	mustFinish(t, exec, "done")
	mustReplay(t, store, another(c), "done")
}

func (s *suite) testContextCarriesTheEpoch(t *testing.T, store idempotency.Store) {
	exec := mustGrant(t, store, s.claim())
	if epoch := idempotency.Epoch(exec.Context(context.Background())); epoch != 1 {
		t.Errorf("the first execution's epoch is %d: want 1", epoch)
	}
	mustDo(t, "Release", exec.Release(context.Background()))
}

func (s *suite) testExecutionOutlivesTheClaimsContext(t *testing.T, store idempotency.Store) {
	c := s.claim()
	ctx, cancel := context.WithCancel(context.Background())
	exec, _, err := store.Begin(ctx, c)
	mustDo(t, "Begin", err)
	cancel()
	mustFinish(t, exec, "done")
	mustReplay(t, store, another(c), "done")
}

func (s *suite) testOutcomeIsKept(t *testing.T, store idempotency.Store) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	for _, data := range [][]byte{every, {0}, []byte("it's \"quoted\" \\ %s"), bytes.Repeat([]byte{0xff, 0}, 40<<10)} {
		c := s.claim()
		given := idempotency.Outcome{Data: bytes.Clone(data)}
		rec, err := mustGrant(t, store, c).Finish(context.Background(), &given)
		mustDo(t, "Finish", err)
		clear(given.Data) // the store has kept a copy, or this is seen below
		given = idempotency.Outcome{Data: []byte("another's"), Undo: true}
		mustStand(t, rec, string(data))
		mustReplay(t, store, another(c), string(data))
	}
}

func (s *suite) testIdentitiesAreBytes(t *testing.T, store idempotency.Store) {
	base := s.claim()
	base.ID[0], base.ID[31] = 'a', 'a'
	ids := append(make([]idempotency.ID, 0, 11), base.ID)
	for _, i := range []int{0, 31} {
		for _, b := range []byte{'A', 0, ' ', 0xff, 'a' | 0x80} {
			id := base.ID
			id[i] = b
			ids = append(ids, id)
		}
	}
	for i, id := range ids {
		c := another(base)
		c.ID = id
		mustFinish(t, mustGrant(t, store, c), string(rune('A'+i)))
	}
	for i, id := range ids {
		c := another(base)
		c.ID = id
		mustReplay(t, store, c, string(rune('A'+i)))
	}
}

func (s *suite) testReleaseFreesTheKey(t *testing.T, store idempotency.Store) {
	c := s.claim()
	mustDo(t, "Release", mustGrant(t, store, c).Release(context.Background()))
	exec := mustGrant(t, store, another(c))
	if epoch := idempotency.Epoch(exec.Context(context.Background())); epoch != 2 && !s.noLease {
		t.Errorf("the second execution's epoch is %d: want 2", epoch)
	}
	mustFinish(t, exec, "second")
	mustReplay(t, store, another(c), "second")
}

func (s *suite) testAbandonIsUnknown(t *testing.T, store idempotency.Store) {
	c := s.claim()
	mustDo(t, "Abandon", mustGrant(t, store, c).Abandon(context.Background()))
	mustRecord(t, store, another(c), idempotency.StateUnknown)

	rerun := another(c)
	rerun.Rerun = true
	mustFinish(t, mustGrant(t, store, rerun), "again")
	mustReplay(t, store, another(c), "again")
}

// inState brings a new identity into a state.
func (s *suite) inState(t tb, store idempotency.Store, state idempotency.State) (idempotency.Claim, idempotency.Execution) {
	t.Helper()
	ctx := context.Background()
	c := s.claim()
	exec := mustGrant(t, store, c)
	switch state {
	case idempotency.StateRunning:
	case idempotency.StateDone:
		mustFinish(t, exec, "done")
	case idempotency.StateFree:
		mustDo(t, "Release", exec.Release(ctx))
	case idempotency.StateUnknown:
		mustDo(t, "Abandon", exec.Abandon(ctx))
	case idempotency.StateCancelled:
		mustDo(t, "Abandon", exec.Abandon(ctx))
		mustDo(t, "Resolve", store.Resolve(ctx, c.ID, idempotency.Resolution{State: state}))
	case idempotency.StateAbsent:
		t.Fatalf("storetest: no claim is absent")
	}
	return c, exec
}

func (s *suite) testMismatchComesFirst(t *testing.T, store idempotency.Store) {
	for _, state := range []idempotency.State{
		idempotency.StateRunning, idempotency.StateDone, idempotency.StateFree, idempotency.StateUnknown, idempotency.StateCancelled,
	} {
		c, exec := s.inState(t, store, state)
		for _, rerun := range []bool{false, true} {
			other := another(c)
			other.Fingerprint, other.Rerun = "\x01\x00other", rerun
			if s.noLease && (state == idempotency.StateRunning || state == idempotency.StateFree) {
				continue // the row is not there for others to read
			}
			got, rec := begin(t, store, other)
			if got != nil {
				t.Fatalf("%v: another request was granted the key", state)
			}
			if !rec.Mismatch || rec.Fingerprint != c.Fingerprint {
				t.Errorf("%v: mismatch is %v, fingerprint %q: want true and the stored one", state, rec.Mismatch, rec.Fingerprint)
			}
			if rec.Outcome != nil {
				t.Errorf("%v: another request was shown the outcome", state)
			}
		}
		if state == idempotency.StateRunning {
			mustFinish(t, exec, "done")
		}
	}
	if s.noLease {
		return
	}
	// A lease that is over is no door either: neither a takeover, nor UNKNOWN.
	c := s.claim()
	c.Lease = s.lease
	exec := mustGrant(t, store, c)
	s.wait(2 * s.lease)
	other := another(c)
	other.Fingerprint, other.Rerun = "\x01\x00other", true
	if got, rec := begin(t, store, other); got != nil || !rec.Mismatch {
		t.Fatalf("after the lease, another request got %v, %+v: want a mismatch", got, rec)
	}
	mustFinish(t, exec, "done")
	mustReplay(t, store, another(c), "done")
}

func (s *suite) testAlternatesMatch(t *testing.T, store idempotency.Store) {
	c := s.claim()
	mustFinish(t, mustGrant(t, store, c), "done")
	rotated := another(c)
	rotated.Fingerprint = "\x01\x03newsecret"
	rotated.Alternates = []idempotency.Fingerprint{"\x01\x03oldersecret", c.Fingerprint}
	mustReplay(t, store, rotated, "done")
}

func (s *suite) testLateClaims(t *testing.T, store idempotency.Store) {
	c := s.claim()
	late := another(c)
	late.Late = true
	mustRecord(t, store, late, idempotency.StateAbsent)
	mustRecord(t, store, late, idempotency.StateAbsent) // and left nothing behind

	exec := mustGrant(t, store, c)
	if epoch := idempotency.Epoch(exec.Context(context.Background())); epoch != 1 {
		t.Errorf("the epoch after a late claim is %d: want 1", epoch)
	}
	if !s.noLease {
		late.Owner = newOwner()
		mustRecord(t, store, late, idempotency.StateRunning)
		mustDo(t, "Release", exec.Release(context.Background()))
		exec = mustGrant(t, store, late) // a record that is there proves that nothing was swept
	}
	mustFinish(t, exec, "done")
	late.Owner = newOwner()
	mustReplay(t, store, late, "done")
}

func (s *suite) testDoneNeverChanges(t *testing.T, store idempotency.Store) {
	ctx := context.Background()
	c, exec := s.inState(t, store, idempotency.StateDone)
	if !s.atomic {
		rec, err := exec.Finish(ctx, outcome("another"))
		mustDo(t, "Finish again", err)
		mustStand(t, rec, "done")
		mustFail(t, "Release of DONE", exec.Release(ctx), idempotency.ErrLost)
		mustFail(t, "Abandon of DONE", exec.Abandon(ctx), idempotency.ErrLost)
		_, err = exec.Renew(ctx)
		mustFail(t, "Renew of DONE", err, idempotency.ErrLost)
	}
	for _, r := range []idempotency.Resolution{
		{State: idempotency.StateFree},
		{State: idempotency.StateCancelled},
		{State: idempotency.StateDone, Outcome: outcome("another")},
	} {
		mustFail(t, "Resolve of DONE", store.Resolve(ctx, c.ID, r), idempotency.ErrNotResolvable)
	}
	again := another(c)
	again.Rerun = true
	mustReplay(t, store, again, "done")
	c.Rerun = true
	mustReplay(t, store, c, "done") // by the same owner
}

func (s *suite) testOneOfMany(t *testing.T, store idempotency.Store) {
	const callers = 32
	c := s.claim()
	var granted atomic.Int32
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			exec, rec := begin(t, store, another(c))
			switch {
			case exec != nil:
				granted.Add(1)
				mustFinish(t, exec, "done")
			case rec.State != idempotency.StateRunning && rec.State != idempotency.StateDone:
				t.Errorf("a duplicate got state %v: want RUNNING or DONE", rec.State)
			}
		})
	}
	wg.Wait()
	if n := granted.Load(); n != 1 {
		t.Errorf("%d of %d concurrent claims were granted: want 1", n, callers)
	}
	mustReplay(t, store, another(c), "done")
}

func (s *suite) testEndingTwice(t *testing.T, store idempotency.Store) {
	ctx := context.Background()
	_, done := s.inState(t, store, idempotency.StateDone)
	rec, err := done.Finish(ctx, outcome("done"))
	mustDo(t, "Finish again", err)
	mustStand(t, rec, "done")

	_, free := s.inState(t, store, idempotency.StateFree)
	mustDo(t, "Release again", free.Release(ctx))

	_, unknown := s.inState(t, store, idempotency.StateUnknown)
	mustDo(t, "Abandon again", unknown.Abandon(ctx))
}

func (s *suite) testResolve(t *testing.T, store idempotency.Store) {
	ctx := context.Background()
	to := func(state idempotency.State) idempotency.Resolution {
		r := idempotency.Resolution{State: state, Retention: time.Hour}
		if state == idempotency.StateDone {
			r.Outcome = outcome("resolved")
		}
		return r
	}

	c, exec := s.inState(t, store, idempotency.StateUnknown)
	mustDo(t, "UNKNOWN to DONE", store.Resolve(ctx, c.ID, to(idempotency.StateDone)))
	mustReplay(t, store, another(c), "resolved")
	if !s.atomic {
		rec, err := exec.Finish(ctx, outcome("late"))
		mustDo(t, "late Finish", err)
		mustStand(t, rec, "resolved")
	}

	c, exec = s.inState(t, store, idempotency.StateUnknown)
	mustDo(t, "UNKNOWN to FREE", store.Resolve(ctx, c.ID, to(idempotency.StateFree)))
	if !s.atomic {
		mustBeLost(t, exec)
	}
	mustFinish(t, mustGrant(t, store, another(c)), "run again")

	c, _ = s.inState(t, store, idempotency.StateUnknown)
	mustDo(t, "UNKNOWN to CANCELLED", store.Resolve(ctx, c.ID, to(idempotency.StateCancelled)))
	mustDo(t, "CANCELLED to CANCELLED", store.Resolve(ctx, c.ID, to(idempotency.StateCancelled)))
	mustFail(t, "CANCELLED to FREE", store.Resolve(ctx, c.ID, to(idempotency.StateFree)), idempotency.ErrNotResolvable)
	rerun := another(c)
	rerun.Rerun = true
	mustRecord(t, store, rerun, idempotency.StateCancelled)

	c = s.claim() // where there is no record, a tombstone keeps the delayed original out, whatever it says
	mustDo(t, "none to CANCELLED", store.Resolve(ctx, c.ID, to(idempotency.StateCancelled)))
	mustRecord(t, store, c, idempotency.StateCancelled)

	c, _ = s.inState(t, store, idempotency.StateFree)
	mustDo(t, "FREE to CANCELLED", store.Resolve(ctx, c.ID, to(idempotency.StateCancelled)))
	mustRecord(t, store, another(c), idempotency.StateCancelled)

	mustFail(t, "none to FREE", store.Resolve(ctx, s.claim().ID, to(idempotency.StateFree)), idempotency.ErrNotResolvable)
	if !s.noLease {
		c, exec = s.inState(t, store, idempotency.StateRunning)
		for _, state := range []idempotency.State{idempotency.StateDone, idempotency.StateFree, idempotency.StateCancelled} {
			mustFail(t, "RUNNING to "+state.String(), store.Resolve(ctx, c.ID, to(state)), idempotency.ErrNotResolvable)
		}
		mustFinish(t, exec, "done")
	}
	for name, r := range map[string]idempotency.Resolution{
		"to RUNNING":            {State: idempotency.StateRunning},
		"to DONE, no outcome":   {State: idempotency.StateDone},
		"to FREE, with outcome": {State: idempotency.StateFree, Outcome: outcome("x")},
		"negative retention":    {State: idempotency.StateFree, Retention: -1},
	} {
		if err := store.Resolve(ctx, c.ID, r); err == nil || errors.Is(err, idempotency.ErrNotResolvable) {
			t.Errorf("Resolve %s returned %v: want an error about the resolution", name, err)
		}
	}
}

func (s *suite) testRetentionRunsFromTheFinish(t *testing.T, store idempotency.Store) {
	c := s.claim()
	c.Lease, c.Retention = s.lease, 4*s.lease
	exec := mustGrant(t, store, c)
	s.wait(3 * s.lease)
	mustFinish(t, exec, "done")
	s.wait(2 * s.lease) // past the claim's retention, within the finish's
	sweep(t, store)
	mustReplay(t, store, another(c), "done")
	s.wait(3 * s.lease)
	sweep(t, store)
	mustFinish(t, mustGrant(t, store, another(c)), "new")
}

func sweep(t tb, store idempotency.Store) int {
	t.Helper()
	n, err := store.Sweep(context.Background(), 1000)
	mustDo(t, "Sweep", err)
	return n
}

func (s *suite) testSweep(t *testing.T, store idempotency.Store) {
	ctx := context.Background()
	for _, limit := range []int{0, -1} {
		if _, err := store.Sweep(ctx, limit); err == nil {
			t.Errorf("Sweep(%d) returned no error", limit)
		}
	}
	s.wait(5 * s.lease)
	for n := 1; n > 0; { // what earlier tests left in a shared database, and is over by now
		n = sweep(t, store)
	}

	short := func() idempotency.Claim {
		c := s.claim()
		c.Lease, c.Retention = s.lease, 2*s.lease
		return c
	}
	running, unknown, free, cancelled := short(), short(), short(), short()
	var done [3]idempotency.Claim
	exec := mustGrant(t, store, running)
	mustDo(t, "Abandon", mustGrant(t, store, unknown).Abandon(ctx))
	mustDo(t, "Release", mustGrant(t, store, free).Release(ctx))
	mustDo(t, "Resolve", store.Resolve(ctx, cancelled.ID, idempotency.Resolution{State: idempotency.StateCancelled, Retention: 2 * s.lease}))
	for i := range done {
		done[i] = short()
		mustFinish(t, mustGrant(t, store, done[i]), "done")
	}
	kept, _ := s.inState(t, store, idempotency.StateDone)

	if n := sweep(t, store); n != 0 {
		t.Errorf("Sweep took %d records within their retention", n)
	}
	s.wait(3 * s.lease)
	first, err := store.Sweep(ctx, 2)
	mustDo(t, "Sweep", err)
	if first > 2 {
		t.Errorf("Sweep with limit 2 took %d", first)
	}
	total := first
	for n := sweep(t, store); n > 0; n = sweep(t, store) {
		total += n
	}
	want := len(done) + 2 // and FREE, CANCELLED
	if s.noLease {
		if total != want && total != want-1 { // a release may have left no record
			t.Errorf("Sweep took %d records: want %d or %d", total, want-1, want)
		}
	} else if total != want {
		t.Errorf("Sweep took %d records: want %d", total, want)
	}

	for _, c := range append(done[:], free, cancelled) {
		mustDo(t, "Release", mustGrant(t, store, another(c)).Release(ctx))
	}
	mustRecord(t, store, another(unknown), idempotency.StateUnknown)
	mustReplay(t, store, another(kept), "done")
	mustFinish(t, exec, "late") // its record was not swept
	mustReplay(t, store, another(running), "late")
}

func (s *suite) testOwnerMayClaimAgain(t *testing.T, store idempotency.Store) {
	c := s.claim()
	c.Lease = s.lease
	mustGrant(t, store, c) // its reply is lost
	exec := mustGrant(t, store, c)
	if epoch := idempotency.Epoch(exec.Context(context.Background())); epoch != 1 {
		t.Errorf("the epoch of a repeated claim is %d: want 1, it is the same claim", epoch)
	}
	mustRecord(t, store, another(c), idempotency.StateRunning)
	if !s.atomic {
		s.wait(2 * s.lease)
		mustRecord(t, store, another(c), idempotency.StateUnknown)
		exec = mustGrant(t, store, c) // nobody else was authorised meanwhile
		mustRecord(t, store, another(c), idempotency.StateRunning)
	}
	mustFinish(t, exec, "done")
	mustReplay(t, store, c, "done")
}

func (s *suite) testRenewKeepsTheClaim(t *testing.T, store idempotency.Store) {
	c := s.claim()
	c.Lease = s.lease
	exec := mustGrant(t, store, c)
	rival := another(c)
	rival.Rerun = true
	for range 4 {
		s.wait(s.lease * 2 / 3)
		left, err := exec.Renew(context.Background())
		mustDo(t, "Renew", err)
		if left <= 0 || left > c.Lease {
			t.Errorf("Renew returned %v: want more than 0 and at most the lease, %v", left, c.Lease)
		}
		mustRecord(t, store, rival, idempotency.StateRunning)
	}
	if !s.atomic {
		s.wait(2 * s.lease)
		mustRecord(t, store, another(c), idempotency.StateUnknown)
		_, err := exec.Renew(context.Background())
		mustDo(t, "Renew of UNKNOWN by its owner", err)
		mustRecord(t, store, rival, idempotency.StateRunning)
	}
	mustFinish(t, exec, "done")
}

func (s *suite) testFinishAfterTheLease(t *testing.T, store idempotency.Store) {
	c := s.claim()
	c.Lease = s.lease
	finished, released := mustGrant(t, store, c), another(c)
	released.ID[5]++
	exec := mustGrant(t, store, released)
	s.wait(2 * s.lease)
	mustFinish(t, finished, "late")
	mustReplay(t, store, another(c), "late")
	mustDo(t, "Release after the lease", exec.Release(context.Background()))
	mustFinish(t, mustGrant(t, store, another(released)), "again")
}

func (s *suite) testRecordOutlivesTheLease(t *testing.T, store idempotency.Store) {
	c := s.claim()
	c.Lease, c.Retention = s.lease, 3*s.lease
	exec := mustGrant(t, store, c)
	s.wait(4 * s.lease) // even the retention: a claim is nobody's to sweep
	sweep(t, store)
	mustFinish(t, exec, "late")
	mustReplay(t, store, another(c), "late")
}

func (s *suite) testLeaseOverIsUnknown(t *testing.T, store idempotency.Store) {
	c := s.claim()
	c.Lease = s.lease
	exec := mustGrant(t, store, c)
	s.wait(2 * s.lease)
	mustRecord(t, store, another(c), idempotency.StateUnknown)
	mustRecord(t, store, another(c), idempotency.StateUnknown)
	mustFinish(t, exec, "late") // by the owner that the record kept
	mustReplay(t, store, another(c), "late")
}

func (s *suite) testTakeover(t *testing.T, store idempotency.Store) {
	c := s.claim()
	c.Lease = s.lease
	first := mustGrant(t, store, c)
	s.wait(2 * s.lease)
	rival := another(c)
	rival.Rerun, rival.Lease = true, time.Minute
	second := mustGrant(t, store, rival)
	if epoch := idempotency.Epoch(second.Context(context.Background())); epoch != 2 {
		t.Errorf("the epoch after a takeover is %d: want 2", epoch)
	}
	if s.atomic {
		// One end for one execution: a transaction has no second.
		_, err := first.Finish(context.Background(), outcome("too late"))
		mustFail(t, "Finish of a lost claim", err, idempotency.ErrLost)
	} else {
		mustBeLost(t, first)
	}
	mustRecord(t, store, another(c), idempotency.StateRunning)
	mustFinish(t, second, "second")
	mustReplay(t, store, another(c), "second")
	if s.atomic {
		return
	}
	rec, err := first.Finish(context.Background(), outcome("too late"))
	mustDo(t, "Finish after another's", err)
	mustStand(t, rec, "second")
}

func (s *suite) testExpiredClaimIsTakenOnce(t *testing.T, store idempotency.Store) {
	const rivals = 16
	c := s.claim()
	c.Lease = s.lease
	mustGrant(t, store, c)
	s.wait(2 * s.lease)
	var granted atomic.Int32
	var wg sync.WaitGroup
	for range rivals {
		wg.Go(func() {
			rival := another(c)
			rival.Rerun, rival.Lease = true, time.Minute
			exec, rec := begin(t, store, rival)
			switch {
			case exec != nil:
				granted.Add(1)
			case rec.State != idempotency.StateRunning:
				t.Errorf("a rival got state %v: want RUNNING", rec.State)
			}
		})
	}
	wg.Wait()
	if n := granted.Load(); n != 1 {
		t.Errorf("%d rivals took over one expired claim: want 1", n)
	}
}
