package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/belayrpc/belay/idempotency"
)

var (
	bg       = context.Background()
	errStore = errors.New("connection refused")
)

// What each return of a handler means for the record, the reply and the next
// call, on both kinds of stores.
func TestFateOfAHandlersReturn(t *testing.T) {
	type want struct {
		executed idempotency.Executed // of the first reply
		next     string               // run, replay or unknown
	}
	const maybe, no = idempotency.ExecutedMaybe, idempotency.ExecutedNo
	for _, row := range []struct {
		name          string
		res           idempotency.Result
		split, atomic want
	}{
		{"Final(UNAVAILABLE)", failing(code.Code_UNAVAILABLE, idempotency.Final), want{maybe, "replay"}, want{no, "replay"}},
		{"NoEffect(INTERNAL)", failing(code.Code_INTERNAL, idempotency.NoEffect), want{no, "run"}, want{no, "run"}},
		{"NoEffect(NOT_FOUND)", failing(code.Code_NOT_FOUND, idempotency.NoEffect), want{no, "run"}, want{no, "run"}},
		{"UnknownEffect(UNAVAILABLE)", failing(code.Code_UNAVAILABLE, idempotency.UnknownEffect), want{maybe, "unknown"}, want{maybe, "unknown"}},
		{"INVALID_ARGUMENT", failing(code.Code_INVALID_ARGUMENT, nil), want{maybe, "replay"}, want{no, "replay"}},
		{"NOT_FOUND", failing(code.Code_NOT_FOUND, nil), want{maybe, "replay"}, want{no, "replay"}},
		{"ALREADY_EXISTS", failing(code.Code_ALREADY_EXISTS, nil), want{maybe, "replay"}, want{no, "replay"}},
		{"PERMISSION_DENIED", failing(code.Code_PERMISSION_DENIED, nil), want{maybe, "replay"}, want{no, "replay"}},
		{"FAILED_PRECONDITION", failing(code.Code_FAILED_PRECONDITION, nil), want{maybe, "replay"}, want{no, "replay"}},
		{"OUT_OF_RANGE", failing(code.Code_OUT_OF_RANGE, nil), want{maybe, "replay"}, want{no, "replay"}},
		{"UNIMPLEMENTED", failing(code.Code_UNIMPLEMENTED, nil), want{maybe, "replay"}, want{no, "replay"}},
		{"UNAVAILABLE", failing(code.Code_UNAVAILABLE, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"ABORTED", failing(code.Code_ABORTED, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"RESOURCE_EXHAUSTED", failing(code.Code_RESOURCE_EXHAUSTED, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"UNAUTHENTICATED", failing(code.Code_UNAUTHENTICATED, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"CANCELLED", failing(code.Code_CANCELLED, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"DEADLINE_EXCEEDED", failing(code.Code_DEADLINE_EXCEEDED, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"INTERNAL", failing(code.Code_INTERNAL, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"DATA_LOSS", failing(code.Code_DATA_LOSS, nil), want{maybe, "unknown"}, want{no, "run"}},
		{"a plain Go error", idempotency.Result{Err: errors.New("plain")}, want{maybe, "unknown"}, want{no, "run"}},
		{"a code of the future", failing(code.Code(99), nil), want{maybe, "unknown"}, want{no, "run"}},
	} {
		for _, atomicStore := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/atomic=%v", row.name, atomicStore), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					store := newFaulty()
					store.atomic = atomicStore
					e, _ := newEngine(t, store)
					w := row.split
					if atomicStore {
						w = row.atomic
					}
					c := code.Code(row.res.Status.GetCode())
					if row.res.Status == nil {
						c = code.Code_UNKNOWN
					}
					first := do(bg, e, "k", answering(row.res))
					wantError(t, first, c, idempotency.MarkExecuted, w.executed)
					if first.Err != row.res.Err { //nolint:errorlint // the very value, marks and all
						t.Errorf("the error is %v: want the handler's own", first.Err)
					}
					switch w.next {
					case "run":
						wantOK(t, do(bg, e, "k", answering(ok("next"))), "next", idempotency.MarkExecuted)
					case "replay":
						again := do(bg, e, "k", never(t))
						wantError(t, again, c, idempotency.MarkReplayed, maybe)
						if again.Status.GetMessage() != row.res.Status.GetMessage() || again.Completed.IsZero() {
							t.Errorf("the replay is %v, completed %v", again.Status, again.Completed)
						}
					default:
						wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonOutcomeUnknown)
					}
				})
			})
		}
	}
}

func TestTransientPolicy(t *testing.T) {
	for _, row := range []struct {
		releases bool
		policy   idempotency.TransientPolicy
		code     code.Code
		free     bool
	}{
		{true, idempotency.TransientStoreDefault, code.Code_UNAVAILABLE, true},
		{true, idempotency.TransientStoreDefault, code.Code_RESOURCE_EXHAUSTED, true},
		{true, idempotency.TransientStoreDefault, code.Code_INTERNAL, false},
		{true, idempotency.TransientStoreDefault, code.Code_CANCELLED, false},
		{true, idempotency.TransientUnknown, code.Code_UNAVAILABLE, false},
		{false, idempotency.TransientStoreDefault, code.Code_UNAVAILABLE, false},
		{false, idempotency.TransientRelease, code.Code_UNAVAILABLE, true},
		{false, idempotency.TransientRelease, code.Code_DEADLINE_EXCEEDED, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			store := newFaulty()
			store.traits.ReleaseOnError = row.releases
			e, _ := newEngine(t, store, func(c *idempotency.Config) { c.OnTransientError = row.policy })
			wantError(t, do(bg, e, "k", answering(failing(row.code, nil))), row.code, idempotency.MarkExecuted, idempotency.ExecutedMaybe)
			if row.free {
				wantOK(t, do(bg, e, "k", answering(ok("next"))), "next", idempotency.MarkExecuted)
			} else {
				wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonOutcomeUnknown)
			}
		})
	}
}

