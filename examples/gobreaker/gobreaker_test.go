package gobreaker_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	sony "github.com/sony/gobreaker/v2"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/examples/gobreaker"
)

const service = "acme.payments.v1.Payments"

func newBreakers(t *testing.T, settings sony.Settings) *gobreaker.Breakers {
	t.Helper()
	b, err := gobreaker.New(settings)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// report makes one attempt that ends with an outcome.
func report(t *testing.T, b *gobreaker.Breakers, outcome breaker.Outcome) {
	t.Helper()
	done, err := b.Allow(service)
	if err != nil {
		t.Fatalf("Allow: %v", err)
	}
	done(outcome, time.Millisecond)
}

func tripAfter(n uint32) func(sony.Counts) bool {
	return func(c sony.Counts) bool { return c.ConsecutiveFailures >= n }
}

func TestOutcomes(t *testing.T) {
	rows := []struct {
		name    string
		outcome breaker.Outcome
		want    sony.Counts
	}{
		{"success", breaker.Success, sony.Counts{Requests: 1, TotalSuccesses: 1, ConsecutiveSuccesses: 1}},
		{"failure", breaker.Failure, sony.Counts{Requests: 1, TotalFailures: 1, ConsecutiveFailures: 1}},
		{"neutral", breaker.Neutral, sony.Counts{Requests: 1, TotalExclusions: 1}},
		{"unknown_is_neutral", breaker.Outcome(200), sony.Counts{Requests: 1, TotalExclusions: 1}},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			b := newBreakers(t, sony.Settings{})
			report(t, b, row.outcome)
			if got := b.Get(service).Counts(); got != row.want {
				t.Errorf("counts %+v, want %+v", got, row.want)
			}
		})
	}
}

func TestDoneCountsOnce(t *testing.T) {
	b := newBreakers(t, sony.Settings{})
	done, err := b.Allow(service)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { done(breaker.Failure, 0) })
	}
	wg.Wait()
	done(breaker.Success, 0)
	want := sony.Counts{Requests: 1, TotalFailures: 1, ConsecutiveFailures: 1}
	if got := b.Get(service).Counts(); got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}
}

func TestOpensAndRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBreakers(t, sony.Settings{Timeout: 5 * time.Second, ReadyToTrip: tripAfter(3)})
		for range 3 {
			report(t, b, breaker.Failure)
		}
		if _, err := b.Allow(service); !errors.Is(err, sony.ErrOpenState) {
			t.Fatalf("after three failures: %v, want %v", err, sony.ErrOpenState)
		}
		if _, err := b.Allow("acme.orders.v1.Orders"); err != nil {
			t.Errorf("another service: %v", err)
		}

		time.Sleep(5*time.Second + 1)
		// A probe that says nothing leaves its place to the next; one that is still
		// under way does not.
		report(t, b, breaker.Neutral)
		done, err := b.Allow(service)
		if err != nil {
			t.Fatalf("probe: %v", err)
		}
		if _, err := b.Allow(service); !errors.Is(err, sony.ErrTooManyRequests) {
			t.Errorf("beside the probe: %v, want %v", err, sony.ErrTooManyRequests)
		}
		done(breaker.Success, 0)
		if got := b.Get(service).State(); got != sony.StateClosed {
			t.Errorf("state %v, want closed", got)
		}
	})
}

func TestServicesAreBounded(t *testing.T) {
	b := newBreakers(t, sony.Settings{ReadyToTrip: tripAfter(1)})
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range 1000 {
				b.Get(fmt.Sprintf("svc%d", (i+worker*100)%1000))
			}
		})
	}
	wg.Wait()

	names := map[string]int{}
	for i := range 1000 {
		names[b.Get(fmt.Sprintf("svc%d", i)).Name()]++
	}
	if len(names) != 257 {
		t.Errorf("%d breakers, want 256 and the one that the rest share", len(names))
	}
	if names["*"] != 1000-256 {
		t.Errorf("%d services share a breaker, want %d", names["*"], 1000-256)
	}
}

func TestNames(t *testing.T) {
	b := newBreakers(t, sony.Settings{Name: "orders"})
	if got, want := b.Get(service).Name(), "orders→"+service; got != want {
		t.Errorf("name %q, want %q", got, want)
	}
}

func TestBadSettings(t *testing.T) {
	_, err := gobreaker.New(sony.Settings{
		Interval: -time.Second, Timeout: -time.Minute,
		IsSuccessful: func(error) bool { return true },
		IsExcluded:   func(error) bool { return true },
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"Settings.IsSuccessful is set: must be nil",
		"Settings.IsExcluded is set: must be nil",
		"Settings.Interval is -1s: must not be negative",
		"Settings.Timeout is -1m0s: must not be negative",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
}
