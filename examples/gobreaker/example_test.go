package gobreaker_test

import (
	"errors"
	"fmt"
	"log"
	"time"

	sony "github.com/sony/gobreaker/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/examples/gobreaker"
	"github.com/belayrpc/belay/interceptors"
)

// A channel whose breaker is gobreaker's.
func Example() {
	breakers, err := gobreaker.New(sony.Settings{
		Timeout:     5 * time.Second,
		Interval:    10 * time.Second,
		ReadyToTrip: func(c sony.Counts) bool { return c.Requests >= 20 && 5*c.TotalFailures >= 4*c.Requests },
	})
	if err != nil {
		log.Fatal(err)
	}
	client, err := interceptors.NewClient(interceptors.WithOwnBreaker(breakers))
	if err != nil {
		log.Fatal(err)
	}
	opts := append(client.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	conn, err := grpc.NewClient("dns:///payments:443", opts...)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = conn.Close() }() // the program ends
	fmt.Println(breakers.Get("acme.payments.v1.Payments").State())
	// Output: closed
}

// What Belay does with it, by hand.
func ExampleBreakers_Allow() {
	breakers, err := gobreaker.New(sony.Settings{ReadyToTrip: func(c sony.Counts) bool { return c.TotalFailures == 2 }})
	if err != nil {
		log.Fatal(err)
	}
	for _, outcome := range []breaker.Outcome{breaker.Failure, breaker.Neutral, breaker.Failure} {
		done, err := breakers.Allow("acme.payments.v1.Payments")
		if err != nil {
			log.Fatal(err)
		}
		done(outcome, 3*time.Millisecond)
	}
	_, err = breakers.Allow("acme.payments.v1.Payments")
	fmt.Println(err, errors.Is(err, sony.ErrOpenState))
	// Output: circuit breaker is open true
}
