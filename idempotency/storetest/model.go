//nolint:thelper // testModel is a test itself: a failure is its own
package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/belayrpc/belay/idempotency"
)

// model is the contract for one identity, as short as it can be said.
type model struct {
	state   idempotency.State
	owner   idempotency.Owner
	epoch   uint64
	fp      idempotency.Fingerprint
	until   time.Time
	expires time.Time
	data    string
}

// begin returns what a claim gets: RUNNING with granted, or the state that
// stands in its way.
func (m *model) begin(c *idempotency.Claim, now time.Time, atomic bool) (granted, mismatch bool) {
	held := m.state == idempotency.StateRunning || m.state == idempotency.StateUnknown
	over := m.state == idempotency.StateUnknown || m.state == idempotency.StateRunning && !now.Before(m.until)
	takeover := over && c.Rerun || atomic && m.state == idempotency.StateRunning && over
	switch {
	case m.state == idempotency.StateAbsent && c.Late:
		return false, false
	case m.state != idempotency.StateAbsent && !c.Accepts(m.fp):
		return false, true
	case m.state == idempotency.StateAbsent:
		*m = model{fp: c.Fingerprint, epoch: 1}
	case held && m.owner == c.Owner:
	case m.state == idempotency.StateFree || takeover:
		m.epoch++
	case over:
		m.state = idempotency.StateUnknown
		return false, false
	default:
		return false, false
	}
	m.state, m.owner, m.until, m.expires = idempotency.StateRunning, c.Owner, now.Add(c.Lease), now.Add(c.Retention)
	return true, false
}

// end is a step by an owner: it counts while the record has that owner.
func (m *model) end(owner idempotency.Owner, to idempotency.State, now time.Time, retention time.Duration) error {
	held := m.state == idempotency.StateRunning || m.state == idempotency.StateUnknown
	switch {
	case m.owner == owner && m.state == to && !held, m.owner == owner && to == idempotency.StateUnknown && m.state == to:
		return nil // the same again
	case m.owner != owner || !held:
		return idempotency.ErrLost
	}
	m.state, m.expires = to, now.Add(retention)
	return nil
}

func (m *model) swept(now time.Time) bool {
	return m.state != idempotency.StateAbsent && m.state != idempotency.StateRunning && m.state != idempotency.StateUnknown && !now.Before(m.expires)
}

// testModel runs random histories of one identity against the store and the
// model. In real time the clock stands still as far as the model can see: its
// leases are too long to run out.
func (s *suite) testModel(t *testing.T, store idempotency.Store) {
	// Not the *testing.T itself: rapid asks that for its deadline, which a
	// synctest bubble forbids.
	rapid.Check(struct{ *testing.T }{t}, func(t *rapid.T) {
		h := &history{s: s, t: t, store: store, base: s.claim()}
		if s.fake {
			h.base.Lease, h.base.Retention = 10*time.Second, time.Minute
		}
		steps := map[string]func(*rapid.T){
			"begin":   h.begin,
			"finish":  h.finish,
			"release": func(t *rapid.T) { h.giveUp(t, idempotency.StateFree) },
			"abandon": func(t *rapid.T) { h.giveUp(t, idempotency.StateUnknown) },
			"resolve": h.resolve,
			"":        func(*rapid.T) {},
		}
		if !s.noLease {
			steps["renew"] = h.renew
		}
		if s.fake {
			steps["advance"] = h.advance
			steps["sweep"] = h.sweep
		}
		t.Repeat(steps)
		h.drop()
	})
}

// history is one run of the property.
type history struct {
	s     *suite
	t     *rapid.T
	store idempotency.Store
	base  idempotency.Claim
	m     model
	held  []holding
	count int
}

type holding struct {
	exec  idempotency.Execution
	owner idempotency.Owner
}

func (h *history) begin(t *rapid.T) {
	now := time.Now()
	if h.m.swept(now) {
		h.sweep(t) // until then the store may answer either way
	}
	if h.s.noLease && h.m.state == idempotency.StateRunning {
		return // the claim would wait for the transaction that holds the row
	}
	c := another(h.base)
	if len(h.held) > 0 && !h.s.atomic && rapid.Bool().Draw(t, "same owner") {
		c.Owner = rapid.SampledFrom(h.held).Draw(t, "owner").owner
	}
	c.Rerun = rapid.Bool().Draw(t, "rerun")
	c.Late = rapid.IntRange(0, 4).Draw(t, "late") == 0
	if rapid.IntRange(0, 3).Draw(t, "other request") == 0 {
		c.Fingerprint = "\x01\x00other"
	}
	granted, mismatch := h.m.begin(&c, now, h.s.atomic)
	exec, rec := begin(t, h.store, c)
	switch {
	case (exec != nil) != granted:
		t.Fatalf("granted %v: the model says %v; record %+v, model %+v", exec != nil, granted, rec, h.m)
	case exec != nil:
		if epoch := idempotency.Epoch(exec.Context(context.Background())); epoch != h.m.epoch {
			t.Fatalf("epoch %d: the model says %d", epoch, h.m.epoch)
		}
		h.held = append(h.held, holding{exec, c.Owner})
	case rec.Mismatch != mismatch:
		t.Fatalf("mismatch %v: the model says %v", rec.Mismatch, mismatch)
	case mismatch:
	case rec.State != h.m.state:
		t.Fatalf("state %v: the model says %v", rec.State, h.m.state)
	case rec.State == idempotency.StateDone && string(rec.Outcome.Data) != h.m.data:
		t.Fatalf("outcome %q: the model says %q", rec.Outcome.Data, h.m.data)
	}
}