func TestUnknownIsWaitedForWhereItIsReconciled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t), func(c *idempotency.Config) { c.UnknownRetryAfter = 2 * time.Second })
		do(bg, e, "k", answering(failing(code.Code_INTERNAL, nil)))
		r := do(bg, e, "k", never(t))
		if r.Refusal == nil || r.Refusal.Reason != idempotency.ReasonOutcomeUnknown || r.Refusal.Code != code.Code_ABORTED ||
			r.Refusal.RetryAfter < 2*time.Second || r.Refusal.RetryAfter > 3*time.Second {
			t.Errorf("the call got %+v: want ABORTED OUTCOME_UNKNOWN after 2 to 3 s", r.Refusal)
		}
	})
}

func TestResolvedRecordsAreReplayed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory(t)
		e, _ := newEngine(t, store)
		for _, key := range []string{"done", "failed", "free", "cancelled"} {
			do(bg, e, key, answering(failing(code.Code_INTERNAL, nil)))
		}
		resolve := func(key string, r idempotency.Resolution) {
			t.Helper()
			if err := store.Resolve(bg, idOf(key), r); err != nil {
				t.Fatal(err)
			}
		}
		done, err := idempotency.NewOutcome(wrapperspb.String("found in the ledger"), nil)
		if err != nil {
			t.Fatal(err)
		}
		notDone, err := idempotency.NewOutcome(nil, failing(code.Code_ABORTED, nil).Status)
		if err != nil {
			t.Fatal(err)
		}
		resolve("done", idempotency.Resolution{State: idempotency.StateDone, Outcome: done})
		resolve("failed", idempotency.Resolution{State: idempotency.StateDone, Outcome: notDone})
		resolve("free", idempotency.Resolution{State: idempotency.StateFree})
		resolve("cancelled", idempotency.Resolution{State: idempotency.StateCancelled})
		wantOK(t, do(bg, e, "done", never(t)), "found in the ledger", idempotency.MarkReplayed)
		wantError(t, do(bg, e, "failed", never(t)), code.Code_ABORTED, idempotency.MarkReplayed, idempotency.ExecutedMaybe)
		wantOK(t, do(bg, e, "free", answering(ok("again"))), "again", idempotency.MarkExecuted)
		wantRefusal(t, do(bg, e, "cancelled", never(t)), idempotency.ReasonKeyCancelled)
		if _, err := idempotency.NewOutcome(wrapperspb.String("x"), failing(code.Code_ABORTED, nil).Status); err == nil {
			t.Error("NewOutcome takes a response and an error status")
		}
	})
}

// The handler's context has its caller's values and not its end.
func TestExecutionIsDetached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		e, rec := newEngine(t, newMemory(t), func(c *idempotency.Config) { c.MaxExecution = 10 * time.Second })
		ctx, cancel := context.WithTimeout(context.WithValue(bg, key{}, "value"), time.Second)
		defer cancel()
		start := time.Now()
		var deadline time.Time
		r := do(ctx, e, "k", func(ctx context.Context) idempotency.Result {
			deadline, _ = ctx.Deadline()
			if ctx.Value(key{}) != "value" || idempotency.Epoch(ctx) != 1 {
				t.Errorf("value %v, epoch %d: want value, 1", ctx.Value(key{}), idempotency.Epoch(ctx))
			}
			time.Sleep(3 * time.Second)
			if ctx.Err() != nil {
				t.Errorf("the handler's context has ended: %v", context.Cause(ctx))
			}
			return ok("done")
		})
		if r.Refusal == nil || r.Refusal.Code != code.Code_DEADLINE_EXCEEDED || r.Refusal.Reason != idempotency.ReasonCallerGone {
			t.Errorf("the caller got %v: want DEADLINE_EXCEEDED, CALLER_GONE", r.Refusal)
		}
		if waited := time.Since(start); waited != time.Second {
			t.Errorf("the caller waited %v: want its own deadline, 1 s", waited)
		}
		wantOK(t, do(bg, e, "k", never(t)), "done", idempotency.MarkJoined)
		wantOK(t, do(bg, e, "k", never(t)), "done", idempotency.MarkReplayed)
		if want := start.Add(10*time.Second - idempotency.DefaultFinishReserve); !deadline.Equal(want) {
			t.Errorf("the handler's deadline is %v: want MaxExecution less FinishReserve, %v", deadline, want)
		}
		if n := rec.count(idempotency.EventOverrun); n != 0 {
			t.Errorf("%d overruns: want 0", n)
		}
	})
}

func TestMaxExecutionEndsTheHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, rec := newEngine(t, newMemory(t), func(c *idempotency.Config) { c.MaxExecution = 10 * time.Second })
		r := do(bg, e, "obeys", func(ctx context.Context) idempotency.Result {
			<-ctx.Done()
			if cause := context.Cause(ctx); !errors.Is(cause, idempotency.ErrMaxExecution) || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				t.Errorf("the context ended with %v, %v: want DeadlineExceeded, ErrMaxExecution", ctx.Err(), cause)
			}
			return failing(code.Code_UNAVAILABLE, nil) // it was stopped: not its word that nothing happened
		})
		wantError(t, r, code.Code_UNAVAILABLE, idempotency.MarkExecuted, idempotency.ExecutedMaybe)
		wantRefusal(t, do(bg, e, "obeys", never(t)), idempotency.ReasonOutcomeUnknown)

		late := do(bg, e, "ignores", func(context.Context) idempotency.Result {
			time.Sleep(time.Minute)
			return ok("late")
		})
		wantOK(t, late, "late", idempotency.MarkExecuted)
		wantOK(t, do(bg, e, "ignores", never(t)), "late", idempotency.MarkReplayed)
		if n := rec.count(idempotency.EventOverrun); n != 1 {
			t.Errorf("%d overruns: want 1", n)
		}
	})
}

