package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/belayrpc/belay/examples/chaos/order"
)

// The names that the result lines have.
const (
	postgresql = "postgresql"
	sqlite     = "sqlite"

	same  = "same-transaction"
	lease = "lease"

	kills = "kills"
	stale = "stale"

	noMutant = "none"
)

// cell is one run: three servers and their clients on a database of their own.
type cell struct {
	store, mode, phase string
	mutant             mutant
}

func (c cell) String() string {
	return fmt.Sprintf("store=%s mode=%s phase=%s mutant=%s", c.store, c.mode, c.phase, c.mutant.name)
}

// cells are all of them, the servers as they are shipped first.
func cells() []cell {
	all := make([]cell, 0, 16)
	for _, store := range []string{postgresql, sqlite} {
		for _, mode := range []string{same, lease} {
			for _, phase := range []string{kills, stale} {
				all = append(all, cell{store, mode, phase, unchanged}, cell{store, mode, phase, mutants[mode]})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b cell) int {
		return boolInt(a.mutant.name != noMutant) - boolInt(b.mutant.name != noMutant)
	})
	return all
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// goals are what a cell goes on for.
type goals struct {
	killsPerPoint int
	kills         int // in all
	stales        int
}

// The bars that the goals are for.
const (
	minKills         = 500
	minKillsPerPoint = 25
	minStales        = 200
	minDuplicates    = 20 // that a mutant must show
)

func (c cell) goals(quick bool) goals {
	switch {
	case quick && c.phase == kills:
		return goals{killsPerPoint: 1, kills: len(order.Points), stales: 6}
	case quick:
		return goals{kills: 3, stales: 24}
	// A mutant has to be seen, not to be counted.
	case c.mutant != unchanged && c.phase == kills:
		return goals{killsPerPoint: 6, kills: 6 * len(order.Points), stales: 100}
	case c.mutant != unchanged:
		return goals{kills: 10, stales: 150}
	case c.phase == kills:
		return goals{killsPerPoint: minKillsPerPoint, kills: minKills + len(order.Points), stales: 90}
	default:
		return goals{kills: 25, stales: minStales}
	}
}

// The times of a cell. A lease is short enough to be outlived often, and long
// enough for a handler that nobody disturbs.
const (
	leaseTime   = 120 * time.Millisecond
	staleTime   = 320 * time.Millisecond // longer than a lease and the next look at it
	staleLocked = 140 * time.Millisecond // where everybody else stands still meanwhile
)

// server is how the cell's servers run.
func (c cell) server(dsn string) order.Server {
	mode := "same"
	if c.mode == lease {
		mode = "lease"
	}
	return order.Server{
		Store: c.store, Mode: mode, DSN: dsn, Lease: leaseTime, IdleTimeout: leaseTime,
		NoRenewal: c.phase == stale, LockTimeout: time.Second, StoreTimeout: 2 * time.Second, MaxExecution: 5 * time.Second,
	}
}

// staleDeeds are how. Where leases are renewed only a process that stands still
// outlives one.
func (c cell) staleDeeds() []order.Deed {
	if c.phase == kills {
		return []order.Deed{order.Stop}
	}
	return []order.Deed{order.Stop, order.Hold}
}

// stalePoints are where a call is held up, those that matter most more than once.
func (c cell) stalePoints() []order.Point {
	points := []order.Point{order.HandlerStart, order.MidEffect, order.BeforeFinish, order.AfterFinish, order.AfterCommitAck}
	switch {
	case c.mode == same:
		// Where effect and verdict would come apart.
		return append(points, order.AfterCommitAck, order.AfterCommitAck)
	// With leases, where a handler may be overtaken, and in the phase "kills", which
	// has few, only there. On SQLite that is before it has the one writer's lock.
	case c.phase == kills && c.store == sqlite:
		return []order.Point{order.HandlerStart}
	case c.phase == kills:
		return []order.Point{order.HandlerStart, order.BeforeFinish, order.MidEffect, order.BeforeFinish}
	case c.store == sqlite:
		return append(points, slices.Repeat([]order.Point{order.HandlerStart}, 7)...)
	default:
		return append(points, order.BeforeFinish, order.BeforeFinish)
	}
}

// staleFor is for how long.
func (c cell) staleFor(p order.Point) time.Duration {
	locked := c.store == sqlite && p != order.AfterCommitAck && (c.mode == same || p != order.HandlerStart)
	if locked {
		return staleLocked
	}
	return staleTime
}
