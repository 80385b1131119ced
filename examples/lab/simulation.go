package main

import (
	"container/heap"
	"math/rand/v2"
	"time"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/interceptors/policy"
)

// simulation is clients that call servers, as events on a clock. The clock is
// the bubble's: banks and breakers read it themselves, so it must stand where
// the event is that they are asked in.
type simulation struct {
	stack   string
	answers bool // servers that are out answer UNAVAILABLE; else nobody is there
	random  *rand.Rand
	rate    float64 // calls a second of each client
	clients []simClient
	servers []simServer
	events  eventQueue
	number  uint64
	now     time.Duration

	// Counts by bin of scaleBin. tried are attempts, arrived those of them that
	// found a server.
	begun, tried, arrived, ok, failed []float64
}

const (
	simDeadline    = time.Second
	simRefusal     = 500 * time.Microsecond // how fast a failure comes back
	simServiceTime = 2 * time.Millisecond   // 500 a second
	simTick        = time.Millisecond
)

type simClient struct {
	bank    *budget.Budget   // Belay
	breaker *breaker.Breaker // Belay; nil is off
	tokens  float64          // ratio10

	// goneSince is when an attempt first found nobody since one found a server;
	// 0 is not now. Belay waits for a connection for its ConnectGrace from then.
	goneSince time.Duration
}

// simServer works on one call at a time and has a queue.
type simServer struct {
	freeAt time.Duration // when the queue will have been worked off
	bank   simServerBank
}

// simServerBank is the server's retry bank by the rule of design: 0.06 for each
// first try that succeeds, 1 for each retry that fails, and "do not retry" while
// there is less than 1. The real one is not a package of its own.
type simServerBank struct{ balance float64 }

// simServerBankCap is what two seconds of a server's traffic earn.
const simServerBankCap = 48

func (b *simServerBank) succeeded(retry bool) {
	if !retry {
		b.balance = min(b.balance+0.06, simServerBankCap)
	}
}

func (b *simServerBank) failed(retry bool) (stop bool) {
	if retry {
		b.balance = max(b.balance-1, -simServerBankCap)
	}
	return b.balance < 1
}

// simCall is one call of a user's.
type simCall struct {
	client   int
	deadline time.Duration
	attempts int
	permit   budget.Permit
	paid     bool
	probe    breaker.Permit
	started  time.Duration // of the attempt
}

type event struct {
	at     time.Duration
	number uint64 // events at one time happen in the order they were made
	do     func()
}

// eventQueue is a heap by time.
type eventQueue struct{ events []event }

func (q *eventQueue) Len() int      { return len(q.events) }
func (q *eventQueue) Swap(i, j int) { q.events[i], q.events[j] = q.events[j], q.events[i] }
func (q *eventQueue) Push(x any)    { q.events = append(q.events, x.(event)) } //nolint:forcetypeassert // heap hands back what it was given

func (q *eventQueue) Less(i, j int) bool {
	a, b := &q.events[i], &q.events[j]
	return a.at < b.at || a.at == b.at && a.number < b.number
}

func (q *eventQueue) Pop() any {
	last := len(q.events) - 1
	e := q.events[last]
	q.events[last] = event{} // lets go of its function
	q.events = q.events[:last]
	return e
}

func newSimulation(name string, random *rand.Rand, clients, servers int) *simulation {
	n := int(scaleEnd/scaleBin) + 1
	s := &simulation{
		stack: name, random: random, rate: 4,
		clients: make([]simClient, clients), servers: make([]simServer, servers),
		begun: make([]float64, n), tried: make([]float64, n), arrived: make([]float64, n), ok: make([]float64, n), failed: make([]float64, n),
	}
	for i := range s.clients {
		c := &s.clients[i]
		c.tokens = 10
		if isBelay(name) {
			c.bank = budget.New(budget.Config{})
		}
		if name == stackBelay {
			c.breaker = breaker.New(breaker.Config{})
		}
	}
	for i := range s.servers {
		s.servers[i].bank.balance = 3
	}
	return s
}

// run lets the clock go to the end.
func (s *simulation) run(end time.Duration) {
	for i := range s.clients {
		s.nextCall(i)
	}
	for s.events.Len() > 0 && s.events.events[0].at < end {
		// In ticks: a sleep for each event would take longer than the event.
		if e := &s.events.events[0]; e.at-s.now >= simTick {
			tick := e.at.Truncate(simTick)
			time.Sleep(tick - s.now)
			s.now = tick
		}
		e := heap.Pop(&s.events).(event) //nolint:forcetypeassert // as above
		e.do()
	}
}

func (s *simulation) at(t time.Duration, do func()) {
	s.number++
	heap.Push(&s.events, event{at: t, number: s.number, do: do})
}

func (s *simulation) count(bins []float64, t time.Duration) {
	if i := int(t / scaleBin); i < len(bins) {
		bins[i]++
	}
}

