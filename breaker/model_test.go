package breaker_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/belayrpc/belay/breaker"
)

// model is the breaker as its documentation tells it: slow, obvious, and without any of the
// means by which the breaker is fast. It keeps every result and counts them anew each time.
type model struct {
	config breaker.Config

	state     breaker.State
	stay      int // numbers the stays in a state
	since     time.Time
	until     time.Time // Open: taken from the breaker, within bounds that the model checks
	opens     int
	results   []modelResult // Closed, ForcedClosed
	leases    map[int]time.Time
	succeeded int
	late      uint64
}

type modelResult struct {
	at           time.Time
	failed, slow bool
}

type modelPermit struct {
	permit breaker.Permit
	number int
	stay   int
	probe  bool
	spent  bool
}

func (m *model) enter(to breaker.State, now time.Time) {
	m.state, m.since = to, now
	m.stay++
	m.results, m.succeeded, m.leases = nil, 0, map[int]time.Time{}
	if to == breaker.Closed || to == breaker.ForcedClosed {
		m.opens = 0
	}
}

// open enters Open for as long as the breaker says, if that is within bounds.
func (m *model) open(rt *rapid.T, b *breaker.Breaker, now time.Time) {
	longest := min(m.config.OpenFor<<m.opens, m.config.MaxOpenFor)
	left := b.TimeLeft()
	if left < longest/2 || left > longest {
		rt.Fatalf("opening %d is for %v, want %v to %v", m.opens+1, left, longest/2, longest)
	}
	m.enter(breaker.Open, now)
	m.opens++
	m.until = now.Add(left)
}

// window counts the results of the ten buckets that end with the current one.
func (m *model) window(now time.Time) breaker.Counts {
	width := m.config.Window / 10
	bucket := func(at time.Time) int64 { return int64(at.Sub(m.since) / width) }
	var counts breaker.Counts
	for _, r := range m.results {
		if bucket(now)-bucket(r.at) >= 10 {
			continue
		}
		counts.Calls++
		if r.failed {
			counts.Failures++
		}
		if r.slow {
			counts.Slow++
		}
	}
	return counts
}

func (m *model) run() int {
	n := 0
	for _, r := range slices.Backward(m.results) {
		if !r.failed {
			break
		}
		n++
	}
	return n
}

func (m *model) underWay(now time.Time) int {
	n := 0
	for _, until := range m.leases {
		if now.Before(until) {
			n++
		}
	}
	return n
}

func (m *model) admits(now time.Time) bool {
	switch m.state {
	case breaker.Closed, breaker.ForcedClosed:
		return true
	case breaker.Open:
		return !now.Before(m.until)
	case breaker.HalfOpen:
		return m.underWay(now) < m.config.Probes
	case breaker.ForcedOpen:
	}
	return false
}

func (m *model) allow(number int, now time.Time) *modelPermit {
	if m.state == breaker.Open {
		m.enter(breaker.HalfOpen, now)
	}
	p := &modelPermit{number: number, stay: m.stay, probe: m.state == breaker.HalfOpen}
	if p.probe {
		m.leases[number] = now.Add(m.config.ProbeLease)
	}
	return p
}

func (m *model) done(rt *rapid.T, b *breaker.Breaker, p *modelPermit, outcome breaker.Outcome, latency time.Duration, now time.Time) {
	failed, slow := outcome == breaker.Failure, latency >= m.config.SlowCall
	switch {
	case p.spent:
	case p.stay != m.stay:
		if outcome != breaker.Neutral {
			m.late++
		}
	case p.probe && (failed || slow && outcome == breaker.Success):
		m.open(rt, b, now)
	case p.probe:
		delete(m.leases, p.number)
		if outcome == breaker.Success {
			m.succeeded++
		}
		if m.succeeded == m.config.Probes {
			m.enter(breaker.Closed, now)
		}
	case outcome != breaker.Neutral:
		m.results = append(m.results, modelResult{at: now, failed: failed, slow: slow})
		c := m.window(now)
		tooMany := m.run() >= m.config.ConsecutiveFailures ||
			int(c.Calls) >= m.config.MinCalls && (2*c.Failures >= c.Calls || 4*c.Slow >= 3*c.Calls)
		if m.state == breaker.Closed && (failed || slow) && tooMany {
			m.open(rt, b, now)
		}
	}
	p.spent = true
}

