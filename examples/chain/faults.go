package main

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/chain/chainv1"
)

// fault is what goes wrong. The zero fault is health. Shares are of 1.
type fault struct {
	// Down makes the ledger answer every call with UNAVAILABLE.
	Down bool `json:"down,omitempty"`

	// Fail is the share of the ledger's calls that it answers with UNAVAILABLE.
	Fail float64 `json:"fail,omitempty"`

	// Slow is the share of the ledger's calls that take SlowFor more.
	Slow    float64       `json:"slow,omitempty"`
	SlowFor time.Duration `json:"slowFor,omitempty"`

	// Lose is the share of charges and appended lines whose reply is lost on
	// its way out, the effect done.
	Lose float64 `json:"lose,omitempty"`

	// Blip makes the ledger answer every other import with UNAVAILABLE, before
	// it has read any of it.
	Blip bool `json:"blip,omitempty"`
}

// faults holds the fault of one process, changed while it serves.
type faults struct {
	current atomic.Pointer[fault]
}

func (f *faults) set(now fault) { f.current.Store(&now) }

func (f *faults) get() fault {
	if now := f.current.Load(); now != nil {
		return *now
	}
	return fault{}
}

// strike is what goes wrong inside the ledger, before it has done anything.
func (f *faults) strike(ctx context.Context) error {
	now := f.get()
	switch {
	case now.Down:
		return status.Error(codes.Unavailable, "the ledger's disk is gone")
	case happens(now.Fail):
		return status.Error(codes.Unavailable, "the ledger has a blip")
	case happens(now.Slow):
		return work(ctx, now.SlowFor)
	default:
		return nil
	}
}

// loseReplies is put before all other interceptors, so that everything inside
// it, Belay included, takes the reply for delivered.
func (f *faults) loseReplies(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if err != nil {
		return nil, err
	}
	switch info.FullMethod {
	case chainv1.PaymentsService_Charge_FullMethodName, chainv1.LedgerService_Append_FullMethodName:
		if happens(f.get().Lose) {
			return nil, status.Error(codes.Unavailable, "the reply is lost")
		}
	}
	return resp, nil
}

func happens(share float64) bool {
	return share > 0 && rand.Float64() < share //nolint:gosec // chance, not secrecy
}

// work passes time, as a handler does that waits for its disk, and stops when
// nobody waits for it any more.
func work(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}
