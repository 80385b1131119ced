package main

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errDown is how a server that is alive and cannot work answers.
var errDown = status.Error(codes.Unavailable, "the lab's fault")

// fault is the share of calls that a leaf fails, which can be changed.
type fault struct {
	mu     sync.Mutex // guards all below
	share  float64
	random *rand.Rand
}

func newFault(random *rand.Rand) *fault { return &fault{random: random} }

func (f *fault) set(share float64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.share = share
}

// strikes reports whether this call fails.
func (f *fault) strikes() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.random.Float64() < f.share
}

// err is errDown or nil.
func (f *fault) err() error {
	if f.strikes() {
		return errDown
	}
	return nil
}

// work takes time as an honest handler does: it stops when its call is over.
func work(ctx context.Context, d time.Duration) error {
	if !pause(ctx, d) {
		return status.FromContextError(ctx.Err()).Err()
	}
	return nil
}
