// Package order is what the program that breaks things says to the servers that
// it breaks: how to run, and at which point of a call to be killed, stopped or
// held up.
package order

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Metadata carries an order with a call.
const Metadata = "chaos-order"

// Point is a place in the protocol of a keyed call.
type Point string

// The points, in the order in which a call that succeeds passes them.
const (
	BeforeClaim    Point = "before-claim"     // the claim is about to be sent
	AfterClaimSent Point = "after-claim-sent" // it is on its way, or at work in the database
	AfterClaimAck  Point = "after-claim-ack"  // it is granted
	HandlerStart   Point = "handler-start"
	MidEffect      Point = "mid-effect"        // one of two rows is written
	BeforeFinish   Point = "before-finish"     // the handler has returned, the verdict is about to be written
	AfterFinish    Point = "after-finish"      // the verdict is written
	AfterCommit    Point = "after-commit-sent" // COMMIT is on its way, or at work in the database
	AfterCommitAck Point = "after-commit-ack"  // it is committed, and only this process knows who asked
	BeforeReply    Point = "before-reply"      // every interceptor is done
	AfterReply     Point = "after-reply"       // the reply is on the wire
)

// Points are all of them, in order.
var Points = []Point{
	BeforeClaim, AfterClaimSent, AfterClaimAck, HandlerStart, MidEffect,
	BeforeFinish, AfterFinish, AfterCommit, AfterCommitAck, BeforeReply, AfterReply,
}

// Deed is what happens at a point.
type Deed string

// The deeds.
const (
	Kill Deed = "kill" // the process ends itself with SIGKILL
	Stop Deed = "stop" // the process stops itself with SIGSTOP, and is woken after For
	Hold Deed = "hold" // the call's goroutine sleeps For
)

// Order is one deed at one point.
type Order struct {
	Deed  Deed
	Point Point
	For   time.Duration // of Stop and Hold
}

// String is what Parse reads.
func (o Order) String() string { return fmt.Sprintf("%s %s %s", o.Deed, o.Point, o.For) }

// Parse reads what String wrote.
func Parse(s string) (Order, error) {
	words := strings.Fields(s)
	if len(words) != 3 {
		return Order{}, fmt.Errorf("order %q: must be a deed, a point and a duration", s)
	}
	d, err := time.ParseDuration(words[2])
	if err != nil {
		return Order{}, fmt.Errorf("order %q: %w", s, err)
	}
	o := Order{Deed(words[0]), Point(words[1]), d}
	switch {
	case o.Deed != Kill && o.Deed != Stop && o.Deed != Hold:
		return Order{}, fmt.Errorf("order %q: deed is %q: must be kill, stop or hold", s, o.Deed)
	case !slices.Contains(Points, o.Point):
		return Order{}, fmt.Errorf("order %q: point is %q: must be one of %q", s, o.Point, Points)
	}
	return o, nil
}

// Server is how a server runs: its one argument, as JSON.
type Server struct {
	Store        string        `json:"store"`        // "postgresql" or "sqlite"
	Mode         string        `json:"mode"`         // "same" or "lease"
	DSN          string        `json:"dsn"`          // of the database, through the proxy where there is one
	Lease        time.Duration `json:"lease"`        // of a claim
	NoRenewal    bool          `json:"noRenewal"`    // handlers may outlive their lease
	IdleTimeout  time.Duration `json:"idleTimeout"`  // of a handler's transaction
	LockTimeout  time.Duration `json:"lockTimeout"`  // as in sqlstore.Config
	StoreTimeout time.Duration `json:"storeTimeout"` // as in idempotency.Config
	MaxExecution time.Duration `json:"maxExecution"` // as in idempotency.Config
}

// The files that a server inherits.
const (
	ReportFile   = 3 // a pipe, for what the server tells
	ListenerFile = 4 // the socket that it serves, which outlives it
)
