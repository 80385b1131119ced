package sqlstore

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/belayrpc/belay/idempotency"
)

// Plain gives a call that carries no key the transaction that Tx returns, so
// that one handler serves both kinds of calls. It is for whoever calls the
// handler: the server's dedupe half does it for keyless calls, Run outside gRPC.
//
// The transaction begins when the handler first asks for it, and is not bound to
// ctx's end. finish must be called exactly once, after the handler has returned
// or panicked: with nil it commits, with an error it rolls back, and returns that
// error. The error of a commit wraps idempotency.ErrConflict when the database
// refused it and everything is undone, and idempotency.ErrInDoubt when its reply
// was lost: no record tells what became of it, which is what keys are for.
//
// Where ctx belongs to a call of this store already, that call's transaction is
// joined, and finish returns its argument.
func (s *Store) Plain(ctx context.Context) (callCtx context.Context, finish func(err error) error) {
	if _, ok := ctx.Value(sessionKey{s}).(*session); ok {
		return ctx, func(err error) error { return err }
	}
	ses := &session{store: s}
	var once sync.Once
	finish = func(err error) error {
		result := ErrCallOver
		once.Do(func() { result = ses.end(context.WithoutCancel(ctx), err) })
		return result
	}
	return s.withSession(ctx, ses), finish
}

// Run calls fn with a transaction of its own, which Store.Tx(ctx) returns in it:
// the handler's code without gRPC and without a key, for jobs and unit tests. It
// commits when fn returns nil, and rolls back when fn returns an error, which
// Run returns, or panics. See [Store.Plain] for the errors of the commit and for
// a Run within a Run.
func (s *Store) Run(ctx context.Context, fn func(ctx context.Context) error) error {
	ctx, finish := s.Plain(ctx)
	returned := false
	defer func() {
		if !returned { // a panic, or runtime.Goexit
			_ = finish(errPanicked)
		}
	}()
	err := fn(ctx)
	returned = true
	return finish(err)
}

var errPanicked = errors.New("sqlstore: the function panicked")

// end commits or rolls back a call that has no record.
func (ses *session) end(ctx context.Context, callErr error) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	tx, _ := ses.close()
	if tx == nil {
		return callErr
	}
	if callErr != nil {
		tx.rollback(ctx)
		return callErr
	}
	if broken := ses.broken.Load(); broken != nil {
		tx.rollback(ctx)
		return fmt.Errorf("sqlstore: %w: %w", idempotency.ErrConflict, *broken)
	}
	err := tx.commit(ctx)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errTxSevered):
		ses.store.emit(ctx, Event{Kind: EventTxSevered, Err: err})
		return fmt.Errorf("sqlstore: %w: %w", idempotency.ErrInDoubt, err)
	case ses.store.dialect.fault(err) == faultOther:
		ses.store.emit(ctx, Event{Kind: EventInDoubt, Err: err})
		return fmt.Errorf("sqlstore: %w: %w", idempotency.ErrInDoubt, err)
	default:
		return fmt.Errorf("sqlstore: %w: %w", idempotency.ErrConflict, err)
	}
}
