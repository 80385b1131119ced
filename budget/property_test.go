package budget_test

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/budget"
)

// model is the bank as its documentation reads, with exact integers of a
// hundredth of a retry, one success at a time, and every success remembered.
type model struct {
	initial, earn, fixedCap int
	window                  time.Duration
	maxInFlight             int

	balance   int
	successes []time.Time
	inFlight  int
	spent     int
	want      budget.Snapshot // its counters
}

func (m *model) capacity() int {
	if m.fixedCap > 0 {
		return m.fixedCap
	}
	recent := 0
	for _, at := range m.successes {
		if time.Since(at) < m.window {
			recent++
		}
	}
	return max(m.initial, m.earn*recent)
}

func (m *model) clamp() { m.balance = min(m.balance, m.capacity()) }

func (m *model) deposit() {
	m.clamp()
	m.successes = append(m.successes, time.Now())
	m.balance += m.earn
	m.clamp()
	m.want.Deposits++
}

func (m *model) withdraw() bool {
	m.clamp()
	if m.balance < 100 || (m.maxInFlight > 0 && m.inFlight == m.maxInFlight) {
		m.want.Refused++
		return false
	}
	m.balance -= 100
	m.inFlight++
	m.want.Withdrawals++
	return true
}

func (m *model) settle(refund bool) {
	m.clamp()
	m.inFlight--
	if !refund {
		m.spent++
		m.want.Spent++
		return
	}
	m.want.Refunds++
	m.balance += 100
	m.clamp()
}

func (m *model) snapshot() budget.Snapshot {
	m.clamp()
	s := m.want
	s.Balance = float64(m.balance) / 100
	s.Cap = float64(m.capacity()) / 100
	s.InFlight = m.inFlight
	return s
}

// inBubble hides T.Deadline, which rapid would call and which panics in fake time.
type inBubble struct{ rapid.TB }

// Steps of time are whole steps of the window here and few successes fall into
// one, so the bank must agree with the model exactly, at every moment.
func TestProperty_sequential(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(inBubble{t}, func(t *rapid.T) {
			t.Repeat(rapid.StateMachineActions(newMachine(t)))
		})
	})
}

// machine does everything to a bank and to its model. rapid calls its exported
// methods in random order.
type machine struct {
	bank    *budget.Budget
	model   *model
	start   int // hundredths
	out     []budget.Permit
	settled []budget.Permit
}

const modelStep = time.Millisecond

func newMachine(t *rapid.T) *machine {
	m := &model{
		initial:     rapid.IntRange(1, 500).Draw(t, "initial"),
		earn:        rapid.IntRange(1, 100).Draw(t, "earn"),
		maxInFlight: rapid.IntRange(0, 4).Draw(t, "maxInFlight"),
		window:      64 * modelStep,
	}
	if rapid.Bool().Draw(t, "fixed") {
		m.fixedCap = max(100, m.initial) + rapid.IntRange(0, 500).Draw(t, "above")
	}
	startEmpty := rapid.Bool().Draw(t, "startEmpty")
	if !startEmpty {
		m.balance = m.initial
	}
	bank := budget.New(budget.Config{
		Initial:     float64(m.initial) / 100,
		Earn:        float64(m.earn) / 100,
		Cap:         float64(m.fixedCap) / 100,
		Window:      m.window,
		MaxInFlight: m.maxInFlight,
		StartEmpty:  startEmpty,
	})
	if err := bank.Err(); err != nil {
		t.Fatal(err)
	}
	return &machine{bank: bank, model: m, start: m.balance}
}

func (m *machine) Deposit(t *rapid.T) {
	for range rapid.IntRange(1, 20).Draw(t, "n") {
		m.bank.Deposit()
		m.model.deposit()
	}
	time.Sleep(modelStep) // keeps a step from becoming busy
}

func (m *machine) Withdraw(t *rapid.T) {
	p, ok := m.bank.Withdraw()
	if want := m.model.withdraw(); ok != want {
		t.Fatalf("Withdraw() = %v, want %v", ok, want)
	}
	if ok {
		m.out = append(m.out, p)
	}
}

func (m *machine) Refund(t *rapid.T) {
	if len(m.out) > 0 {
		m.take(t).Refund()
		m.model.settle(true)
	}
}