// Whatever is done to a breaker, in whatever order and at whatever times, it is where its
// documentation says.
func TestModel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		// rapid would ask a *testing.T for its deadline, which is not allowed in a bubble.
		rapid.Check(struct{ testing.TB }{t}, func(rt *rapid.T) {
			config := breaker.Config{
				FailureRate:         0.5,
				MinCalls:            rapid.IntRange(1, 8).Draw(rt, "MinCalls"),
				Window:              time.Second,
				ConsecutiveFailures: rapid.IntRange(2, 10).Draw(rt, "ConsecutiveFailures"),
				SlowCall:            100 * time.Millisecond,
				SlowRate:            0.75,
				OpenFor:             200 * time.Millisecond,
				MaxOpenFor:          time.Second,
				Probes:              rapid.IntRange(1, 3).Draw(rt, "Probes"),
				ProbeLease:          300 * time.Millisecond,
			}
			var told []breaker.Transition
			config.OnTransition = func(tr breaker.Transition) { told = append(told, tr) }
			b := breaker.New(config)
			m := &model{config: config, since: time.Now(), leases: map[int]time.Time{}}
			var permits []*modelPermit

			done := func(rt *rapid.T, outcome breaker.Outcome) {
				if len(permits) == 0 {
					rt.Skip("no permit")
				}
				// Any permit, the spent included; mostly a fresh one.
				p := permits[len(permits)-1-rapid.IntRange(0, len(permits)-1).Draw(rt, "permit")]
				latency := time.Duration(rapid.IntRange(0, 120).Draw(rt, "ms")) * time.Millisecond
				p.permit.Done(outcome, latency)
				m.done(rt, b, p, outcome, latency, time.Now())
			}
			rt.Repeat(map[string]func(*rapid.T){
				"allow": func(rt *rapid.T) {
					want := m.admits(time.Now())
					if got := b.Ready(); got != want {
						rt.Fatalf("Ready() = %v, want %v", got, want)
					}
					permit, err := b.Allow()
					if (err == nil) != want {
						rt.Fatalf("Allow() error = %v, want admitted %v", err, want)
					}
					if want {
						p := m.allow(len(permits), time.Now())
						p.permit = permit
						permits = append(permits, p)
					}
				},
				"success": func(rt *rapid.T) { done(rt, breaker.Success) },
				"failure": func(rt *rapid.T) { done(rt, breaker.Failure) },
				"neutral": func(rt *rapid.T) { done(rt, breaker.Neutral) },
				"wait": func(rt *rapid.T) {
					time.Sleep(time.Duration(rapid.IntRange(1, 400).Draw(rt, "ms")) * time.Millisecond)
				},
				"wait_for_probe": func(*rapid.T) { time.Sleep(b.TimeLeft()) },
				"force": func(rt *rapid.T) {
					// Seldom, or little else would be seen.
					switch rapid.IntRange(0, 20).Draw(rt, "how") {
					case 0:
						b.ForceOpen()
						if m.state != breaker.ForcedOpen {
							m.enter(breaker.ForcedOpen, time.Now())
						}
					case 1:
						b.ForceClose()
						if m.state != breaker.ForcedClosed {
							m.enter(breaker.ForcedClosed, time.Now())
						}
					default:
						b.Resume()
						if m.state == breaker.ForcedOpen || m.state == breaker.ForcedClosed {
							m.enter(breaker.Closed, time.Now())
						}
					}
				},
				"": func(rt *rapid.T) { compare(rt, b, m, told) },
			})
		})
	})
}

func compare(rt *rapid.T, b *breaker.Breaker, m *model, told []breaker.Transition) {
	now := time.Now()
	got := b.Snapshot()
	want := breaker.Snapshot{State: m.state, Since: m.since, Late: m.late}
	switch m.state {
	case breaker.Closed:
		want.Run = m.run()
		want.Counts = m.window(now)
	case breaker.ForcedClosed:
		want.Run = m.run()
		want.Counts = m.window(now)
	case breaker.Open:
		want.TimeLeft = max(0, m.until.Sub(now))
		want.Opens = m.opens
	case breaker.HalfOpen:
		want.ProbesUnderWay, want.ProbesSucceeded = m.underWay(now), m.succeeded
		want.Opens = m.opens
	case breaker.ForcedOpen:
		want.Opens = m.opens
	}
	if len(told) > 0 {
		want.Last = told[len(told)-1]
	}
	if got != want {
		rt.Fatalf("the breaker is not where the model is\n got %+v\nwant %+v", got, want)
	}
	if got.Last.Seq != uint64(len(told)) || len(told) != m.stay {
		rt.Fatalf("%d transitions, %d told, want %d", got.Last.Seq, len(told), m.stay)
	}
}