// nextCall makes the client's next user come.
func (s *simulation) nextCall(client int) {
	t := s.now + time.Duration(s.random.ExpFloat64()/s.rate*float64(time.Second))
	s.at(t, func() {
		s.nextCall(client)
		s.count(s.begun, t)
		s.clients[client].tokens = min(s.clients[client].tokens+0.1, 10)
		s.attempt(&simCall{client: client, deadline: t + simDeadline}, t)
	})
}

// attempt makes an attempt of a call at time t.
func (s *simulation) attempt(c *simCall, t time.Duration) {
	permit, err := s.clients[c.client].breaker.Allow()
	if err != nil {
		s.fail(c, t)
		return
	}
	c.probe, c.started = permit, t
	c.attempts++
	s.count(s.tried, t)
	out := t >= scaleGoneAt && t < scaleBackAt
	if out && !s.answers {
		s.at(t+simRefusal, func() { s.notSent(c, t+simRefusal) })
		return
	}
	s.clients[c.client].goneSince = 0
	s.count(s.arrived, t)
	server := &s.servers[s.random.IntN(len(s.servers))]
	retry := c.attempts > 1
	if out {
		stop := server.bank.failed(retry)
		s.at(t+simRefusal, func() { s.failedAttempt(c, t+simRefusal, stop) })
		return
	}
	service := simServiceTime
	if t >= scaleBackAt && t < scaleBackAt+scaleCold {
		service *= 2
	}
	start := max(server.freeAt, t)
	if start >= c.deadline {
		// Nobody waits when its turn comes: the guard drops it unworked, and the
		// caller's own clock ends the call.
		s.at(c.deadline, func() { s.timedOut(c, c.deadline) })
		return
	}
	server.freeAt = start + service
	if server.freeAt > c.deadline {
		s.at(c.deadline, func() { s.timedOut(c, c.deadline) })
		return
	}
	done := server.freeAt
	s.at(done, func() {
		server.bank.succeeded(retry)
		s.succeeded(c, done)
	})
}

func (s *simulation) succeeded(c *simCall, t time.Duration) {
	c.probe.Done(breaker.Success, t-c.started)
	client := &s.clients[c.client]
	switch {
	case c.paid:
		c.permit.Refund()
		c.paid = false
	case c.attempts == 1 && client.bank != nil:
		client.bank.Deposit()
	}
	s.count(s.ok, t)
}

// timedOut ends a call whose deadline passed while an attempt ran.
func (s *simulation) timedOut(c *simCall, t time.Duration) {
	c.probe.Done(breaker.Failure, t-c.started)
	s.spend(c)
	s.fail(c, t)
}

// notSent ends an attempt that found nobody. Belay waits for a connection, as
// long as the channel's grace lasts, and pays nothing; the others know no
// difference.
func (s *simulation) notSent(c *simCall, t time.Duration) {
	client := &s.clients[c.client]
	if client.bank == nil {
		s.failedAttempt(c, t, false)
		return
	}
	c.probe.Done(breaker.Failure, t-c.started)
	if c.paid {
		c.permit.Refund()
		c.paid = false
	}
	if client.goneSince == 0 {
		client.goneSince = t
	}
	until := min(client.goneSince+policy.DefaultConnectGrace, c.deadline)
	if until <= t || !client.breaker.Ready() || c.attempts >= policy.DefaultMaxAttempts {
		s.fail(c, t)
		return
	}
	// A server that comes back in this time would be noticed in gRPC; here none
	// does but at the very end of the outage, which is left out.
	s.at(until, func() { s.fail(c, until) })
}

// failedAttempt ends an attempt that a server answered with UNAVAILABLE.
func (s *simulation) failedAttempt(c *simCall, t time.Duration, stop bool) {
	c.probe.Done(breaker.Failure, t-c.started)
	s.spend(c)
	delay, ok := s.again(c, stop)
	if !ok || t+delay >= c.deadline {
		s.fail(c, t)
		return
	}
	s.at(t+delay, func() { s.attempt(c, t+delay) })
}

// again asks the stack for one more attempt and when.
func (s *simulation) again(c *simCall, stop bool) (time.Duration, bool) {
	client := &s.clients[c.client]
	full := min(backoffBase<<(c.attempts-1), backoffMax)
	switch s.stack {
	case stackMiddleware:
		jittered := time.Duration(float64(full) * (0.9 + 0.2*s.random.Float64()))
		return jittered, c.attempts < 3
	case stackRatio:
		if c.attempts >= 3 || client.tokens < 1 {
			return 0, false
		}
		client.tokens--
		return time.Duration(s.random.Int64N(int64(full))), true
	case stackBelay, stackNoBreaker:
		if stop || c.attempts >= policy.DefaultMaxAttempts || !client.breaker.Ready() {
			return 0, false
		}
		permit, ok := client.bank.Withdraw()
		c.permit, c.paid = permit, ok
		return time.Duration(s.random.Int64N(int64(full))), ok
	default:
		return 0, false
	}
}

func (s *simulation) spend(c *simCall) {
	if c.paid {
		c.permit.Spend()
		c.paid = false
	}
}

func (s *simulation) fail(c *simCall, t time.Duration) {
	s.spend(c)
	s.count(s.failed, t)
}