func (m *machine) Spend(t *rapid.T) {
	if len(m.out) > 0 {
		m.take(t).Spend()
		m.model.settle(false)
	}
}

func (m *machine) take(t *rapid.T) budget.Permit {
	i := rapid.IntRange(0, len(m.out)-1).Draw(t, "permit")
	p := m.out[i]
	m.out = append(m.out[:i], m.out[i+1:]...)
	m.settled = append(m.settled, p)
	return p
}

func (m *machine) SettleAgain(*rapid.T) {
	for _, p := range m.settled {
		p.Refund()
		p.Spend()
	}
}

func (m *machine) Wait(t *rapid.T) {
	time.Sleep(modelStep * time.Duration(rapid.IntRange(1, 100).Draw(t, "steps")))
}

// Check runs after every action. Looking moves the bank's window, so half of the
// time it is left to find its own way.
func (m *machine) Check(t *rapid.T) {
	if rapid.Bool().Draw(t, "look") {
		if diff := cmp.Diff(m.model.snapshot(), m.bank.Snapshot()); diff != "" {
			t.Fatalf("Snapshot() (-want +got):\n%s", diff)
		}
	}
	lost := 100 * (m.model.spent + len(m.out))
	if most := m.start + m.model.earn*len(m.model.successes); lost > most {
		t.Fatalf("failed retries and permits out: %d hundredths, want at most %d", lost, most)
	}
}

const (
	racingInitial = 3
	racingEarn    = 10 // hundredths
)

// The bound holds at every moment for callers that race.
func TestProperty_concurrent(t *testing.T) {
	bank := budget.New(budget.Config{
		Initial: racingInitial, Earn: racingEarn / 100.0, Window: 10 * time.Millisecond,
	})
	var total racing
	var wg sync.WaitGroup
	for seed := range uint64(8) {
		wg.Go(func() { total.run(t, bank, rand.New(rand.NewPCG(seed, 37))) })
	}
	wg.Wait()
	s := bank.Snapshot()
	checkIdentities(t, s)
	got := [3]int{s.InFlight, int(s.Deposits), int(s.Spent)}
	if want := [3]int{0, int(total.successes.Load()), int(total.lost.Load())}; got != want {
		t.Errorf("in flight, deposits, spent = %v, want %v", got, want)
	}
}

// racing counts on the safe side of a race: a success before it is deposited, a
// permit after it was given and until just before its refund. So it never sees
// more retries than the bank had successes for.
type racing struct{ successes, lost atomic.Int64 }

func (r *racing) run(t *testing.T, bank *budget.Budget, rnd *rand.Rand) {
	t.Helper()
	var held []budget.Permit
	for range 1000 {
		switch rnd.IntN(4) {
		case 0, 1:
			r.successes.Add(1)
			bank.Deposit()
		case 2:
			p, ok := bank.Withdraw()
			if !ok {
				continue
			}
			held = append(held, p)
			if n := r.lost.Add(1); 100*n > 100*racingInitial+racingEarn*r.successes.Load() {
				t.Errorf("%d retries lost or out after %d successes", n, r.successes.Load())
			}
		case 3:
			held = r.settleLast(held, rnd.IntN(2) == 0)
		}
		checkIdentities(t, bank.Snapshot())
	}
	for len(held) > 0 {
		held = r.settleLast(held, false)
	}
}

func (r *racing) settleLast(held []budget.Permit, refund bool) []budget.Permit {
	if len(held) == 0 {
		return nil
	}
	p := held[len(held)-1]
	if refund {
		r.lost.Add(-1)
		p.Refund()
	} else {
		p.Spend()
	}
	return held[:len(held)-1]
}

func checkIdentities(t *testing.T, s budget.Snapshot) {
	t.Helper()
	const rounding = 1e-6 // of the floats of a Snapshot
	if s.Withdrawals != s.Refunds+s.Spent+uint64(s.InFlight) {
		t.Errorf("withdrawals do not add up: %+v", s)
	}
	if s.Balance+float64(s.Spent)+float64(s.InFlight) > racingInitial+racingEarn/100.0*float64(s.Deposits)+rounding {
		t.Errorf("more than was paid in: %+v", s)
	}
	if s.Balance < 0 || s.Balance > s.Cap {
		t.Errorf("balance out of range: %+v", s)
	}
}
