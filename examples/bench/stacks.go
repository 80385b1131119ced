package main

import (
	"time"

	"github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	sony "github.com/sony/gobreaker/v2"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The stacks' names.
const (
	belay        = "belay"
	bare         = "bare"
	middleware   = "middleware" // go-grpc-middleware's retry
	failsafe     = "failsafe"   // failsafe-go: retry, budget and breaker
	gobreaker    = "gobreaker"  // sony/gobreaker
	adapted      = "belay-gobreaker"
	maxAttempts  = 3
	breakerRate  = 0.8
	breakerCalls = 20
	breakerSpan  = 10 * time.Second

	// What a breaker must be for 64 goroutines whose first calls fail together.
	tolerantRate  = 1
	tolerantCalls = 1000

	never = time.Hour // for breakers that must stay open: longer than any run
)

// The peers are set up to do what Belay does by default as far as they can:
// three attempts, a budget, a breaker on the failure rate of ten seconds.

func middlewareOptions(more ...retry.CallOption) []retry.CallOption {
	return append([]retry.CallOption{retry.WithMax(maxAttempts), retry.WithBackoff(retry.BackoffExponentialWithJitter(50*time.Millisecond, 0.5))}, more...)
}

func failsafeRetry(b budget.Budget) retrypolicy.RetryPolicy[*probev1.Response] {
	return failsafegrpc.NewRetryPolicyBuilder[*probev1.Response]().WithMaxAttempts(maxAttempts).WithBudget(b).Build()
}

// failsafeBreaker counts over ten seconds, in ten buckets.
func failsafeBreaker(rate float64, calls uint) circuitbreaker.CircuitBreaker[*probev1.Response] {
	return circuitbreaker.NewBuilder[*probev1.Response]().
		WithFailureRateThreshold(rate, calls, breakerSpan).WithDelay(never).Build()
}

// failsafeCountBreaker counts the last twenty calls: the least work of all
// breakers here.
func failsafeCountBreaker() circuitbreaker.CircuitBreaker[*probev1.Response] {
	return circuitbreaker.NewBuilder[*probev1.Response]().
		WithFailureThresholdRatio(breakerRate*breakerCalls, breakerCalls).WithDelay(never).Build()
}

func gobreakerSettings() sony.Settings {
	return sony.Settings{
		Interval: breakerSpan, BucketPeriod: time.Second, Timeout: never,
		ReadyToTrip: func(c sony.Counts) bool {
			return c.Requests >= breakerCalls && float64(c.TotalFailures) >= breakerRate*float64(c.Requests)
		},
	}
}
