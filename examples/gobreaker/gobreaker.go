package gobreaker

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	sony "github.com/sony/gobreaker/v2"

	"github.com/belayrpc/belay/breaker"
)

// maxServices is how many services have a breaker of their own. A program calls
// a modest set of them; a proxy that forwards whatever name it is given must not
// be made to keep one for each. Services beyond it share one.
const maxServices = 256

// Errors that stand for outcomes: gobreaker learns everything from an error.
var (
	errFailure = errors.New("gobreaker: the server failed")
	errNeutral = errors.New("gobreaker: the attempt says nothing about the server")
)

// Breakers keeps a [sony.TwoStepCircuitBreaker] for each service and is what
// interceptors.WithOwnBreaker takes. Make one with [New]. It may be used from
// any number of goroutines.
type Breakers struct {
	settings sony.Settings
	rest     *sony.TwoStepCircuitBreaker[struct{}]

	mu        sync.RWMutex // guards byService
	byService map[string]*sony.TwoStepCircuitBreaker[struct{}]
}

// New returns breakers with these settings. A breaker's name is Settings.Name,
// if there is one, and then the service's full name: "orders→acme.Payments".
//
// IsSuccessful and IsExcluded must be nil: Belay has judged an attempt before
// gobreaker hears of it, so that they would never see the call's error.
// ReadyToTrip and OnStateChange run under gobreaker's lock, so they must not ask
// the breaker anything.
func New(settings sony.Settings) (*Breakers, error) {
	var errs []error
	if settings.IsSuccessful != nil {
		errs = append(errs, errors.New("gobreaker: Settings.IsSuccessful is set: must be nil, for Belay decides what a success is"))
	}
	if settings.IsExcluded != nil {
		errs = append(errs, errors.New("gobreaker: Settings.IsExcluded is set: must be nil, for Belay decides what says nothing"))
	}
	// gobreaker takes the next two for their defaults, one of which is never to
	// forget a failure. Nobody writes a minus and means that.
	if settings.Interval < 0 {
		errs = append(errs, fmt.Errorf("gobreaker: Settings.Interval is %v: must not be negative; 0 never clears the counts", settings.Interval))
	}
	if settings.Timeout < 0 {
		errs = append(errs, fmt.Errorf("gobreaker: Settings.Timeout is %v: must not be negative; 0 is 60 s", settings.Timeout))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	settings.IsExcluded = func(err error) bool { return errors.Is(err, errNeutral) }
	b := &Breakers{settings: settings, byService: map[string]*sony.TwoStepCircuitBreaker[struct{}]{}}
	b.rest = b.make("*")
	return b, nil
}

// Allow asks the service's breaker. The error is [sony.ErrOpenState] or
// [sony.ErrTooManyRequests]; errors.Is finds it in the error of the call. The
// latency given to done is not used, as gobreaker does not count slow calls.
//
// Only the first done counts. gobreaker counts each, and would take the second
// for the end of another call.
func (b *Breakers) Allow(service string) (done func(breaker.Outcome, time.Duration), err error) {
	report, err := b.Get(service).Allow()
	if err != nil {
		return nil, err
	}
	var told atomic.Bool
	return func(outcome breaker.Outcome, _ time.Duration) {
		if told.CompareAndSwap(false, true) {
			report(toError(outcome))
		}
	}, nil
}

func toError(outcome breaker.Outcome) error {
	switch outcome {
	case breaker.Success:
		return nil
	case breaker.Failure:
		return errFailure
	case breaker.Neutral:
		return errNeutral
	default:
		return errNeutral // as Belay's own breaker has it
	}
}

// Get returns the breaker of a service, to look at its state and counts.
func (b *Breakers) Get(service string) *sony.TwoStepCircuitBreaker[struct{}] {
	b.mu.RLock()
	cb := b.byService[service]
	full := len(b.byService) >= maxServices
	b.mu.RUnlock()
	switch {
	case cb != nil:
		return cb
	case full:
		return b.rest
	}
	return b.add(service)
}

func (b *Breakers) add(service string) *sony.TwoStepCircuitBreaker[struct{}] {
	b.mu.Lock()
	defer b.mu.Unlock()
	if cb := b.byService[service]; cb != nil {
		return cb // another goroutine was quicker
	}
	if len(b.byService) >= maxServices {
		return b.rest
	}
	service = strings.Clone(service) // may be a small part of something large
	cb := b.make(service)
	b.byService[service] = cb
	return cb
}

func (b *Breakers) make(service string) *sony.TwoStepCircuitBreaker[struct{}] {
	settings := b.settings
	settings.Name = service
	if b.settings.Name != "" {
		settings.Name = b.settings.Name + "→" + service
	}
	return sony.NewTwoStepCircuitBreaker[struct{}](settings)
}
