package gobreaker_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	sony "github.com/sony/gobreaker/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/gobreaker"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

var _ interceptors.Breaker = (*gobreaker.Breakers)(nil)

// The whole of it over real gRPC: a server that fails opens the breaker, calls
// are refused without a message sent, and a probe closes it again. Answers that
// refuse a request do not count as failures, though they are errors.
func TestInAClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const openFor = 5 * time.Second
		breakers := newBreakers(t, sony.Settings{Timeout: openFor, ReadyToTrip: tripAfter(3)})
		client, err := interceptors.NewClient(interceptors.WithOwnBreaker(breakers))
		if err != nil {
			t.Fatal(err)
		}
		var attempts probe.Counter
		conn, server := probe.Start(t, probe.DialOptions(append(client.DialOptions(), attempts.DialOptions()...)...))
		call := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := probe.Call(ctx, conn, probe.Undeclared, &probev1.Request{})
			return err
		}

		for range 5 {
			server.Script(probe.Undeclared, probe.Step{Code: codes.NotFound})
			if err := call(); status.Code(err) != codes.NotFound {
				t.Fatalf("call: %v, want NOT_FOUND", err)
			}
		}
		for range 3 {
			server.Script(probe.Undeclared, probe.Step{Code: codes.Unavailable})
			if err := call(); status.Code(err) != codes.Unavailable {
				t.Fatalf("call: %v, want UNAVAILABLE", err)
			}
		}

		sent := len(attempts.Attempts())
		err = call()
		if status.Code(err) != codes.Unavailable || !errors.Is(err, sony.ErrOpenState) {
			t.Errorf("refusal: %v, want UNAVAILABLE with %v in its chain", err, sony.ErrOpenState)
		}
		var refused *interceptors.CallError
		if !errors.As(err, &refused) || refused.Stop() != interceptors.BreakerOpen || refused.Executed() != interceptors.No {
			t.Errorf("refusal: %#v, want stop BreakerOpen, executed No", refused)
		}
		if got := len(attempts.Attempts()); got != sent {
			t.Errorf("%d attempts were made by a refused call", got-sent)
		}

		time.Sleep(openFor + 1)
		server.Script(probe.Undeclared, probe.Step{})
		if err := call(); err != nil {
			t.Errorf("probe: %v", err)
		}
		if got := breakers.Get("belay.probe.v1.ProbeService").State(); got != sony.StateClosed {
			t.Errorf("state %v, want closed", got)
		}
	})
}

// An attempt that its caller gives up says nothing about the server.
func TestACallerThatGoesIsNeutral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		breakers := newBreakers(t, sony.Settings{})
		client, err := interceptors.NewClient(interceptors.WithOwnBreaker(breakers))
		if err != nil {
			t.Fatal(err)
		}
		conn, server := probe.Start(t, probe.DialOptions(client.DialOptions()...))
		server.Script(probe.Undeclared, probe.Step{Hang: true})
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			time.Sleep(time.Second)
			cancel()
		}()
		if _, err := probe.Call(ctx, conn, probe.Undeclared, &probev1.Request{}); status.Code(err) != codes.Canceled {
			t.Fatalf("call: %v, want CANCELLED", err)
		}
		want := sony.Counts{Requests: 1, TotalExclusions: 1}
		if got := breakers.Get("belay.probe.v1.ProbeService").Counts(); got != want {
			t.Errorf("counts %+v, want %+v", got, want)
		}
	})
}
