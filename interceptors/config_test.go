package interceptors_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
)

// Every bad value is an error that names option, field, value and rule, and
// nothing panics.
func TestBadClientOptions(t *testing.T) {
	withPolicy := func(p policy.Policy) interceptors.ClientOption { return interceptors.WithPolicy(p) }
	for _, c := range []struct {
		option interceptors.ClientOption
		want   []string // all in the error
	}{
		{nil, []string{"NewClient", "option 0 is nil"}},
		{withPolicy(policy.Policy{Timeout: -1}), []string{"WithPolicy", "Timeout", "-1ns", "must not be negative"}},
		{withPolicy(policy.Policy{AttemptTimeout: -time.Second}), []string{"WithPolicy", "AttemptTimeout", "-1s", "must not be negative"}},
		{withPolicy(policy.Policy{AttemptTimeout: time.Millisecond, MinAttempt: time.Second}), []string{"AttemptTimeout", "1ms", "MinAttempt", "1s"}},
		{withPolicy(policy.Policy{MinAttempt: -1}), []string{"MinAttempt", "-1ns", "must not be negative"}},
		{withPolicy(policy.Policy{MinAttempt: policy.Unlimited}), []string{"MinAttempt", "unlimited", "must be"}},
		{withPolicy(policy.Policy{MaxAttempts: -1}), []string{"MaxAttempts", "-1", "must not be negative"}},
		{withPolicy(policy.Policy{Backoff: policy.Backoff{Base: -1}}), []string{"Backoff.Base", "-1ns", "must not be negative"}},
		{withPolicy(policy.Policy{Backoff: policy.Backoff{Max: -1}}), []string{"Backoff.Max", "-1ns", "must not be negative"}},
		{withPolicy(policy.Policy{Backoff: policy.Backoff{Base: time.Second, Max: time.Millisecond}}), []string{"Backoff.Max", "1ms", "Backoff.Base", "1s"}},
		{withPolicy(policy.Policy{Backoff: policy.Backoff{Multiplier: 0.5}}), []string{"Backoff.Multiplier", "0.5", "at least 1"}},
		{withPolicy(policy.Policy{Backoff: policy.Backoff{Multiplier: math.NaN()}}), []string{"Backoff.Multiplier", "NaN"}},
		{withPolicy(policy.Policy{Backoff: policy.Backoff{Jitter: 99}}), []string{"Backoff.Jitter", "99"}},
		{withPolicy(policy.Policy{Backoff: policy.Backoff{Spread: 2}}), []string{"Backoff.Spread", "2", "between 0 and 1"}},
		{withPolicy(policy.Policy{Codes: []codes.Code{codes.OK}}), []string{"Codes", "OK", "not retried"}},
		{withPolicy(policy.Policy{Codes: []codes.Code{codes.DeadlineExceeded}}), []string{"Codes", "DEADLINE_EXCEEDED", "AttemptTimeout"}},
		{withPolicy(policy.Policy{Codes: []codes.Code{99}}), []string{"Codes", "99", "17"}},
		{withPolicy(policy.Policy{Idempotency: 77}), []string{"Idempotency", "77"}},
		{withPolicy(policy.Policy{ConnectGrace: -1}), []string{"ConnectGrace", "-1ns"}},
		{withPolicy(policy.Policy{ReplayBytes: -1}), []string{"ReplayBytes", "-1"}},
		{withPolicy(policy.Policy{MaxIdle: -1}), []string{"MaxIdle", "-1ns"}},
		{interceptors.WithRule("", policy.Policy{}), []string{"WithRule", `""`, "want"}},
		{interceptors.WithRule("Svc", policy.Policy{}), []string{"WithRule", `"Svc"`, "want"}},
		{interceptors.WithRule("pkg.*/M", policy.Policy{}), []string{"WithRule", `"pkg.*/M"`, "want"}},
		{interceptors.WithRule("no.Such/Method", policy.Policy{}), []string{"WithRule", "no.Such", "not in the protobuf registry"}},
		{interceptors.WithRule("no.Such/*", policy.Policy{}), []string{"WithRule", "no.Such", "not in the protobuf registry"}},
		{interceptors.WithRule(probeService+"/Reed", policy.Policy{}), []string{"WithRule", "Reed", "has no method"}},
		{interceptors.WithRule("*", policy.Policy{MaxAttempts: -7}), []string{"WithRule", `"*"`, "MaxAttempts", "-7"}},
		{interceptors.WithMatcher(nil, policy.Policy{}), []string{"WithMatcher", "matcher 0", "nil"}},
		{interceptors.WithMatcher(nil, policy.Policy{MaxAttempts: -7}), []string{"WithMatcher", "matcher 0", "MaxAttempts", "-7"}},
		{interceptors.WithBudget(nil), []string{"WithBudget", "nil"}},
		{interceptors.WithBudget(budget.New(budget.Config{Earn: 7})), []string{"WithBudget", "Earn", "7"}},
		{interceptors.WithBudget(&budget.Budget{}), []string{"WithBudget", "New"}},
		{interceptors.WithBreaker(breaker.Config{FailureRate: 2}), []string{"WithBreaker", "FailureRate", "2"}},
		{interceptors.WithBreaker(breaker.Config{OpenFor: -1}), []string{"WithBreaker", "OpenFor", "-1ns"}},
		{interceptors.WithOwnBreaker(nil), []string{"WithOwnBreaker", "nil"}},
	} {
		t.Run(strings.Join(c.want, " "), func(t *testing.T) {
			client, err := interceptors.NewClient(c.option)
			wantConfigError(t, client == nil, err, c.want)
		})
	}

	t.Run("all at once", func(t *testing.T) {
		_, err := interceptors.NewClient(
			interceptors.WithPolicy(policy.Policy{MaxAttempts: -1, Timeout: -2}),
			interceptors.WithRule("x", policy.Policy{}),
			interceptors.WithBudget(nil),
			interceptors.WithBreaker(breaker.Config{MinCalls: -3}),
		)
		wantConfigError(t, true, err, []string{"MaxAttempts: -1", "Timeout: -2ns", `rule "x"`, "WithBudget", "MinCalls", "-3"})
	})
	t.Run("nothing is a fine configuration", func(t *testing.T) {
		if _, err := interceptors.NewClient(); err != nil {
			t.Error(err)
		}
		if _, err := interceptors.NewServer(); err != nil {
			t.Error(err)
		}
	})
}

