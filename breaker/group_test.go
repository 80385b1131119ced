package breaker_test

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/belayrpc/belay/breaker"
)

func keys(g *breaker.Group) []string {
	var all []string
	for key := range g.All() {
		all = append(all, key)
	}
	return all
}

func TestGroupKeepsOneBreakerPerKey(t *testing.T) {
	t.Parallel()
	var told []string
	g := breaker.NewGroup(breaker.Config{
		Name:                "ignored",
		ConsecutiveFailures: 1,
		OnTransition:        func(tr breaker.Transition) { told = append(told, tr.Name) },
	}, 0)
	a, b := g.Get("a"), g.Get("b")
	if a == b || g.Get("a") != a || g.Get("b") != b {
		t.Fatal("keys share a breaker, or a key has two")
	}
	call(t, a, breaker.Failure, 1)
	refused(t, a)
	call(t, b, breaker.Success, 1)
	if diff := cmp.Diff([]string{"a"}, told); diff != "" {
		t.Errorf("who told of a transition (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a", "b"}, keys(g)); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	for key, member := range g.All() {
		if got := member.Snapshot().Name; got != key {
			t.Errorf("the breaker of %q is called %q", key, got)
		}
		break // an iteration may end early
	}
}

func TestZeroGroup(t *testing.T) {
	t.Parallel()
	var g breaker.Group
	if g.Err() != nil || g.Len() != 0 || keys(&g) != nil {
		t.Errorf("zero group: err %v, %d members", g.Err(), g.Len())
	}
	for i := range 3 * breaker.DefaultGroupMax {
		g.Get(strconv.Itoa(i))
	}
	if got := g.Len(); got != breaker.DefaultGroupMax {
		t.Errorf("%d members, want %d", got, breaker.DefaultGroupMax)
	}
}

func TestGroupWithBadConfiguration(t *testing.T) {
	t.Parallel()
	rows := []struct {
		group *breaker.Group
		want  string
	}{
		{breaker.NewGroup(breaker.Config{Probes: -1}, 0), "breaker: Config.Probes = -1: must not be negative"},
		{breaker.NewGroup(breaker.Config{}, -2), "breaker: group limit = -2: must not be negative"},
	}
	for _, row := range rows {
		wantText(t, row.group.Err(), row.want)
		b := row.group.Get("a")
		wantText(t, b.Err(), row.want)
		call(t, b, breaker.Failure, 100)
		wantState(t, b, breaker.Closed)
		if row.group.Len() != 0 {
			t.Errorf("%d members, want none", row.group.Len())
		}
	}
}

// Who makes room: closed before open before forced; among the closed, who was not asked for.
func TestGroupEviction(t *testing.T) {
	t.Parallel()
	g := breaker.NewGroup(breaker.Config{ConsecutiveFailures: 1}, 4)
	wantKeys := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, keys(g)); diff != "" {
			t.Fatalf("keys (-want +got):\n%s", diff)
		}
	}
	g.Get("forced").ForceClose()
	call(t, g.Get("open"), breaker.Failure, 1)
	g.Get("x")
	g.Get("y")
	wantKeys("forced", "open", "x", "y")

	g.Get("z") // all are marked as used: the oldest closed one goes, the rest lose their marks
	wantKeys("forced", "open", "y", "z")
	g.Get("u") // y was not asked for since, z is new
	wantKeys("forced", "open", "u", "z")
	g.Get("z")
	g.Get("v") // both are marked: the older goes
	wantKeys("forced", "open", "u", "v")
	g.Get("u")
	g.Get("v")
	g.Get("open")
	g.Get("w")
	g.Get("w")
	g.Get("t") // however idle, open and forced ones stay while any is closed
	if left := keys(g); !slices.Contains(left, "open") || !slices.Contains(left, "forced") {
		t.Fatalf("keys %v: an open or forced breaker went before a closed one", left)
	}

	// Now none is closed, and the bound holds all the same: open ones go before the forced one.
	for key, b := range g.All() {
		if b.State() == breaker.Closed {
			call(t, g.Get(key), breaker.Failure, 1)
		}
	}
	for i := range 10 {
		call(t, g.Get(strconv.Itoa(i)), breaker.Failure, 1)
	}
	if left := keys(g); len(left) != 4 || !slices.Contains(left, "forced") {
		t.Fatalf("keys %v: want four, the forced one among them", left)
	}

	// Among forced ones too.
	for _, b := range g.All() {
		b.ForceOpen()
	}
	g.Get("last")
	if left := keys(g); len(left) != 4 || !slices.Contains(left, "last") {
		t.Fatalf("keys %v: want four, the new one among them", left)
	}
}

// A breaker that was asked for since the last search goes after one that was not, though it is
// older.
func TestGroupKeepsWhatIsUsed(t *testing.T) {
	t.Parallel()
	g := breaker.NewGroup(breaker.Config{}, 3)
	for _, key := range []string{"a", "b", "c", "d", "b", "e"} {
		g.Get(key)
	}
	if diff := cmp.Diff([]string{"b", "d", "e"}, keys(g)); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
}

// A breaker that made room still takes the results of its calls; the key has a new one.
func TestGroupEvictedBreakerStillWorks(t *testing.T) {
	t.Parallel()
	g := breaker.NewGroup(breaker.Config{ConsecutiveFailures: 1}, 1)
	old := g.Get("a")
	permit := admitted(t, old)
	g.Get("b")
	permit.Done(breaker.Failure, 0)
	wantState(t, old, breaker.Open)
	wantState(t, g.Get("a"), breaker.Closed)
}

// What is kept of a group's first and only member goes when there are more.
func TestGroupForgetsItsFirst(t *testing.T) {
	t.Parallel()
	g := breaker.NewGroup(breaker.Config{}, 2)
	first := g.Get("a")
	if again := g.Get("a"); again != first {
		t.Error("two breakers for one key")
	}
	g.Get("b")
	g.Get("c")
	if diff := cmp.Diff([]string{"b", "c"}, keys(g)); diff != "" {
		t.Fatalf("keys (-want +got):\n%s", diff)
	}
	if again := g.Get("a"); again == first {
		t.Error("the evicted breaker is still found")
	}
}

func TestGroupConcurrently(t *testing.T) {
	t.Parallel()
	const limit = 16
	g := breaker.NewGroup(breaker.Config{ConsecutiveFailures: 3}, limit)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 300 {
				key := strconv.Itoa(rand.IntN(2 * limit))
				b := g.Get(key)
				if got := b.Snapshot().Name; got != key {
					t.Errorf("asked for %s, got %s", key, got)
				}
				if permit, err := b.Allow(); err == nil {
					permit.Done(breaker.Outcome(rand.IntN(3)), 0)
				}
				if n := g.Len(); n > limit {
					t.Errorf("%d members, want at most %d", n, limit)
				}
			}
		})
	}
	wg.Wait()
	for key, b := range g.All() {
		if g.Get(key) != b {
			t.Errorf("%s: two breakers", key)
		}
	}
	if g.Len() != limit {
		t.Errorf("%d members, want %d", g.Len(), limit)
	}
}
