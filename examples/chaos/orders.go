package main

import (
	"maps"
	"slices"
	"sync"

	"github.com/belayrpc/belay/examples/chaos/order"
)

// killsUnderWay bounds the calls that are on their way to a kill, or recover from
// one.
const killsUnderWay = 8

// stalesUnderWay bounds those that are held up. A process that is stopped cannot
// overtake another, so where all are held up that way only few are at a time.
func (c cell) stalesUnderWay() int {
	if c.phase == kills {
		return 2
	}
	return 8
}

// orders decides which calls meet what, until the goals are reached.
type orders struct {
	cell   cell
	goals  goals
	stales []order.Point
	enough chan struct{} // closed when the goals are reached
	once   sync.Once     // closes it

	mu       sync.Mutex // guards all below
	given    map[order.Deed]int
	killed   map[order.Point]int // as reported by those killed
	kills    int
	staled   int
	nextKill int
	next     int
}

func newOrders(c cell, g goals) *orders {
	return &orders{
		cell: c, goals: g, stales: c.stalePoints(), given: make(map[order.Deed]int),
		killed: make(map[order.Point]int), enough: make(chan struct{}),
	}
}

// take returns an order for a call, nil for most. The call gives it back when it
// is over.
func (o *orders) take() *order.Order {
	o.mu.Lock()
	defer o.mu.Unlock()
	rarest := o.rarestLocked()
	killsLeft := o.kills < o.goals.kills || o.killed[rarest] < o.goals.killsPerPoint
	stalesLeft := o.staled < o.goals.stales
	ahead := o.staled*o.goals.kills > o.kills*o.goals.stales // so that both are done at about the same time
	switch {
	case killsLeft && o.given[order.Kill] < killsUnderWay && (ahead || !stalesLeft || o.staleFullLocked()):
		o.given[order.Kill]++
		return &order.Order{Deed: order.Kill, Point: rarest}
	case stalesLeft && !o.staleFullLocked():
		o.next++
		deeds := o.cell.staleDeeds()
		ord := order.Order{Deed: deeds[o.next/len(o.stales)%len(deeds)], Point: o.stales[o.next%len(o.stales)]}
		ord.For = o.cell.staleFor(ord.Point)
		o.given[order.Stop]++
		return &ord
	default:
		return nil
	}
}

func (o *orders) staleFullLocked() bool { return o.given[order.Stop] >= o.cell.stalesUnderWay() }

// rarestLocked is the point at which the fewest died so far; among equals, each
// in turn.
func (o *orders) rarestLocked() order.Point {
	o.nextKill++
	turned := slices.Concat(order.Points[o.nextKill%len(order.Points):], order.Points[:o.nextKill%len(order.Points)])
	return slices.MinFunc(turned, func(a, b order.Point) int { return o.killed[a] - o.killed[b] })
}

// over takes an order back from a call that has ended, or whose server has.
func (o *orders) over(ord *order.Order) {
	if ord == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if ord.Deed == order.Kill {
		o.given[order.Kill]--
	} else {
		o.given[order.Stop]--
	}
}

// done counts a deed that a server reported.
func (o *orders) done(deed order.Deed, point order.Point) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if deed == order.Kill {
		o.kills++
		o.killed[point]++
	} else {
		o.staled++
	}
	if o.metLocked() {
		o.once.Do(func() { close(o.enough) })
	}
}

// end ends the orders, whatever is reached.
func (o *orders) end() { o.once.Do(func() { close(o.enough) }) }

func (o *orders) metLocked() bool {
	return o.kills >= o.goals.kills && o.staled >= o.goals.stales && o.killed[o.rarestLocked()] >= o.goals.killsPerPoint
}

// counts returns the kills, by point too, and the stales.
func (o *orders) counts() (kills int, byPoint map[order.Point]int, stales int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.kills, maps.Clone(o.killed), o.staled
}