// R5: a handler that outlives its lease keeps it by renewing.
func TestLeaseIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		renewals := 0
		store.renew = func(ctx context.Context, step func(context.Context) (time.Duration, error)) (time.Duration, error) {
			renewals++
			return step(ctx)
		}
		leased := func(c *idempotency.Config) {
			c.Lease, c.MaxExecution, c.WaitMax = 3*time.Second, time.Minute, 100*time.Millisecond
		}
		e, _ := newEngine(t, store, leased)
		elsewhere, _ := newEngine(t, store, leased)
		reply := make(chan idempotency.Reply, 1)
		go func() {
			reply <- do(bg, e, "k", func(ctx context.Context) idempotency.Result {
				time.Sleep(20500 * time.Millisecond)
				if ctx.Err() != nil {
					t.Errorf("the handler's context has ended: %v", context.Cause(ctx))
				}
				return ok("slow")
			})
		}()
		time.Sleep(20 * time.Second)
		wantRefusal(t, do(bg, elsewhere, "k", never(t)), idempotency.ReasonInFlight)
		wantOK(t, <-reply, "slow", idempotency.MarkExecuted)
		if renewals != 20 {
			t.Errorf("%d renewals in 20.5 s: want one a second, 20", renewals)
		}
	})
}

// R5: a lease that cannot be renewed is given up before the store gives it
// away, counted from when the claim was sent.
func TestLeaseThatCannotBeRenewedIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			exec, rec, err := step(ctx, c)
			time.Sleep(500 * time.Millisecond) // the reply takes its time
			return exec, rec, err
		}
		store.renew = func(ctx context.Context, _ func(context.Context) (time.Duration, error)) (time.Duration, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}
		e, rec := newEngine(t, store, func(c *idempotency.Config) { c.Lease, c.FinishReserve = 3*time.Second, 100*time.Millisecond })
		start := time.Now()
		r := do(bg, e, "k", func(ctx context.Context) idempotency.Result {
			<-ctx.Done()
			if cause := context.Cause(ctx); !errors.Is(cause, idempotency.ErrLeaseLost) {
				t.Errorf("the cause is %v: want ErrLeaseLost", cause)
			}
			if after := time.Since(start); after != 2900*time.Millisecond {
				t.Errorf("the handler was stopped after %v: want the lease less the reserve, 2.9 s from the sending", after)
			}
			return failing(code.Code_CANCELLED, nil)
		})
		wantRefusal(t, r, idempotency.ReasonOutcomeUnknown) // and not the CANCELLED that we caused
		if rec.count(idempotency.EventLeaseLost) != 1 || rec.count(idempotency.EventRenewFailed) == 0 {
			t.Errorf("events %v: want one lease_lost and renew_failed before", rec.kinds())
		}
	})
}

// R5: who hears that the claim is another's stops at once.
func TestLostLeaseStopsTheHandler(t *testing.T) {
	for _, atomicStore := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store := newFaulty()
			store.atomic = atomicStore
			store.renew = func(context.Context, func(context.Context) (time.Duration, error)) (time.Duration, error) {
				return 0, fmt.Errorf("row gone: %w", idempotency.ErrLost)
			}
			e, _ := newEngine(t, store)
			start := time.Now()
			r := do(bg, e, "k", func(ctx context.Context) idempotency.Result {
				<-ctx.Done()
				if after := time.Since(start); after != 10*time.Second || !errors.Is(context.Cause(ctx), idempotency.ErrLeaseLost) {
					t.Errorf("stopped after %v with %v: want the first renewal, 10 s, ErrLeaseLost", after, context.Cause(ctx))
				}
				return failing(code.Code_CANCELLED, nil)
			})
			want := idempotency.ReasonOutcomeUnknown
			if atomicStore {
				want = idempotency.ReasonLeaseLost
			}
			wantRefusal(t, r, want)
		})
	}
}

func TestNoRenewalAfterTheHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		renewing, finished := false, false
		store.renew = func(ctx context.Context, _ func(context.Context) (time.Duration, error)) (time.Duration, error) {
			renewing = true
			<-ctx.Done()
			time.Sleep(time.Second)
			renewing = false
			if finished {
				t.Error("a renewal ended after the finish")
			}
			return 0, ctx.Err()
		}
		store.finish = func(ctx context.Context, o *idempotency.Outcome, step finishStep) (*idempotency.Record, error) {
			if renewing {
				t.Error("the finish began beside a renewal")
			}
			finished = true
			return step(ctx, o)
		}
		e, _ := newEngine(t, store)
		wantOK(t, do(bg, e, "k", func(context.Context) idempotency.Result {
			time.Sleep(11 * time.Second)
			return ok("done")
		}), "done", idempotency.MarkExecuted)
		time.Sleep(time.Minute)
	})
}

// R4: what ends an execution has a context of its own, alive though the
// caller's is not, and bounded though the store hangs.
func TestFinishIsDetachedAndBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		hang := false
		store.finish = func(ctx context.Context, o *idempotency.Outcome, step finishStep) (*idempotency.Record, error) {
			if ctx.Err() != nil {
				t.Errorf("Finish got a context that has ended: %v", ctx.Err())
			}
			if hang {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return step(ctx, o)
		}
		e, rec := newEngine(t, store)
		ctx, cancel := context.WithCancel(bg)
		do(ctx, e, "k", func(context.Context) idempotency.Result {
			cancel()
			time.Sleep(time.Second)
			return ok("done")
		})
		wantOK(t, do(bg, e, "k", never(t)), "done", idempotency.MarkJoined)

		hang = true
		start := time.Now()
		wantUnrecorded(t, do(bg, e, "hung", answering(ok("done"))))
		if took := time.Since(start); took != idempotency.DefaultStoreTimeout {
			t.Errorf("the store hung for %v: want StoreTimeout", took)
		}
		if rec.count(idempotency.EventUnrecorded) != 1 {
			t.Errorf("events %v: want one unrecorded", rec.kinds())
		}
	})
}