// pick takes one of the executions that were granted, however long ago. One of
// an atomic store ends once, so it is taken out.
func (h *history) pick(t *rapid.T, ends bool) (holding, bool) {
	if len(h.held) == 0 {
		return holding{}, false
	}
	i := rapid.IntRange(0, len(h.held)-1).Draw(t, "execution")
	x := h.held[i]
	if ends && h.s.atomic {
		h.held = append(h.held[:i:i], h.held[i+1:]...)
	}
	return x, true
}

func (h *history) finish(t *rapid.T) {
	x, ok := h.pick(t, true)
	if !ok {
		return
	}
	h.count++
	data := fmt.Sprintf("outcome %d", h.count)
	before := h.m.state
	want := h.m.end(x.owner, idempotency.StateDone, time.Now(), h.base.Retention)
	if before != idempotency.StateDone && h.m.state == idempotency.StateDone {
		h.m.data = data
	}
	rec, err := x.exec.Finish(context.Background(), outcome(data))
	if h.m.state == idempotency.StateDone { // ours or another's: it is what stands
		mustDo(t, "Finish", err)
		mustStand(t, rec, h.m.data)
		return
	}
	if !errors.Is(err, want) || err == nil {
		t.Fatalf("Finish returned %v: the model says %v", err, want)
	}
}

func (h *history) giveUp(t *rapid.T, to idempotency.State) {
	x, ok := h.pick(t, true)
	if !ok {
		return
	}
	want := h.m.end(x.owner, to, time.Now(), h.base.Retention)
	step := x.exec.Release
	if to == idempotency.StateUnknown {
		step = x.exec.Abandon
	}
	if err := step(context.Background()); !errors.Is(err, want) {
		t.Fatalf("to %v returned %v: the model says %v", to, err, want)
	}
	if want == nil && h.s.noLease && to == idempotency.StateFree {
		h.forget(t)
	}
}

// forget finds out whether a release left a record, which is the store's choice.
func (h *history) forget(t *rapid.T) {
	c := another(h.base)
	c.Late, c.Fingerprint = true, h.m.fp
	exec, rec := begin(t, h.store, c)
	if exec == nil {
		if rec.State != idempotency.StateAbsent {
			t.Fatalf("after a release the state is %v: want FREE or none", rec.State)
		}
		h.m = model{}
		return
	}
	mustDo(t, "Release", exec.Release(context.Background()))
	h.m.epoch++
}

func (h *history) renew(t *rapid.T) {
	x, ok := h.pick(t, false)
	if !ok {
		return
	}
	now := time.Now()
	lives := h.m.owner == x.owner && (h.m.state == idempotency.StateRunning || h.m.state == idempotency.StateUnknown)
	left, err := x.exec.Renew(context.Background())
	if !lives {
		if !errors.Is(err, idempotency.ErrLost) {
			t.Fatalf("Renew returned %v, %v: the model says ErrLost", left, err)
		}
		return
	}
	mustDo(t, "Renew", err)
	h.m.state, h.m.until = idempotency.StateRunning, now.Add(h.base.Lease)
}

func (h *history) resolve(t *rapid.T) {
	now := time.Now()
	if h.m.swept(now) {
		h.sweep(t)
	}
	if h.s.noLease && h.m.state == idempotency.StateRunning {
		return // the resolution would wait for the transaction that holds the row
	}
	r := idempotency.Resolution{
		State: rapid.SampledFrom([]idempotency.State{
			idempotency.StateDone, idempotency.StateFree, idempotency.StateCancelled,
		}).Draw(t, "to"),
		Retention: h.base.Retention,
	}
	if r.State == idempotency.StateDone {
		h.count++
		r.Outcome = outcome(fmt.Sprintf("resolved %d", h.count))
	}
	open := h.m.state == idempotency.StateUnknown || h.m.state == idempotency.StateRunning && !now.Before(h.m.until)
	none := h.m.state == idempotency.StateAbsent || h.m.state == idempotency.StateFree
	same := h.m.state == idempotency.StateCancelled && r.State == idempotency.StateCancelled
	err := h.store.Resolve(context.Background(), h.base.ID, r)
	tombstone := none && r.State == idempotency.StateCancelled
	if !open && !same && !tombstone {
		if !errors.Is(err, idempotency.ErrNotResolvable) {
			t.Fatalf("Resolve %v to %v returned %v: the model says ErrNotResolvable", h.m.state, r.State, err)
		}
		return
	}
	mustDo(t, "Resolve", err)
	if same {
		return
	}
	h.m.state, h.m.owner, h.m.expires = r.State, idempotency.Owner{}, now.Add(r.Retention)
	if r.State == idempotency.StateDone {
		h.m.data = string(r.Outcome.Data)
	}
}

func (h *history) advance(t *rapid.T) {
	d := rapid.SampledFrom([]time.Duration{time.Second, 9 * time.Second, 10 * time.Second, 50 * time.Second, time.Minute}).Draw(t, "time")
	h.s.wait(d)
}

func (h *history) sweep(t *rapid.T) {
	want := h.m.swept(time.Now())
	n := sweep(t, h.store)
	if want && n < 1 {
		t.Fatalf("Sweep took %d records: the model says that this one's retention is over", n)
	}
	if want {
		h.m = model{}
	}
}

// drop ends what an atomic store still holds, or its connections run out.
func (h *history) drop() {
	if !h.s.atomic {
		return
	}
	for _, x := range h.held {
		_ = x.exec.Release(context.Background())
	}
}