func TestBadServerOptions(t *testing.T) {
	store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
	ok := idempotency.Config{Scope: idempotency.SingleTenant}
	with := func(change func(*idempotency.Config)) interceptors.ServerOption {
		cfg := ok
		change(&cfg)
		return interceptors.WithIdempotency(store, cfg)
	}
	for _, c := range []struct {
		options []interceptors.ServerOption
		want    []string
	}{
		{[]interceptors.ServerOption{nil}, []string{"NewServer", "option 0 is nil"}},
		{[]interceptors.ServerOption{interceptors.WithServerDeadline(interceptors.DeadlineConfig{Reserve: -1})}, []string{"WithServerDeadline", "Reserve", "-1ns", "must not be negative"}},
		{[]interceptors.ServerOption{interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: -1})}, []string{"WithServerDeadline", "Floor", "-1ns"}},
		{[]interceptors.ServerOption{interceptors.WithServerDeadline(interceptors.DeadlineConfig{Default: -1})}, []string{"WithServerDeadline", "Default", "-1ns"}},
		{[]interceptors.ServerOption{interceptors.WithServerDeadline(interceptors.DeadlineConfig{Default: time.Second, Reserve: time.Second})}, []string{"WithServerDeadline", "Default", "1s", "Reserve"}},
		{[]interceptors.ServerOption{interceptors.WithIdempotency(nil, ok)}, []string{"store is nil"}},
		{[]interceptors.ServerOption{interceptors.WithIdempotency(store, idempotency.Config{})}, []string{"Config.Scope is nil", "must be set"}},
		{[]interceptors.ServerOption{with(func(c *idempotency.Config) { c.Retention = time.Second })}, []string{"Config.Retention is 1s", "must be longer"}},
		{[]interceptors.ServerOption{with(func(c *idempotency.Config) { c.Lease = -1 })}, []string{"Config.Lease is -1ns", "must not be negative"}},
		{[]interceptors.ServerOption{with(func(c *idempotency.Config) { c.ReplayMetadata = []string{"Authorization"} })}, []string{"ReplayMetadata[0]", "Authorization", "lower-case"}},
		{[]interceptors.ServerOption{with(func(c *idempotency.Config) { c.ReplayMetadata = []string{"cookie"} })}, []string{"ReplayMetadata[0]", "cookie", "credentials"}},
		{[]interceptors.ServerOption{interceptors.WithIdempotency(idempotency.NewMemoryStore(idempotency.MemoryConfig{MaxBytes: -1}), ok)}, []string{"MaxBytes", "-1"}},
		{[]interceptors.ServerOption{interceptors.WithIdempotencyFor("Svc", store, ok)}, []string{"WithIdempotencyFor", `"Svc"`, "want"}},
		{[]interceptors.ServerOption{interceptors.WithIdempotencyFor(probeService+"/Reed", store, ok)}, []string{"WithIdempotencyFor", "Reed", "has no method"}},
		{[]interceptors.ServerOption{interceptors.WithIdempotency(store, ok), interceptors.WithIdempotency(store, ok)}, []string{`"*"`, "has a store already"}},
	} {
		t.Run(strings.Join(c.want, " "), func(t *testing.T) {
			server, err := interceptors.NewServer(c.options...)
			wantConfigError(t, server == nil, err, c.want)
		})
	}
}

func wantConfigError(t *testing.T, nothing bool, err error, want []string) {
	t.Helper()
	if err == nil || !nothing {
		t.Fatalf("error %v beside a result, want an error alone", err)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not contain %q", err, w)
		}
	}
	if !strings.HasPrefix(fmt.Sprint(err), "interceptors: New") {
		t.Errorf("error %q does not say who speaks", err)
	}
}