func wantUnrecorded(t *testing.T, r idempotency.Reply) {
	t.Helper()
	if r.Refusal != nil || r.Mark != idempotency.MarkUnrecorded || r.Executed != idempotency.ExecutedYes {
		t.Errorf("the call got %v, %q: want its own reply, unrecorded", r.Refusal, r.Mark)
	}
}

// R4: a finish whose reply is lost is sent again and is the same.
func TestLostRepliesOfTheLastStep(t *testing.T) {
	lose := func() func(error) error {
		n := 0
		return func(err error) error {
			if n++; n < 3 {
				return errStore
			}
			return err
		}
	}
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		e, _ := newEngine(t, store)

		lost := lose()
		store.finish = func(ctx context.Context, o *idempotency.Outcome, step finishStep) (*idempotency.Record, error) {
			rec, err := step(ctx, o)
			return rec, lost(err)
		}
		wantOK(t, do(bg, e, "finish", answering(ok("done"))), "done", idempotency.MarkExecuted)
		wantOK(t, do(bg, e, "finish", never(t)), "done", idempotency.MarkReplayed)

		lost = lose()
		store.release = func(ctx context.Context, step func(context.Context) error) error { return lost(step(ctx)) }
		do(bg, e, "release", answering(failing(code.Code_INTERNAL, idempotency.NoEffect)))
		store.finish = nil
		wantOK(t, do(bg, e, "release", answering(ok("again"))), "again", idempotency.MarkExecuted)

		lost = lose()
		store.abandon = func(ctx context.Context, step func(context.Context) error) error { return lost(step(ctx)) }
		do(bg, e, "abandon", answering(failing(code.Code_INTERNAL, nil)))
		wantRefusal(t, do(bg, e, "abandon", never(t)), idempotency.ReasonOutcomeUnknown)
	})
}

func TestFinishThatFails(t *testing.T) {
	for _, row := range []struct {
		atomic   bool
		err      error
		reason   idempotency.Reason // empty: the handler's own reply, unrecorded
		executed idempotency.Executed
		tries    int
	}{
		{false, errStore, "", 0, 3},
		{false, idempotency.ErrInDoubt, "", 0, 3},
		{false, idempotency.ErrLost, "", 0, 1},
		{true, errStore, idempotency.ReasonStoreUnavailable, idempotency.ExecutedNo, 1},
		{true, idempotency.ErrInDoubt, idempotency.ReasonOutcomePending, idempotency.ExecutedMaybe, 1},
		{true, idempotency.ErrLost, idempotency.ReasonLeaseLost, idempotency.ExecutedMaybe, 1},
		{true, idempotency.ErrConflict, idempotency.ReasonTxConflict, idempotency.ExecutedNo, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			store := newFaulty()
			store.atomic = row.atomic
			tries := 0
			store.finish = func(context.Context, *idempotency.Outcome, finishStep) (*idempotency.Record, error) {
				tries++
				return nil, fmt.Errorf("wrapped: %w", row.err)
			}
			e, _ := newEngine(t, store)
			r := do(bg, e, "k", answering(ok("done")))
			if row.reason == "" {
				wantUnrecorded(t, r)
			} else {
				wantRefusal(t, r, row.reason)
				if r.Executed != row.executed || r.Refusal.RetryAfter <= 0 || !errors.Is(r.Refusal, row.err) {
					t.Errorf("%v: executed %v, retry after %v, cause %v: want %v, a delay, the store's error",
						row.err, r.Executed, r.Refusal.RetryAfter, r.Refusal.Cause, row.executed)
				}
			}
			if tries != row.tries {
				t.Errorf("%v on an atomic=%v store: %d tries: want %d", row.err, row.atomic, tries, row.tries)
			}
		})
	}
}

// The outcome that stands is everybody's answer, also the one's who was slower.
func TestAnothersOutcomeStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory(t)
		rerun := func(c *idempotency.Config) { c.Lease, c.DisableRenewal, c.Rerun = time.Second, true, true }
		e, _ := newEngine(t, store, rerun)
		elsewhere, _ := newEngine(t, store, rerun)
		slow := make(chan idempotency.Reply, 1)
		go func() {
			slow <- do(bg, e, "k", func(context.Context) idempotency.Result {
				time.Sleep(5 * time.Second)
				return ok("slower")
			})
		}()
		time.Sleep(2 * time.Second)
		wantOK(t, do(bg, elsewhere, "k", func(ctx context.Context) idempotency.Result {
			if idempotency.Epoch(ctx) != 2 {
				t.Errorf("epoch %d: want 2", idempotency.Epoch(ctx))
			}
			return ok("faster")
		}), "faster", idempotency.MarkExecuted)
		wantOK(t, <-slow, "faster", idempotency.MarkReplayed)
	})
}

// R6: a claim whose reply is lost is sent again by the same owner, which the
// store recognises.
func TestLostReplyOfTheClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		var owners []idempotency.Owner
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			exec, rec, err := step(ctx, c)
			if owners = append(owners, c.Owner); len(owners) < 3 {
				return nil, nil, errStore // it landed, and nobody heard
			}
			return exec, rec, err
		}
		e, _ := newEngine(t, store)
		start := time.Now()
		wantOK(t, do(bg, e, "k", answering(ok("done"))), "done", idempotency.MarkExecuted)
		if len(owners) != 3 || owners[0] != owners[1] || owners[1] != owners[2] || owners[0] == (idempotency.Owner{}) {
			t.Errorf("claims by %x: want three by one owner", owners)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("the call took %v: want no wait for its own lease", took)
		}
		do(bg, e, "other", answering(ok("done")))
		if owners[3] == owners[0] {
			t.Error("two calls claim as one owner")
		}
	})
}

