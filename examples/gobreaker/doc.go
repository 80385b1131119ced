// Package gobreaker puts the circuit breaker that a program already has,
// github.com/sony/gobreaker/v2, in the place of Belay's own:
//
//	breakers, err := gobreaker.New(sony.Settings{Timeout: 5 * time.Second})
//	client, err := interceptors.NewClient(interceptors.WithOwnBreaker(breakers))
//
// What carries over is when to open and for how long. What an attempt says
// about the server stays Belay's to judge: a NOT_FOUND is the answer of a server
// that works, a call that its caller cancelled says nothing, and so on.
//
// Three things of Belay's own breaker are lost, as gobreaker has none of them:
// a loop of retries does not see that a breaker has opened until it asks for the
// next attempt, after its backoff; refusals name no time left; and all channels
// of a client share a service's breaker, since the seam is asked by service.
package gobreaker
