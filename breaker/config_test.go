package breaker_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/belayrpc/belay/breaker"
)

func TestValidateNamesFieldValueAndRule(t *testing.T) {
	t.Parallel()
	rows := []struct {
		name   string
		config breaker.Config
		want   []string // one line each
	}{
		{"zero", breaker.Config{}, nil},
		{"everything_set", breaker.Config{
			Name: "x", FailureRate: 1, MinCalls: math.MaxInt, Window: time.Millisecond, ConsecutiveFailures: 1,
			SlowCall: 1, SlowRate: 1, OpenFor: time.Minute, MaxOpenFor: time.Minute, Probes: 1, ProbeLease: 1,
		}, nil},
		{"long_open_time_alone", breaker.Config{OpenFor: time.Hour}, nil},
		{"rate_above_one", breaker.Config{FailureRate: 1.5}, []string{
			"breaker: Config.FailureRate = 1.5: must be above 0 and at most 1, or 0 for the default",
		}},
		{"rate_nan", breaker.Config{FailureRate: math.NaN()}, []string{
			"breaker: Config.FailureRate = NaN: must be above 0 and at most 1, or 0 for the default",
		}},
		{"rate_infinite", breaker.Config{SlowCall: 1, SlowRate: math.Inf(1)}, []string{
			"breaker: Config.SlowRate = +Inf: must be above 0 and at most 1, or 0 for the default",
		}},
		{"slow_rate_alone", breaker.Config{SlowRate: 0.5}, []string{
			"breaker: Config.SlowRate = 0.5: has no effect without SlowCall: set both or neither",
		}},
		{"window_too_short", breaker.Config{Window: 5}, []string{
			"breaker: Config.Window = 5ns: must be at least 1ms, or 0 for the default",
		}},
		{"cap_below_default_open_time", breaker.Config{MaxOpenFor: time.Millisecond}, []string{
			"breaker: Config.MaxOpenFor = 1ms: must not be below OpenFor (1s)",
		}},
		{"cap_below_open_time", breaker.Config{OpenFor: time.Hour, MaxOpenFor: time.Minute}, []string{
			"breaker: Config.MaxOpenFor = 1m0s: must not be below OpenFor (1h0m0s)",
		}},
		{"all_negative", breaker.Config{
			FailureRate: -1, MinCalls: -1, Window: -1, ConsecutiveFailures: -1, SlowCall: -1, SlowRate: -1,
			OpenFor: -1, MaxOpenFor: -1, Probes: -1, ProbeLease: -1,
		}, []string{
			"breaker: Config.FailureRate = -1: must be above 0 and at most 1, or 0 for the default",
			"breaker: Config.MinCalls = -1: must not be negative",
			"breaker: Config.Window = -1ns: must not be negative",
			"breaker: Config.ConsecutiveFailures = -1: must not be negative",
			"breaker: Config.SlowCall = -1ns: must not be negative",
			"breaker: Config.SlowRate = -1: must be above 0 and at most 1, or 0 for the default",
			"breaker: Config.OpenFor = -1ns: must not be negative",
			"breaker: Config.MaxOpenFor = -1ns: must not be negative",
			"breaker: Config.Probes = -1: must not be negative",
			"breaker: Config.ProbeLease = -1ns: must not be negative",
		}},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var got []string
			err := row.config.Validate()
			if err != nil {
				got = strings.Split(err.Error(), "\n")
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("Validate (-want +got):\n%s", diff)
			}

			b := breaker.New(row.config)
			if (b.Err() == nil) != (err == nil) {
				t.Errorf("New(…).Err() = %v, Validate() = %v", b.Err(), err)
			}
		})
	}
}