// R6: the next call takes over the owner of a claim that was given up.
func TestOrphanedClaimIsAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		down := true
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			exec, rec, err := step(ctx, c)
			if down {
				return nil, nil, errStore
			}
			return exec, rec, err
		}
		e, _ := newEngine(t, store)
		r := do(bg, e, "k", never(t))
		wantRefusal(t, r, idempotency.ReasonStoreUnavailable)
		if r.Executed != idempotency.ExecutedNo || r.Refusal.RetryAfter <= 0 || r.Refusal.Metadata["executed"] != "no" {
			t.Errorf("executed %v, retry after %v, metadata %v", r.Executed, r.Refusal.RetryAfter, r.Refusal.Metadata)
		}
		down = false
		start := time.Now()
		wantOK(t, do(bg, e, "k", answering(ok("done"))), "done", idempotency.MarkExecuted)
		if took := time.Since(start); took != 0 {
			t.Errorf("the next call waited %v for a claim that was its predecessor's", took)
		}
	})
}

func TestClaimThatFails(t *testing.T) {
	for _, row := range []struct {
		err    error
		reason idempotency.Reason
		tries  int
		delay  bool
	}{
		{errStore, idempotency.ReasonStoreUnavailable, 3, true},
		{idempotency.ErrBusy, idempotency.ReasonWaitersExceeded, 1, true},
		{idempotency.ErrFull, idempotency.ReasonStoreFull, 1, false},
		{idempotency.ErrCorrupt, idempotency.ReasonRecordCorrupt, 1, false},
	} {
		for _, immediate := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				store := newFaulty()
				store.traits.Immediate = immediate
				tries := 0
				store.begin = func(context.Context, idempotency.Claim, beginStep) (idempotency.Execution, *idempotency.Record, error) {
					tries++
					return nil, nil, fmt.Errorf("wrapped: %w", row.err)
				}
				e, _ := newEngine(t, store)
				r := do(bg, e, "k", never(t))
				wantRefusal(t, r, row.reason)
				if (r.Refusal.RetryAfter > 0) != row.delay || !errors.Is(r.Refusal, row.err) {
					t.Errorf("%v: retry after %v, cause %v", row.err, r.Refusal.RetryAfter, r.Refusal.Cause)
				}
				if immediate {
					tries-- // the first, on the caller's own goroutine
					if row.tries == 1 {
						tries = 1
					}
				}
				if tries != row.tries {
					t.Errorf("%v: %d tries: want %d", row.err, tries, row.tries)
				}
			})
		}
	}
}

func TestStoreThatBreaksItsContract(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		store.begin = func(context.Context, idempotency.Claim, beginStep) (idempotency.Execution, *idempotency.Record, error) {
			return nil, nil, nil
		}
		e, _ := newEngine(t, store)
		wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonStoreUnavailable)
		store.begin = func(context.Context, idempotency.Claim, beginStep) (idempotency.Execution, *idempotency.Record, error) {
			return nil, &idempotency.Record{State: 77}, nil
		}
		wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonRecordCorrupt)
	})
}

func TestStoreThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		store.begin = func(ctx context.Context, _ idempotency.Claim, _ beginStep) (idempotency.Execution, *idempotency.Record, error) {
			<-ctx.Done()
			return nil, nil, ctx.Err()
		}
		e, _ := newEngine(t, store)
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		wantGone := do(ctx, e, "k", never(t))
		if wantGone.Refusal == nil || wantGone.Refusal.Reason != idempotency.ReasonCallerGone {
			t.Errorf("the caller got %v: want CALLER_GONE", wantGone.Refusal)
		}
		start := time.Now()
		wantRefusal(t, do(bg, e, "patient", never(t)), idempotency.ReasonStoreUnavailable)
		if took := time.Since(start); took > 16*time.Second {
			t.Errorf("three claims took %v: want at most 3 × StoreTimeout and two pauses", took)
		}
	})
}

// Nobody's work: everybody goes while the claim is on its way, so it is given
// back and the handler does not run.
func TestNobodyLeftWhenTheClaimIsGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			time.Sleep(2 * time.Second)
			return step(ctx, c)
		}
		e, rec := newEngine(t, store)
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		do(ctx, e, "k", never(t))
		time.Sleep(2 * time.Second)
		if rec.count(idempotency.EventRelease) != 1 {
			t.Errorf("events %v: want a release", rec.kinds())
		}
		wantOK(t, do(bg, e, "k", answering(ok("done"))), "done", idempotency.MarkExecuted)
	})
}

// The first caller goes while the claim is on its way: the next in line runs,
// with its own values.
func TestTheNextInLineRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		store := newFaulty()
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			time.Sleep(2 * time.Second)
			return step(ctx, c)
		}
		e, _ := newEngine(t, store)
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() { do(ctx, e, "k", never(t)) })
		synctest.Wait()
		second := do(context.WithValue(bg, key{}, "second"), e, "k", func(ctx context.Context) idempotency.Result {
			return ok(fmt.Sprint(ctx.Value(key{})))
		})
		wantOK(t, second, "second", idempotency.MarkExecuted)
		wg.Wait()
	})
}

