package interceptors

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
	"github.com/belayrpc/belay/interceptors/policy"
)

// ClientOption configures a [Client]. The interface is sealed: an option for
// servers does not compile here.
type ClientOption interface{ applyClient(c *clientConfig) }

// ServerOption configures a [Server]. The interface is sealed.
type ServerOption interface{ applyServer(c *serverConfig) }

// Option configures both sides.
type Option interface {
	ClientOption
	ServerOption
}

// PolicyOption says how calls may be tried again. It is a ClientOption, and
// what [Client.Update] takes.
type PolicyOption interface {
	ClientOption
	applyPolicy(c *policyConfig)
}

// clientConfig is what the options of NewClient say.
type clientConfig struct {
	commonConfig
	policyConfig

	sharedBudget *budget.Budget
	breaker      breaker.Config
	ownBreaker   Breaker
	noBreaker    bool
	wireTracing  bool
	errs         []error
}

// commonConfig is what both sides can be told.
type commonConfig struct {
	tracerProvider trace.TracerProvider
	propagators    propagation.TextMapPropagator
	logger         *slog.Logger
	observer       Observer
	trustBoundary  bool
	dryRun         bool
}

// policyConfig is what says how calls may be tried again.
type policyConfig struct {
	everywhere policy.Policy
	rules      []policy.Rule
	matchers   []matcherRule
}

type matcherRule struct {
	match  selector.Matcher
	policy policy.Policy
}

func (c *policyConfig) validate() error {
	var errs []error
	if err := c.everywhere.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("WithPolicy: %w", err))
	}
	for _, r := range c.rules {
		if err := r.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("WithRule: %w", err))
		}
	}
	for i, m := range c.matchers {
		if m.match == nil {
			errs = append(errs, fmt.Errorf("WithMatcher: matcher %d is nil", i))
		}
		if err := m.policy.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("WithMatcher: matcher %d: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

type clientOption func(*clientConfig)

func (o clientOption) applyClient(c *clientConfig) { o(c) }

type policyOption func(*policyConfig)

func (o policyOption) applyClient(c *clientConfig) { o(&c.policyConfig) }
func (o policyOption) applyPolicy(c *policyConfig) { o(c) }

type commonOption func(*commonConfig)

func (o commonOption) applyClient(c *clientConfig) { o(&c.commonConfig) }
func (o commonOption) applyServer(c *serverConfig) { o(&c.commonConfig) }

// WithPolicy sets the policy of all methods. Rules and matchers go over it,
// field by field. A second WithPolicy goes over the first.
func WithPolicy(p policy.Policy) PolicyOption {
	p = p.Clone()
	return policyOption(func(c *policyConfig) { c.everywhere = p.Over(c.everywhere) })
}

// WithRule sets the policy of the methods that a pattern names:
// "pkg.Svc/Method", "pkg.Svc/*" or "*". The more specific pattern wins, field
// by field; of equal patterns the later. A pattern that names a service or
// method which no .proto linked into the program has is an error of NewClient.
func WithRule(pattern string, p policy.Policy) PolicyOption {
	p = p.Clone()
	return policyOption(func(c *policyConfig) {
		c.rules = append(slices.Clip(c.rules), policy.Rule{Pattern: pattern, Policy: p})
	})
}

// WithMatcher sets the policy of the calls that a matcher chooses. It is asked
// for each call, with the caller's context, and goes under rules and over
// WithPolicy. Explain cannot see into it and says so. The matcher may be called
// from many goroutines; the first that matches wins, field by field.
func WithMatcher(m selector.Matcher, p policy.Policy) PolicyOption {
	p = p.Clone()
	return policyOption(func(c *policyConfig) {
		c.matchers = append(slices.Clip(c.matchers), matcherRule{match: m, policy: p})
	})
}

// WithBudget makes all channels of the client share one retry bank. By default
// each channel has its own, made from the zero budget.Config. Sharing is a
// choice: neighbours spend each other's retries.
func WithBudget(b *budget.Budget) ClientOption {
	return clientOption(func(c *clientConfig) {
		c.sharedBudget = b
		switch {
		case b == nil:
			c.errs = append(c.errs, errors.New("WithBudget: the budget is nil; leave the option out for the default"))
		case b.Err() != nil:
			c.errs = append(c.errs, fmt.Errorf("WithBudget: %w", b.Err()))
		}
	})
}

// WithBreaker configures the circuit breakers, one per channel and service. The
// zero Config is the default.
func WithBreaker(cfg breaker.Config) ClientOption {
	return clientOption(func(c *clientConfig) {
		c.breaker, c.ownBreaker, c.noBreaker = cfg, nil, false
		if err := cfg.Validate(); err != nil {
			c.errs = append(c.errs, fmt.Errorf("WithBreaker: %w", err))
		}
	})
}

// WithoutBreaker switches circuit breaking off.
func WithoutBreaker() ClientOption {
	return clientOption(func(c *clientConfig) { c.ownBreaker, c.noBreaker = nil, true })
}

// Breaker is the seam for a circuit breaker of your own.
type Breaker interface {
	// Allow is asked before each attempt, with the service's full name, such as
	// "pkg.Service". An error refuses the attempt; the call then fails with
	// UNAVAILABLE and errors.Is finds the error. Otherwise done is called
	// exactly once, however the attempt ends, with what it says about the
	// server and how long it took. Allow may be called from many goroutines.
	Allow(service string) (done func(breaker.Outcome, time.Duration), err error)
}

// WithOwnBreaker uses a breaker of your own in place of Belay's.
func WithOwnBreaker(b Breaker) ClientOption {
	return clientOption(func(c *clientConfig) {
		c.ownBreaker, c.noBreaker = b, false
		if b == nil {
			c.errs = append(c.errs, errors.New("WithOwnBreaker: the breaker is nil; WithoutBreaker switches it off"))
		}
	})
}

// WithTracerProvider sets the provider of tracers. Default: the global one.
func WithTracerProvider(tp trace.TracerProvider) Option {
	return commonOption(func(c *commonConfig) { c.tracerProvider = tp })
}

// WithPropagators sets how trace context crosses the wire. Default: the global
// propagators.
func WithPropagators(p propagation.TextMapPropagator) Option {
	return commonOption(func(c *commonConfig) { c.propagators = p })
}

// WithTransportTracing leaves the CLIENT span and the propagation to a stats
// handler on the channel, such as otelgrpc's. Belay's attempt spans are then
// INTERNAL, with the stats handler's below them, and nothing is injected twice.
func WithTransportTracing() ClientOption {
	return clientOption(func(c *clientConfig) { c.wireTracing = true })
}

// WithLogger sets where the few things worth a line are logged: a promise that
// a server does not keep, retries stacked on retries. Default: slog.Default().
func WithLogger(l *slog.Logger) Option {
	return commonOption(func(c *commonConfig) { c.logger = l })
}

// WithObserver is told every decision. See [Observer].
func WithObserver(o Observer) Option {
	return commonOption(func(c *commonConfig) { c.observer = o })
}

// WithTrustBoundary is for the edge of a system. On a server it ignores what a
// caller says about attempts and removes what names parts of the system from
// answers; on a client it removes Belay's and gRFC A6's metadata that the
// caller's context would send out.
func WithTrustBoundary() Option {
	return commonOption(func(c *commonConfig) { c.trustBoundary = true })
}
