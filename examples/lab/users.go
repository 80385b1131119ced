package main

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// users call at a rate, whatever comes back: an open loop.
type users struct {
	tally   *tally
	rate    float64 // calls a second, all together
	timeout time.Duration
	write   bool // call the undeclared method
	enough  func() bool

	random   *rand.Rand
	channels []*grpc.ClientConn // each call takes one at random

	nextID int64
	calls  sync.WaitGroup
}

// arrive lets users come for a while, as a Poisson process, and returns the
// time at which it ended; wait waits for their calls. A later arrive goes on
// where the last one ended.
func (u *users) arrive(ctx context.Context, from time.Time, d time.Duration) time.Time {
	end := from.Add(d)
	for intended := u.after(from); intended.Before(end); intended = u.after(intended) {
		time.Sleep(time.Until(intended))
		if ctx.Err() != nil || u.enough != nil && u.enough() {
			break
		}
		u.launch(ctx, intended)
	}
	time.Sleep(time.Until(end))
	return end
}

func (u *users) after(t time.Time) time.Time {
	return t.Add(time.Duration(u.random.ExpFloat64() / u.rate * float64(time.Second)))
}

// launch starts one call.
func (u *users) launch(ctx context.Context, intended time.Time) {
	u.nextID++
	id, client := u.nextID, u.random.IntN(len(u.channels))
	u.tally.begun()
	u.calls.Go(func() {
		// The deadline is the user's, and counts from when they meant to call.
		ctx, cancel := context.WithDeadline(ctx, intended.Add(u.timeout))
		defer cancel()
		u.tally.done(id, intended, u.call(ctx, u.channels[client], id, client))
	})
}

func (u *users) call(ctx context.Context, conn *grpc.ClientConn, id int64, client int) error {
	stub := probev1.NewProbeServiceClient(conn)
	req := &probev1.Request{Number: id, Text: strconv.Itoa(client)}
	if deadline, ok := ctx.Deadline(); ok {
		req.Limit = new(deadline.UnixNano())
	}
	var err error
	if u.write {
		_, err = stub.Undeclared(ctx, req)
	} else {
		_, err = stub.Read(ctx, req)
	}
	return err
}

// clientOf is the number of the client that made a request.
func clientOf(req *probev1.Request) int {
	n, err := strconv.Atoi(req.GetText())
	if err != nil {
		return 0
	}
	return n
}

// late reports whether the user who caused a request has given up by now.
func late(req *probev1.Request) bool { return time.Now().UnixNano() > req.GetLimit() }

func (u *users) wait() { u.calls.Wait() }
