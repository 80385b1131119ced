package sqlstore

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/belayrpc/belay/idempotency"
)

// EventKind says what an Event is about.
type EventKind uint8

// The kinds of events.
const (
	// EventTxUnused: a call ended OK without asking for its Tx. Either it had no
	// effect, or the effect went past the record and is not protected.
	EventTxUnused EventKind = iota + 1
	// EventTxSevered: the handler's transaction had ended before the store ended
	// it (COMMIT or ROLLBACK in SQL). What is committed is not known; the record
	// becomes UNKNOWN.
	EventTxSevered
	// EventCommitLost: the reply to a COMMIT was lost and its fate found out. Err
	// is what the driver said; the fate is what Finish returned.
	EventCommitLost
	// EventInDoubt: the reply to a COMMIT was lost and its fate could not be
	// found out in time.
	EventInDoubt
)

// String returns the kind's name, as it is used in metrics.
func (k EventKind) String() string {
	switch k {
	case EventTxUnused:
		return "tx_unused"
	case EventTxSevered:
		return "tx_severed"
	case EventCommitLost:
		return "commit_lost"
	case EventInDoubt:
		return "in_doubt"
	default:
		return fmt.Sprintf("EventKind(%d)", uint8(k))
	}
}

// Event is something that an operator should know of. It holds no key and no
// payload.
type Event struct {
	Kind   EventKind
	ID     idempotency.ID // zero for a call without a key
	Method string         // "" for a call without a key
	Err    error          // what led to it; nil for EventTxUnused
}

func (s *Store) emit(ctx context.Context, ev Event) {
	attrs := []slog.Attr{slog.String("event", ev.Kind.String()), slog.String("method", ev.Method), slog.String("id", ev.ID.String())}
	if ev.Err != nil {
		attrs = append(attrs, slog.Any("error", ev.Err))
	}
	s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "belay: sqlstore: "+ev.Kind.String(), attrs...)
	if s.cfg.OnEvent == nil {
		return
	}
	// A broken observer must not take calls with it.
	defer func() {
		if p := recover(); p != nil {
			s.cfg.Logger.ErrorContext(ctx, "belay: sqlstore: OnEvent panicked", "event", ev.Kind.String(), "panic", p)
		}
	}()
	s.cfg.OnEvent(ev)
}
