package main

import (
	"encoding/json"
	"io"
	"sync"
)

// A process and its parent speak JSON lines: orders go down on the process's
// standard input, facts come up on its standard output.
//
// Facts are written when they happen and not asked for at the end, because what
// a process has written survives its kill -9. And the input is the process's
// lifeline: when it ends, by whatever death of the parent, the process ends.

// config is the first line a process reads.
type config struct {
	Stack string `json:"stack"`

	// CountAtCaller has the leaf's calls counted where they are made.
	CountAtCaller bool `json:"countAtCaller,omitempty"`

	Peers map[string]string `json:"peers"` // role → address of those it calls
}

// order is each line after that: the fault to have from now on. The process
// answers with Ack, by which time the fault is in force and all facts from
// before are written.
type order struct {
	Ack   int    `json:"ack"`
	Fault fault  `json:"fault"`
	Drill *drill `json:"drill,omitempty"` // for the auditor, which begins with it

	Listen string `json:"listen,omitempty"` // an address to serve at as well
}

// fact is one line that a process writes; one field of it is set.
type fact struct {
	Listening string    `json:"listening,omitempty"` // the address; ready to serve
	Ack       int       `json:"ack,omitempty"`
	Leaf      *leafCall `json:"leaf,omitempty"`    // LedgerService.Get ran
	Invoked   *leafCall `json:"invoked,omitempty"` // payments called it, below all retries
	Effect    *effect   `json:"effect,omitempty"`
	Span      *span     `json:"span,omitempty"`

	Stream  *streamEnd `json:"stream,omitempty"`  // the auditor's stream is over
	Drilled *drilled   `json:"drilled,omitempty"` // all of them are
}

// leafCall is one call of the leaf.
type leafCall struct {
	Second int32 `json:"second"` // of the user's call, from the onset; -1 while warming up
	Late   bool  `json:"late,omitempty"`
}

// effect is something that was done for an intent.
type effect struct {
	Kind   string `json:"kind"`
	Intent string `json:"intent"`
}

// The kinds of effects.
const (
	effectCharge = "charge" // keyed
	effectAppend = "append" // undeclared
)

// reporter writes a process's facts. It may be used from many goroutines.
type reporter struct {
	mu  sync.Mutex // guards enc
	enc *json.Encoder
}

func newReporter(w io.Writer) *reporter { return &reporter{enc: json.NewEncoder(w)} }

// send drops what cannot be written: then the parent is gone, and the end of
// the input is about to say so.
func (r *reporter) send(f fact) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.enc.Encode(f) //nolint:errchkjson // see above; all that a fact holds can be marshalled
}

func (r *reporter) leaf(second int32, late bool) {
	r.send(fact{Leaf: &leafCall{Second: second, Late: late}})
}

func (r *reporter) invoked(second int32) {
	r.send(fact{Invoked: &leafCall{Second: second}})
}

func (r *reporter) effect(kind, intent string) {
	r.send(fact{Effect: &effect{Kind: kind, Intent: intent}})
}
