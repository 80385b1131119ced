package main

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ratio10 is the retry budget as it is usually written: every call pays a tenth
// of a retry into a bucket of ten, every retry takes one out. Up to three
// attempts, full jitter.
func ratio10() grpc.UnaryClientInterceptor {
	const most, earn, attempts = 10.0, 0.1, 3
	var mu sync.Mutex
	balance := most // guarded by mu
	take := func() bool {
		mu.Lock()
		defer mu.Unlock()
		if balance < 1 {
			return false
		}
		balance--
		return true
	}
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		mu.Lock()
		balance = min(balance+earn, most)
		mu.Unlock()
		for n := 1; ; n++ {
			err := invoke(ctx, method, req, reply, cc, opts...)
			if status.Code(err) != codes.Unavailable || n == attempts || !take() {
				return err
			}
			if !pause(ctx, rand.N(backoffBase<<n/2)) { //nolint:gosec // jitter
				return err
			}
		}
	}
}

// pause sleeps, and reports whether the caller is still there.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