func TestDuplicateWaitsAtMostWaitMax(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory(t)
		e, _ := newEngine(t, store)
		elsewhere, _ := newEngine(t, store)
		running := make(chan idempotency.Reply, 1)
		go func() {
			running <- do(bg, e, "k", func(context.Context) idempotency.Result {
				time.Sleep(20 * time.Second)
				return ok("slow")
			})
		}()
		synctest.Wait()
		for _, row := range []struct {
			name     string
			e        *idempotency.Engine
			deadline time.Duration
			want     time.Duration
		}{
			{"in this process", e, 0, 5 * time.Second},
			{"in another process", elsewhere, 0, 5 * time.Second},
			{"here, with a deadline", e, time.Second, 950 * time.Millisecond},
			{"there, with a deadline", elsewhere, time.Second, 950 * time.Millisecond},
			{"here, with no time to wait", e, 40 * time.Millisecond, 0},
		} {
			ctx, cancel := bg, context.CancelFunc(func() {})
			if row.deadline > 0 {
				ctx, cancel = context.WithTimeout(bg, row.deadline)
			}
			start := time.Now()
			r := do(ctx, row.e, "k", never(t))
			cancel()
			wantRefusal(t, r, idempotency.ReasonInFlight)
			if waited := time.Since(start); waited != row.want {
				t.Errorf("%s: waited %v: want %v", row.name, waited, row.want)
			}
			if r.Refusal.RetryAfter < 50*time.Millisecond || r.Refusal.RetryAfter > 500*time.Millisecond || r.Executed != idempotency.ExecutedMaybe {
				t.Errorf("%s: retry after %v, executed %v: want 50 to 500 ms, maybe", row.name, r.Refusal.RetryAfter, r.Executed)
			}
		}
		wantOK(t, <-running, "slow", idempotency.MarkExecuted)
	})
}

func TestDuplicateInAnotherProcessJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory(t)
		e, _ := newEngine(t, store)
		elsewhere, _ := newEngine(t, store)
		go do(bg, e, "k", func(context.Context) idempotency.Result {
			time.Sleep(time.Second)
			return ok("done")
		})
		synctest.Wait()
		start := time.Now()
		wantOK(t, do(bg, elsewhere, "k", never(t)), "done", idempotency.MarkJoined)
		if waited := time.Since(start); waited < time.Second || waited > 1600*time.Millisecond {
			t.Errorf("the duplicate waited %v: want the execution's second and at most one poll", waited)
		}
	})
}

// A thousand duplicates in one process ask the store once, and the limits hold.
func TestWaitersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		begins := 0
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			begins++
			return step(ctx, c)
		}
		e, _ := newEngine(t, store, func(c *idempotency.Config) { c.Waiters = 40 })
		slow := func(context.Context) idempotency.Result {
			time.Sleep(time.Second)
			return ok("done")
		}
		var counts sync.Map
		count := func(r idempotency.Reply) {
			what := r.Mark.String()
			if r.Refusal != nil {
				what = string(r.Refusal.Reason)
				if r.Refusal.RetryAfter <= 0 {
					t.Errorf("%s names no delay", what)
				}
			}
			n, _ := counts.LoadOrStore(what, new(atomic.Int32))
			n.(*atomic.Int32).Add(1) //nolint:forcetypeassert // the map holds nothing else
		}
		var wg sync.WaitGroup
		for _, key := range []string{"a", "b", "c"} {
			for range 1000 {
				wg.Go(func() { count(do(bg, e, key, slow)) })
			}
			synctest.Wait()
		}
		wg.Wait()
		for what, want := range map[string]int32{
			"executed": 3, "joined": 16 + 16 + 8,
			string(idempotency.ReasonInFlight): 983 + 983, string(idempotency.ReasonWaitersExceeded): 991,
		} {
			n, _ := counts.LoadOrStore(what, new(atomic.Int32))
			if got := n.(*atomic.Int32).Load(); got != want { //nolint:forcetypeassert // as above
				t.Errorf("%d calls were %s: want %d", got, what, want)
			}
		}
		if begins != 3 {
			t.Errorf("the store was asked %d times: want once per key", begins)
		}
		wantOK(t, do(bg, e, "a", never(t)), "done", idempotency.MarkReplayed)
		places := make(chan idempotency.Mark, 17)
		for range cap(places) { // every place was given back
			wg.Go(func() { places <- do(bg, e, "again", slow).Mark })
		}
		wg.Wait()
		close(places)
		for mark := range places {
			if mark != idempotency.MarkExecuted && mark != idempotency.MarkJoined {
				t.Errorf("a call afterwards is marked %q: want executed or joined", mark)
			}
		}
	})
}

// A caller who has gone before the claim is granted has nothing started for it.
func TestCallerWhoHasGoneStartsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t))
		ctx, cancel := context.WithCancel(bg)
		cancel()
		do(ctx, e, "k", never(t))
		wantOK(t, do(bg, e, "k", answering(ok("done"))), "done", idempotency.MarkExecuted)
	})
}

// Whoever waits for another process and goes leaves nobody asking the store.
func TestNobodyAsksForNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory(t)
		e, _ := newEngine(t, store)
		elsewhere, _ := newEngine(t, store)
		go do(bg, elsewhere, "k", func(context.Context) idempotency.Result {
			time.Sleep(time.Hour)
			return ok("slow")
		})
		synctest.Wait()
		ctx, cancel := context.WithTimeout(bg, 990*time.Millisecond)
		defer cancel()
		wantRefusal(t, do(ctx, e, "k", never(t)), idempotency.ReasonInFlight)
		start := time.Now()
		if err := e.Drain(bg); err != nil || time.Since(start) != 0 {
			t.Errorf("Drain returned %v after %v: want nil at once", err, time.Since(start))
		}
	})
}