// A mistake in a setting must not cost a service its server.
func TestBreakersThatAdmitEverything(t *testing.T) {
	t.Parallel()
	rows := []struct {
		name    string
		breaker *breaker.Breaker
		invalid bool
	}{
		{"nil", nil, false},
		{"zero", new(breaker.Breaker), false},
		{"invalid", breaker.New(breaker.Config{Name: "x", FailureRate: 2}), true},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := row.breaker
			if got := b.Err() != nil; got != row.invalid {
				t.Errorf("Err() = %v", b.Err())
			}
			call(t, b, breaker.Failure, 100)
			b.ForceOpen()
			call(t, b, breaker.Failure, 100)
			b.ForceClose()
			b.Resume()
			wantState(t, b, breaker.Closed)
			if left := b.TimeLeft(); left != 0 {
				t.Errorf("TimeLeft() = %v, want 0", left)
			}
			want := breaker.Snapshot{}
			if row.invalid {
				want.Name = "x"
			}
			if got := b.Snapshot(); got != want {
				t.Errorf("Snapshot() = %+v, want %+v", got, want)
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{})
		call(t, b, breaker.Failure, 19) // below MinCalls
		wantState(t, b, breaker.Closed)
		call(t, b, breaker.Success, 5) // 19 of 24 is below 0.8
		wantState(t, b, breaker.Closed)
		call(t, b, breaker.Failure, 1) // 20 of 25 is 0.8
		wantState(t, b, breaker.Open)
		if left := b.TimeLeft(); left < time.Second/2 || left > time.Second {
			t.Errorf("first open time is %v, want 0.5s to 1s", left)
		}

		waitOpen(t, b)
		probes := []breaker.Permit{admitted(t, b), admitted(t, b), admitted(t, b)}
		refused(t, b)
		time.Sleep(10*time.Second - 1) // ProbeLease
		refused(t, b)
		time.Sleep(time.Nanosecond)
		admitted(t, b).Done(breaker.Neutral, 0)
		for _, probe := range probes {
			wantState(t, b, breaker.HalfOpen)
			probe.Done(breaker.Success, time.Hour) // no call is slow by default
		}
		wantState(t, b, breaker.Closed)
	})
}

// Rates are compared as they are written. Each row opens at failures of calls and not one failure
// earlier.
func TestRatesAreExact(t *testing.T) {
	t.Parallel()
	rows := []struct {
		rate            float64
		failures, calls int
	}{
		{0.07, 7, 100}, // 0.07*100 > 7 in floats
		{0.29, 29, 100},
		{0.5, 100, 200}, // 99 of 200 rounds to 0.50
		{0.495, 99, 200},
		{2.0 / 3, 2, 3},
		{1.0 / 3, 1, 3},
		{1, 1000, 1000},
		{1e-12, 1, 1000},
	}
	for _, row := range rows {
		for _, short := range []int{0, 1} {
			failures := row.failures - short
			b := breaker.New(breaker.Config{FailureRate: row.rate, MinCalls: row.calls, Window: time.Hour})
			call(t, b, breaker.Success, row.calls-failures)
			call(t, b, breaker.Failure, failures)
			if got, want := b.State() == breaker.Open, short == 0; got != want {
				t.Errorf("rate %v, %d of %d failed: open = %v, want %v", row.rate, failures, row.calls, got, want)
			}
		}
	}
}

func TestConsecutiveFailuresAlone(t *testing.T) {
	t.Parallel()
	b := breaker.New(breaker.Config{MinCalls: math.MaxInt, ConsecutiveFailures: 1000})
	call(t, b, breaker.Failure, 999)
	wantState(t, b, breaker.Closed)
	call(t, b, breaker.Failure, 1)
	wantState(t, b, breaker.Open)
}

func TestNames(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for i := range 12 {
		for kind, name := range map[string]string{
			"state":   breaker.State(i).String(),
			"outcome": breaker.Outcome(i).String(),
			"cause":   breaker.Cause(i).String(),
		} {
			if name == "" || name != "unknown" && seen[kind+name] {
				t.Errorf("%s %d is called %q: empty or taken", kind, i, name)
			}
			seen[kind+name] = true
		}
	}
	// 5 states, 3 outcomes and 10 causes, and "unknown" of each.
	if len(seen) != 5+3+10+3 {
		t.Errorf("%d names, want 21", len(seen))
	}
}

func TestOpenErrorText(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Name: "ledger", ConsecutiveFailures: 1, Probes: 1})
		call(t, b, breaker.Failure, 1)
		open := refusal(t, b)
		wantText(t, open, `breaker "ledger": open (consecutive failures), next probe in `+open.TimeLeft().String())
		waitOpen(t, b)
		admitted(t, b)
		half := refusal(t, b)
		wantText(t, half, `breaker "ledger": half-open, all probes are under way`)
		b.ForceOpen()
		forced := refusal(t, b)
		wantText(t, forced, `breaker "ledger": forced open`)
		for _, err := range []*breaker.OpenError{half, forced} {
			if !err.Until().IsZero() || err.TimeLeft() != 0 || b.TimeLeft() != 0 {
				t.Errorf("%v: until %v, left %v, want neither", err, err.Until(), err.TimeLeft())
			}
		}

		nameless := breaker.New(breaker.Config{})
		nameless.ForceOpen()
		wantText(t, refusal(t, nameless), "breaker: forced open")
		if errors.Is(forced, errors.ErrUnsupported) {
			t.Error("a refusal matches an error that it is not")
		}
	})
}

func wantText(t *testing.T, err error, want string) {
	t.Helper()
	if got := err.Error(); got != want {
		t.Errorf("error text\n got %s\nwant %s", got, want)
	}
}
