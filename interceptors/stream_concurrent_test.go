package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// 32 streams at once on one channel, Send and Recv on goroutines of their own,
// and failures at random: before and after the first answer, by the server and
// by the connection. Each sees its own messages only, in order, none lost or
// doubled before the error that it reports.
func TestConcurrentBidiStreams(t *testing.T) {
	const streams, rounds, messages = 32, 4, 40
	for seed := range uint64(8) {
		bubbles(t, fmt.Sprint("seed ", seed), func(t *testing.T) {
			recorded, held := &spans{}, &permits{}
			r := start(t, setup{client: []interceptors.ClientOption{
				interceptors.WithPolicy(policy.Policy{MaxAttempts: 6, Backoff: policy.Backoff{Base: time.Millisecond, Max: 20 * time.Millisecond}}),
				interceptors.WithTracerProvider(recorded), interceptors.WithOwnBreaker(held),
			}})
			// Whether spans are real is found out by the first call; those beside it
			// have none.
			_, err := r.call(t, probe.Read, request("first"))
			wantOK(t, err)
			random := rand.New(rand.NewPCG(seed, 0))
			r.srv.Script(probe.Bidi, randomSteps(random, streams*rounds)...)
			done := make(chan struct{})
			var group sync.WaitGroup
			for i := range streams {
				group.Go(func() {
					for round := range rounds {
						tagged(t, r.conn, fmt.Sprintf("s%d-%d", i, round), messages)
					}
				})
			}
			var cutter sync.WaitGroup
			cutter.Go(func() {
				for {
					select {
					case <-done:
						return
					case <-time.After(time.Duration(5+random.IntN(20)) * time.Millisecond): //nolint:forbidigo // in fake time
						r.network.Cut()
					}
				}
			})
			group.Wait()
			close(done)
			cutter.Wait()
			synctest.Wait()
			for _, e := range r.srv.Seen(probe.Bidi) {
				wantOneTagInOrder(t, e.Texts)
			}
			if n := held.open(); n != 0 || held.twice != 0 {
				t.Errorf("%d permits are still held, %d were given back twice", n, held.twice)
			}
			recorded.wantEndedOnce(t, "belay.probe.v1.ProbeService/Bidi", held.allowed-1)
			recorded.wantEndedOnce(t, "belay belay.probe.v1.ProbeService/Bidi", streams*rounds)
		})
	}
}

// randomSteps fails at random points, more often early.
func randomSteps(random *rand.Rand, n int) []probe.Step {
	var steps []probe.Step
	for range n {
		var ops []probe.Op
		switch random.IntN(6) {
		case 0: // at once
		case 1:
			ops = []probe.Op{probe.Recv(random.IntN(30))}
		case 2:
			ops = []probe.Op{probe.Header("h", "x"), probe.Recv(random.IntN(5))}
		case 3:
			ops = []probe.Op{probe.Recv(1), probe.Send(1), probe.Recv(2)}
		case 4:
			ops = []probe.Op{probe.Sleep(time.Duration(random.IntN(10)) * time.Millisecond), probe.Recv(random.IntN(10))}
		case 5:
			steps = append(steps, probe.Step{}) // echoes
			continue
		}
		steps = append(steps, probe.Step{Ops: ops, Code: codes.Unavailable})
	}
	return steps
}

// tagged sends messages and reads at the same time. What it reads is its own,
// in order, up to an end that is success or UNAVAILABLE.
func tagged(t *testing.T, conn *grpc.ClientConn, tag string, messages int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := conn.NewStream(ctx, descOf(probe.Bidi), probe.Bidi)
	if err != nil {
		wantCodeIs(t, tag+": open", err, codes.Unavailable)
		return
	}
	var group sync.WaitGroup
	group.Go(func() {
		for i := range messages {
			if err := stream.SendMsg(request(fmt.Sprintf("%s/%d", tag, i))); err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("%s: send %d: %v, want io.EOF or nothing", tag, i, err)
				}
				return
			}
			if i%8 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		_ = stream.CloseSend() // RecvMsg has the last word
	})
	got := 0
	for ; ; got++ {
		resp := &probev1.Response{}
		if err = stream.RecvMsg(resp); err != nil {
			break
		}
		if want := fmt.Sprintf("%s/%d", tag, got); resp.GetText() != want || resp.GetIndex() != uint64(got+1) {
			t.Errorf("%s: received %q with index %d, want %q", tag, resp.GetText(), resp.GetIndex(), want)
		}
	}
	group.Wait()
	switch {
	case errors.Is(err, io.EOF):
		if got != messages {
			t.Errorf("%s: success after %d of %d answers", tag, got, messages)
		}
	case status.Code(err) != codes.Unavailable:
		t.Errorf("%s: ended with %v, want success or UNAVAILABLE", tag, err)
	}
}
