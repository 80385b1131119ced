package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/chain/chainv1"
)

// slowEdge answers late. It counts how many wait for it, in a synctest bubble,
// where one goroutine runs at a time only by chance: hence the channel.
type slowEdge struct {
	takes   time.Duration
	waiting chan int // one value: the number that waits and the most that ever did
	most    chan int
}

func newSlowEdge(takes time.Duration) *slowEdge {
	e := &slowEdge{takes: takes, waiting: make(chan int, 1), most: make(chan int, 1)}
	e.waiting <- 0
	e.most <- 0
	return e
}

func (e *slowEdge) answer(ctx context.Context) error {
	n := <-e.waiting + 1
	e.waiting <- n
	e.most <- max(<-e.most, n)
	defer func() { e.waiting <- <-e.waiting - 1 }()
	return work(ctx, e.takes)
}

func (e *slowEdge) Checkout(ctx context.Context, _ *chainv1.CheckoutRequest, _ ...grpc.CallOption) (*chainv1.CheckoutResponse, error) {
	return &chainv1.CheckoutResponse{}, e.answer(ctx)
}

func (e *slowEdge) Remark(ctx context.Context, _ *chainv1.RemarkRequest, _ ...grpc.CallOption) (*chainv1.RemarkResponse, error) {
	return &chainv1.RemarkResponse{}, e.answer(ctx)
}

// An open loop: users who wait keep nobody from coming, and time counts from
// when a call was to start.
func TestUsersDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const users100, takes = 100, 700 * time.Millisecond
		edge, tally := newSlowEdge(takes), newTally()
		u := users{load: load{rate: 100, traceEvery: 1}, edge: edge, tally: tally}
		start := time.Now()
		u.arrive(t.Context(), users100, start)

		if took := time.Since(start); took > 3*time.Second {
			t.Errorf("100 users at 100 a second needed %v; one after the other they need 70 s", took)
		}
		if most := <-edge.most; most < 20 {
			t.Errorf("at most %d users waited at once; at 100 a second and 0.7 s it is about 70", most)
		}
		r := tally.result(false)
		if r.calls != users100 || r.success != 1 || r.remarks != users100/remarkEvery {
			t.Errorf("%d calls, success %v, %d remarks; want 100, 1, 10", r.calls, r.success, r.remarks)
		}
		if r.p50 != takes || r.p99 != takes {
			t.Errorf("p50 %v, p99 %v, want %v", r.p50, r.p99, takes)
		}
	})
}

func TestUsersGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tally := newTally()
		u := users{load: load{rate: 100, traceEvery: 1}, edge: newSlowEdge(time.Hour), tally: tally}
		u.arrive(t.Context(), 20, time.Now())
		if r := tally.result(false); r.success != 0 || r.p99 != patience {
			t.Errorf("success %v, p99 %v; want 0 and %v", r.success, r.p99, patience)
		}
	})
}

func TestFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		tests := []struct {
			fault fault
			want  codes.Code
			takes time.Duration
		}{
			{fault{}, codes.OK, 0},
			{fault{Down: true}, codes.Unavailable, 0},
			{fault{Fail: 1}, codes.Unavailable, 0},
			{fault{Slow: 1, SlowFor: 300 * time.Millisecond}, codes.OK, 300 * time.Millisecond},
			{fault{Slow: 1, SlowFor: time.Hour}, codes.DeadlineExceeded, 700 * time.Millisecond},
		}
		var f faults
		for _, tt := range tests {
			f.set(tt.fault)
			start := time.Now()
			if got := status.Code(f.strike(ctx)); got != tt.want || time.Since(start) != tt.takes {
				t.Errorf("%+v: %v after %v, want %v after %v", tt.fault, got, time.Since(start), tt.want, tt.takes)
			}
		}
	})
}

// Only the reply is lost: the handler ran, and only methods with an effect.
func TestLoseReplies(t *testing.T) {
	var f faults
	f.set(fault{Lose: 1})
	ran := 0
	handler := func(context.Context, any) (any, error) {
		ran++
		return "done", nil
	}
	tests := []struct {
		method string
		want   codes.Code
	}{
		{chainv1.PaymentsService_Charge_FullMethodName, codes.Unavailable},
		{chainv1.LedgerService_Append_FullMethodName, codes.Unavailable},
		{chainv1.LedgerService_Get_FullMethodName, codes.OK},
	}
	for i, tt := range tests {
		_, err := f.loseReplies(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: tt.method}, handler)
		if status.Code(err) != tt.want || ran != i+1 {
			t.Errorf("%s: %v with %d executions, want %v", tt.method, err, ran, tt.want)
		}
	}
}
