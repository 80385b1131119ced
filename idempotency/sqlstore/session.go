package sqlstore

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// session is the transaction of one call, from its beginning, which may be the
// first time that the handler asks, to its end.
type session struct {
	store *Store

	// broken says why no more statements may run: set once, by the statement
	// whose failure took the transaction along.
	broken atomic.Pointer[error]

	mu    sync.RWMutex // guards all below; statements hold it for reading
	tx    transaction  // nil until it begins
	asked bool         // the handler has seen it
	over  bool
}

// Tx returns the transaction of the call that ctx belongs to, beginning it when
// it is the first to ask. The caller of the handler ends it; see [Tx].
//
// Errors: ErrNoCall, ErrCallOver; idempotency.ErrBusy when there was no turn for
// another transaction within Config.LockTimeout; the database's own.
func (s *Store) Tx(ctx context.Context) (Tx, error) {
	ses, ok := ctx.Value(sessionKey{s}).(*session)
	if !ok {
		return nil, ErrNoCall
	}
	if err := ses.ensure(ctx); err != nil {
		return nil, err
	}
	return handle{ses}, nil
}

// sessionKey has the store in it: a handler may work with two.
type sessionKey struct{ store *Store }

func (s *Store) withSession(ctx context.Context, ses *session) context.Context {
	return context.WithValue(ctx, sessionKey{s}, ses)
}

// ensure begins the transaction unless it has begun.
func (ses *session) ensure(ctx context.Context) error {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if ses.over {
		return ErrCallOver
	}
	if ses.tx == nil {
		tx, err := ses.store.begin(ctx)
		if err != nil {
			return err
		}
		ses.tx = tx
	}
	ses.asked = true
	return nil
}

// enter lets one statement in, until leave is called.
func (ses *session) enter() (tx transaction, leave func(), err error) {
	ses.mu.RLock()
	switch broken := ses.broken.Load(); {
	case ses.over:
		err = ErrCallOver
	case broken != nil:
		err = *broken
	default:
		return ses.tx, ses.mu.RUnlock, nil
	}
	ses.mu.RUnlock()
	return nil, nil, err
}

// examine looks whether a statement that failed took its transaction along.
func (ses *session) examine(ctx context.Context, tx transaction, err error) {
	if err == nil {
		return
	}
	if gone := tx.probe(ctx); gone != nil {
		gone = fmt.Errorf("%w (%w)", gone, err)
		ses.broken.CompareAndSwap(nil, &gone)
	}
}

// close shuts the handler out and returns what it leaves: nil when there is no
// transaction, and whether it ever asked for one.
func (ses *session) close() (tx transaction, asked bool) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	ses.over = true
	return ses.tx, ses.asked
}

// open reports whether the call holds a transaction just now.
func (ses *session) open() bool {
	ses.mu.RLock()
	defer ses.mu.RUnlock()
	return ses.tx != nil && !ses.over
}
