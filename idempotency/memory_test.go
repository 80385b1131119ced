package idempotency_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/storetest"
)

func newMemory(*testing.T) idempotency.Store {
	return idempotency.NewMemoryStore(idempotency.MemoryConfig{})
}

func TestMemoryStoreKeepsTheContract(t *testing.T) {
	storetest.Run(t, newMemory, storetest.FakeTime())
}

func TestMemoryStoreKeepsTheContractInRealTime(t *testing.T) {
	storetest.Run(t, newMemory, storetest.Lease(200*time.Millisecond))
}

func claimOf(n int) idempotency.Claim {
	return idempotency.Claim{
		ID: idempotency.IDOf("scope", "method", strconv.Itoa(n)), Owner: idempotency.Owner{1, byte(n), byte(n >> 8)}, Fingerprint: "fp",
		Lease: time.Second, Retention: time.Minute,
	}
}

// A full store refuses new keys. It never drops a record to make room, and what
// was let in can finish.
func TestMemoryStoreIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := idempotency.NewMemoryStore(idempotency.MemoryConfig{MaxBytes: 10_000})
		var held []idempotency.Execution
		full := -1
		for n := range 1000 {
			exec, _, err := store.Begin(bg, claimOf(n))
			if errors.Is(err, idempotency.ErrFull) {
				full = n
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, exec)
		}
		if full < 10 || full > 40 {
			t.Fatalf("10,000 bytes were full after %d records: want about 30", full)
		}
		if stats := store.Stats(); stats.Records != full || stats.Bytes > 10_000 {
			t.Errorf("stats %+v: want %d records in at most 10,000 bytes", stats, full)
		}
		if err := store.Resolve(bg, claimOf(full).ID, idempotency.Resolution{State: idempotency.StateCancelled}); !errors.Is(err, idempotency.ErrFull) {
			t.Errorf("a tombstone in a full store: %v: want ErrFull", err)
		}
		for n, exec := range held {
			if _, err := exec.Finish(bg, &idempotency.Outcome{Data: []byte("done")}); err != nil {
				t.Fatalf("record %d in a full store: %v", n, err)
			}
		}
		for n := range held { // all are still there
			again := claimOf(n)
			again.Owner[0] = 2
			if _, rec, err := store.Begin(bg, again); err != nil || rec == nil || rec.State != idempotency.StateDone {
				t.Fatalf("record %d: %+v, %v: want DONE", n, rec, err)
			}
		}
		if _, _, err := store.Begin(bg, claimOf(full)); !errors.Is(err, idempotency.ErrFull) {
			t.Errorf("a new key within the retention of the others: %v: want ErrFull", err)
		}

		e, _ := newEngine(t, store)
		wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonStoreFull)

		time.Sleep(time.Minute) // no sweeper runs: Begin makes room as it goes
		for n := range held {
			if _, _, err := store.Begin(bg, claimOf(1000+n)); err != nil {
				t.Fatalf("new record %d after the retention: %v", n, err)
			}
		}
	})
}

// Used without a sweeper for long, the store holds what its retention holds.
func TestMemoryStoreStaysSmallWithoutASweeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		for n := range 5000 {
			exec, _, err := store.Begin(bg, claimOf(n))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := exec.Finish(bg, &idempotency.Outcome{Data: make([]byte, 100)}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		if stats := store.Stats(); stats.Records > 61 || stats.Bytes > 61*500 {
			t.Errorf("after 5000 calls in 5000 s: %+v: want the last minute's", stats)
		}
		for {
			time.Sleep(time.Hour)
			n, err := store.Sweep(bg, 10)
			if err != nil {
				t.Fatal(err)
			}
			if n == 0 {
				break
			}
		}
		if stats := store.Stats(); stats != (idempotency.MemoryStats{}) {
			t.Errorf("after everything was swept: %+v: want nothing", stats)
		}
	})
}

func TestMemoryStoreCountsUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
		e, _ := newEngine(t, store)
		do(bg, e, "k", answering(idempotency.Result{Err: errors.New("plain")}))
		if stats := store.Stats(); stats.Unknown != 1 || stats.Records != 1 {
			t.Errorf("stats %+v: want one record, UNKNOWN", stats)
		}
	})
}

// sweeping counts sweeps and lets some of them fail.
type sweeping struct {
	idempotency.Store

	mu      sync.Mutex
	results []int // -1: an error
	calls   int
}

func (s *sweeping) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

func (s *sweeping) Sweep(_ context.Context, limit int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	n := min(s.results[0], limit)
	s.results = s.results[1:]
	if n < 0 {
		return 0, errStore
	}
	return n, nil
}

func TestRunSweeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(bg)
		shutdown := errors.New("shutdown")
		s := &sweeping{results: []int{1000, 1000, 3, -1, 0, -1}}
		done := make(chan error, 1)
		go func() { done <- idempotency.RunSweeper(ctx, s, time.Minute) }()
		for i, want := range []int{0, 3, 4, 5, 6} { // a backlog at once, an error and on, nothing and on
			synctest.Wait()
			if n := s.count(); n != want {
				t.Errorf("after %d minutes: %d sweeps: want %d", i, n, want)
			}
			if i < 4 {
				time.Sleep(time.Minute)
			}
		}
		cancel(shutdown)
		if err := <-done; !errors.Is(err, shutdown) || !errors.Is(err, errStore) {
			t.Errorf("RunSweeper returned %v: want the cause and the last error", err)
		}
	})
	if err := idempotency.RunSweeper(bg, nil, time.Minute); err == nil {
		t.Error("RunSweeper without a store returned no error")
	}
	if err := idempotency.RunSweeper(bg, newMemory(t), 0); err == nil || !strings.Contains(err.Error(), "every is 0s") {
		t.Errorf("RunSweeper with 0 returned %v: want an error that names it", err)
	}
}
