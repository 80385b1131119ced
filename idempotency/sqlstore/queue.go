package sqlstore

import (
	"context"
	"sync"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// queue lets the claims of one identity into the database one at a time. In the
// database each of them would hold a connection to wait with; a popular key
// would hold them all. Its size is bounded by the number of calls in flight.
//
// The zero queue is ready for use.
type queue struct {
	mu    sync.Mutex // guards all below
	lines map[idempotency.ID]*line
}

// line is the claims of one identity.
type line struct {
	front chan struct{} // capacity 1: full while somebody is at the front

	// Guarded by queue.mu.
	refs   int
	holder *execution // that stays at the front, for as long as it runs
}

// join waits for the front of the line of c.ID. It returns a function to leave
// it with, and whether there was anybody to wait for; or the execution that has
// c's own claim; or the record that stands in the way, where the holder's alone
// says so, or the wait has been long enough.
func (q *queue) join(ctx context.Context, c *idempotency.Claim, wait time.Duration) (leave func(), waited bool, e *execution, rec *idempotency.Record, err error) {
	l, e, rec := q.enter(c)
	if l == nil {
		return nil, false, e, rec, nil
	}
	leave = func() { q.leave(c.ID, l) }
	select {
	case l.front <- struct{}{}:
		return leave, false, nil, nil, nil
	default:
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case l.front <- struct{}{}:
		return leave, true, nil, nil, nil
	case <-timer.C:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if rec := q.giveUp(c.ID, l); rec != nil {
		return nil, true, nil, rec, nil // an answer, whether or not somebody still waits for it
	}
	if err == nil {
		return nil, true, nil, &idempotency.Record{State: idempotency.StateRunning}, nil
	}
	return nil, true, nil, nil, err
}

// enter takes a place in the line, unless the holder settles the matter.
func (q *queue) enter(c *idempotency.Claim) (*line, *execution, *idempotency.Record) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.lines[c.ID]
	switch {
	case l == nil:
		l = &line{front: make(chan struct{}, 1)}
		if q.lines == nil {
			q.lines = make(map[idempotency.ID]*line)
		}
		q.lines[c.ID] = l
	case l.holder == nil:
	case l.holder.claim.Owner == c.Owner:
		return nil, l.holder, nil
	case !c.Accepts(l.holder.fingerprint):
		return nil, nil, &idempotency.Record{
			State: idempotency.StateRunning, Mismatch: true, Fingerprint: l.holder.fingerprint,
		}
	}
	l.refs++
	return l, nil, nil
}

// hold says who is at the front, so that those who wait can be told.
func (q *queue) hold(e *execution) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.lines[e.claim.ID].holder = e
}

func (q *queue) leave(id idempotency.ID, l *line) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l.holder = nil
	<-l.front
	q.unrefLocked(id, l)
}

// giveUp ends a wait and returns what there was to wait for, if it is known.
func (q *queue) giveUp(id idempotency.ID, l *line) *idempotency.Record {
	q.mu.Lock()
	defer q.mu.Unlock()
	defer q.unrefLocked(id, l)
	if l.holder == nil {
		return nil
	}
	return &idempotency.Record{State: idempotency.StateRunning, Fingerprint: l.holder.fingerprint, Epoch: l.holder.epoch}
}

func (q *queue) unrefLocked(id idempotency.ID, l *line) {
	if l.refs--; l.refs == 0 {
		delete(q.lines, id)
	}
}
