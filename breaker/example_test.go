package breaker_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/belayrpc/belay/breaker"
)

var errDown = errors.New("connection refused")

func Example() {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 3})
	call := func() error {
		permit, err := b.Allow()
		if err != nil {
			return err // nothing was sent
		}
		// Should anything panic below, the permit comes back without a verdict.
		defer permit.Done(breaker.Neutral, 0)

		start := time.Now()
		err = errDown // the call
		permit.Done(breaker.Failure, time.Since(start))
		return err
	}
	for range 3 {
		fmt.Println(call())
	}
	fmt.Println(errors.Is(call(), breaker.ErrOpen))
	// Output:
	// connection refused
	// connection refused
	// connection refused
	// true
}

func ExampleBreaker_Allow() {
	b := breaker.New(breaker.Config{Name: "ledger"})
	b.ForceOpen()

	_, err := b.Allow()
	if open, ok := errors.AsType[*breaker.OpenError](err); ok {
		fmt.Println(open.Name(), "is", open.State())
	}
	fmt.Println(err)
	// Output:
	// ledger is forced_open
	// breaker "ledger": forced open
}

// A caller that reads the clock anyway passes it in.
func ExampleBreaker_AllowAt() {
	b := breaker.New(breaker.Config{})
	start := time.Now()
	permit, err := b.AllowAt(start)
	if err != nil {
		return
	}
	// … the call …
	end := time.Now()
	permit.DoneAt(breaker.Success, end.Sub(start), end)
	fmt.Println(b.Snapshot().Counts.Calls)
	// Output: 1
}

func ExampleConfig_onTransition() {
	b := breaker.New(breaker.Config{
		ConsecutiveFailures: 2,
		OnTransition: func(t breaker.Transition) {
			fmt.Printf("%v → %v: %v after %d calls\n", t.From, t.To, t.Cause, t.Counts.Calls)
		},
	})
	for range 2 {
		permit, _ := b.Allow()
		permit.Done(breaker.Failure, 0)
	}
	b.ForceClose()
	b.Resume()
	// Output:
	// closed → open: consecutive failures after 2 calls
	// open → forced_closed: forced after 0 calls
	// forced_closed → closed: resumed after 0 calls
}

func ExampleConfig_Validate() {
	fmt.Println(breaker.Config{FailureRate: 1.5, Window: -time.Second}.Validate())
	// Output:
	// breaker: Config.FailureRate = 1.5: must be above 0 and at most 1, or 0 for the default
	// breaker: Config.Window = -1s: must not be negative
}

func ExampleGroup() {
	var group breaker.Group // one breaker per service
	permit, _ := group.Get("acme.payments.v1.Payments").Allow()
	permit.Done(breaker.Success, time.Millisecond)

	for service, b := range group.All() {
		fmt.Println(service, b.State())
	}
	// Output: acme.payments.v1.Payments closed
}