// A claim is not renewed for as long as a handler does not listen.
func TestRenewalsEndWithMaxExecution(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		renewals := 0
		store.renew = func(ctx context.Context, step func(context.Context) (time.Duration, error)) (time.Duration, error) {
			renewals++
			return step(ctx)
		}
		e, _ := newEngine(t, store)
		do(bg, e, "k", func(context.Context) idempotency.Result {
			time.Sleep(time.Hour)
			return ok("deaf")
		})
		if renewals != 2 {
			t.Errorf("%d renewals: want those at 10 and 20 s", renewals)
		}
	})
}

// A duplicate with little time left is not refused while the store may yet
// answer it.
func TestShortDeadlineAndASlowStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		e, _ := newEngine(t, store)
		do(bg, e, "k", answering(ok("done")))
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			time.Sleep(980 * time.Millisecond)
			return step(ctx, c)
		}
		replies := make(chan idempotency.Reply, 2)
		for range cap(replies) {
			go func() {
				ctx, cancel := context.WithTimeout(bg, time.Second)
				defer cancel()
				replies <- do(ctx, e, "k", never(t))
			}()
		}
		for range cap(replies) {
			wantOK(t, <-replies, "done", idempotency.MarkReplayed)
		}
	})
}

// Two requests with one key at the same moment: whichever of them the store has
// seen first is served, and it is the other that is refused.
func TestOtherPayloadWhileTheStoreIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		e, _ := newEngine(t, store)
		wantOK(t, doWith(bg, e, "recorded", "p1", answering(ok("for p1"))), "for p1", idempotency.MarkExecuted)
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			time.Sleep(time.Second)
			return step(ctx, c)
		}
		wrong := make(chan idempotency.Reply, 1)
		go func() { wrong <- doWith(bg, e, "recorded", "p2", never(t)) }()
		synctest.Wait()
		wantOK(t, doWith(bg, e, "recorded", "p1", never(t)), "for p1", idempotency.MarkReplayed)
		wantRefusal(t, <-wrong, idempotency.ReasonKeyReused)

		first := make(chan idempotency.Reply, 1)
		go func() {
			first <- doWith(bg, e, "new", "p1", func(context.Context) idempotency.Result {
				time.Sleep(time.Hour)
				return ok("for p1")
			})
		}()
		synctest.Wait()
		start := time.Now()
		wantRefusal(t, doWith(bg, e, "new", "p2", never(t)), idempotency.ReasonKeyReused)
		if waited := time.Since(start); waited != time.Second {
			t.Errorf("p2 was refused after %v: want as soon as p1 is known to be first, 1 s", waited)
		}
		wantOK(t, <-first, "for p1", idempotency.MarkExecuted)
	})
}

// Those who joined an execution that failed for a reason of its own context are
// not told CANCELLED.
func TestJoinersOfAFailedExecution(t *testing.T) {
	for _, row := range []struct {
		code   code.Code
		mark   func(error) error
		reason idempotency.Reason // empty: the handler's error is shared
	}{
		{code.Code_UNAVAILABLE, nil, ""},
		{code.Code_INTERNAL, nil, ""},
		{code.Code_CANCELLED, nil, idempotency.ReasonOutcomeUnknown},
		{code.Code_DEADLINE_EXCEEDED, nil, idempotency.ReasonOutcomeUnknown},
		{code.Code_CANCELLED, idempotency.NoEffect, idempotency.ReasonInFlight},
	} {
		synctest.Test(t, func(t *testing.T) {
			e, _ := newEngine(t, newMemory(t))
			res := failing(row.code, row.mark)
			own := make(chan idempotency.Reply, 1)
			go func() {
				own <- do(bg, e, "k", func(context.Context) idempotency.Result {
					time.Sleep(time.Second)
					return res
				})
			}()
			synctest.Wait()
			joined := do(bg, e, "k", never(t))
			if r := <-own; r.Status.GetCode() != int32(row.code) || r.Mark != idempotency.MarkExecuted {
				t.Errorf("%v: its own caller got %v, %v", row.code, r.Refusal, r.Status)
			}
			if row.reason != "" {
				wantRefusal(t, joined, row.reason)
				return
			}
			wantError(t, joined, row.code, idempotency.MarkJoined, idempotency.ExecutedMaybe)
			if joined.Err != res.Err { //nolint:errorlint // the very value
				t.Errorf("%v: the joiner's error is %v: want the handler's own", row.code, joined.Err)
			}
		})
	}
}

func TestPanicOfTheHandler(t *testing.T) {
	for _, atomicStore := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store := newFaulty()
			store.atomic = atomicStore
			e, rec := newEngine(t, store)
			joined := make(chan idempotency.Reply, 1)
			cause := errors.New("nil map")
			func() {
				defer func() {
					p, isPanic := recover().(*idempotency.PanicError)
					if !isPanic || !errors.Is(p, cause) || len(p.Stack) == 0 {
						t.Errorf("the caller's goroutine panicked with %v: want a *PanicError of the handler's", p)
					}
				}()
				do(bg, e, "k", func(context.Context) idempotency.Result {
					go func() { joined <- do(bg, e, "k", never(t)) }() //nolint:contextcheck // another caller
					time.Sleep(time.Second)
					panic(cause)
				})
			}()
			if atomicStore { // undone: those who waited may try again
				wantRefusal(t, <-joined, idempotency.ReasonInFlight)
				wantOK(t, do(bg, e, "k", answering(ok("again"))), "again", idempotency.MarkExecuted)
			} else {
				wantRefusal(t, <-joined, idempotency.ReasonOutcomeUnknown)
				wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonOutcomeUnknown)
			}
			if rec.count(idempotency.EventPanic) != 1 || len(rec.messages()) != 0 {
				t.Errorf("events %v, log %q: want one panic, and no log where a goroutine has it", rec.kinds(), rec.messages())
			}
		})
	}
}

func TestPanicAfterTheCallerHasGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, rec := newEngine(t, newMemory(t))
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		do(ctx, e, "k", func(context.Context) idempotency.Result {
			time.Sleep(2 * time.Second)
			panic("nobody is here")
		})
		time.Sleep(2 * time.Second)
		if rec.count(idempotency.EventPanic) != 1 || len(rec.messages()) != 1 {
			t.Errorf("events %v, log %q: want one panic, logged once", rec.kinds(), rec.messages())
		}
		wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonOutcomeUnknown)
	})
}

func TestGoexitOfTheHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t))
		defer func() {
			p, isPanic := recover().(*idempotency.PanicError)
			if !isPanic || !errors.Is(p, idempotency.ErrGoexit) {
				t.Errorf("the caller's goroutine panicked with %v: want ErrGoexit", p)
			}
		}()
		do(bg, e, "k", func(context.Context) idempotency.Result {
			runtime.Goexit()
			return ok("never")
		})
	})
}

func TestObserverThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, rec := newEngine(t, newMemory(t), func(c *idempotency.Config) { c.OnEvent = func(idempotency.Event) { panic("observer") } })
		wantOK(t, do(bg, e, "k", answering(ok("done"))), "done", idempotency.MarkExecuted)
		wantOK(t, do(bg, e, "k", never(t)), "done", idempotency.MarkReplayed)
		if len(rec.messages()) != 5 { // claim, finish, reply; claim, reply
			t.Errorf("log %q: want one line for each of 5 events", rec.messages())
		}
	})
}

func TestEventsComeInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, rec := newEngine(t, newMemory(t))
		do(bg, e, "k", answering(ok("done")))
		do(bg, e, "k", never(t))
		do(bg, e, "free", answering(failing(code.Code_UNAVAILABLE, nil)))
		do(bg, e, "unknown", answering(failing(code.Code_INTERNAL, nil)))
		want := []string{"claim", "finish", "reply", "claim", "reply", "claim", "release", "reply", "claim", "abandon", "reply"}
		if got := rec.kinds(); !slices.Equal(got, want) {
			t.Errorf("events %v: want %v", got, want)
		}
		if first := rec.events[0]; first.Method != method || first.ID != idOf("k") || first.Epoch != 1 {
			t.Errorf("the first event is %+v: want method, ID and epoch 1", first)
		}
	})
}

func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t))
		if err := e.Drain(bg); err != nil {
			t.Errorf("Drain of an idle engine: %v", err)
		}
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		do(ctx, e, "k", func(context.Context) idempotency.Result {
			time.Sleep(5 * time.Second)
			return ok("done")
		})
		short, cancelShort := context.WithTimeout(bg, time.Second)
		defer cancelShort()
		if err := e.Drain(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Drain returned %v before the execution ended: want its context's error", err)
		}
		start := time.Now()
		if err := e.Drain(bg); err != nil || time.Since(start) != 3*time.Second {
			t.Errorf("Drain returned %v after %v: want nil when the execution ends, in 3 s", err, time.Since(start))
		}
		wantOK(t, do(bg, e, "k", never(t)), "done", idempotency.MarkReplayed)
	})
}

// Many keys, callers, processes, faults and cancels at once: at most one
// success per key, every OK the same, every place given back.
func TestEngineUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		store.traits.ReleaseOnError = true
		var rng sync.Mutex
		random := rand.New(rand.NewPCG(1, 2))
		draw := func(n int) int {
			rng.Lock()
			defer rng.Unlock()
			return random.IntN(n)
		}
		store.begin = func(ctx context.Context, c idempotency.Claim, step beginStep) (idempotency.Execution, *idempotency.Record, error) {
			exec, rec, err := step(ctx, c)
			time.Sleep(time.Duration(draw(20)) * time.Millisecond)
			if draw(10) == 0 {
				return nil, nil, errStore
			}
			return exec, rec, err
		}
		store.finish = func(ctx context.Context, o *idempotency.Outcome, step finishStep) (*idempotency.Record, error) {
			rec, err := step(ctx, o)
			if draw(10) == 0 {
				return nil, errStore
			}
			return rec, err
		}
		var engines []*idempotency.Engine
		for range 3 {
			e, _ := newEngine(t, store)
			engines = append(engines, e)
		}
		const keys = 40
		var effects [keys]atomic.Int32
		var answers [keys]sync.Map
		var wg sync.WaitGroup
		for i := range 1200 {
			wg.Go(func() {
				time.Sleep(time.Duration(draw(2000)) * time.Millisecond)
				key := i % keys
				ctx, cancel := context.WithTimeout(bg, time.Duration(1+draw(3000))*time.Millisecond)
				defer cancel()
				defer func() { _ = recover() }() // the handler's panic, on this goroutine
				r := do(ctx, engines[draw(3)], fmt.Sprint("key-", key), func(context.Context) idempotency.Result {
					time.Sleep(time.Duration(draw(300)) * time.Millisecond)
					switch draw(8) {
					case 0:
						return failing(code.Code_UNAVAILABLE, nil)
					case 1:
						panic("chaos")
					}
					return ok(fmt.Sprint("effect ", effects[key].Add(1)))
				})
				if r.Refusal == nil && r.Status == nil {
					answers[key].Store(r.Response.(*wrapperspb.StringValue).GetValue(), true) //nolint:forcetypeassert // a wrong type is a failure too
				}
			})
		}
		wg.Wait()
		succeeded := 0
		for key := range keys {
			n := 0
			answers[key].Range(func(any, any) bool { n++; return true })
			if effects[key].Load() > 1 || n > 1 {
				t.Errorf("key %d: %d effects, %d different answers: want at most 1", key, effects[key].Load(), n)
			}
			succeeded += n
		}
		if succeeded < keys/4 {
			t.Errorf("%d of %d keys succeeded: the test has tested little", succeeded, keys)
		}
	})
}
