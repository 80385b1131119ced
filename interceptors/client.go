package interceptors

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
)

// Client holds what the channels of a program share: options, policies, and
// for each channel a retry bank and circuit breakers. Make one with [NewClient].
// It may be used from many goroutines and for many channels.
type Client struct {
	config clientConfig
	tracer *tracer

	policies atomic.Pointer[policySet]
	disabled atomic.Bool

	channels channels
	dry      dryRun
	none     *channel // for calls that come without a ClientConn
	warned   once
}

// NewClient returns a Client with safe defaults for everything not given. The
// error names every option with a bad value, the value and the rule.
func NewClient(opts ...ClientOption) (*Client, error) {
	c := &Client{}
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("interceptors: NewClient: option %d is nil", i)
		}
		o.applyClient(&c.config)
	}
	if err := errors.Join(append(c.config.errs, c.config.validate())...); err != nil {
		return nil, fmt.Errorf("interceptors: NewClient: %w", err)
	}
	if c.config.logger == nil {
		c.config.logger = slog.Default()
	}
	c.dry.clock = newClock()
	c.tracer = newTracer(&c.config.commonConfig)
	c.policies.Store(newPolicySet(c.config.policyConfig))
	c.none = c.newChannel()
	return c, nil
}

// DialOptions returns what grpc.NewClient needs: both interceptors; gRPC's own
// retries switched off, which would multiply with ours (transparent ones, of what
// a server never saw, stay on); and a wait between two attempts to connect of
// 100 ms to 2 s. gRPC's own default is 1 s to 2 min: the first is as long as the
// whole ConnectGrace, so calls that wait for a restart would miss it, and after an
// outage of some seconds the channel would be away for as many more. Of options
// that say the same the last one counts, so a grpc.WithConnectParams of your own
// goes after these.
func (c *Client) DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(c.unaryInterceptor(true)),
		grpc.WithChainStreamInterceptor(c.streamInterceptor(true)),
		grpc.WithDisableRetry(),
		grpc.WithConnectParams(connectParams()),
	}
}

// connectParams is gRPC's connection backoff with other limits. Four attempts fit
// into the default ConnectGrace; no wait is longer than 1.92 s, its jitter included.
func connectParams() grpc.ConnectParams {
	params := grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: 20 * time.Second} // gRPC's default too
	params.Backoff.BaseDelay = 100 * time.Millisecond
	params.Backoff.MaxDelay = 1600 * time.Millisecond
	return params
}

// Unary returns the interceptor for unary calls, for programs that build their
// own chain. Interceptors before it run once per call, those after it once per
// attempt; one of those may invoke more than once, but not at the same time, as
// all that it invokes with the options it was given write to the same targets
// (hedging is Policy.Hedge's). Dial with grpc.WithDisableRetry() too: a retryPolicy of the channel
// is reported once where it is seen, and multiplies with ours.
func (c *Client) Unary() grpc.UnaryClientInterceptor { return c.unaryInterceptor(false) }

// Update replaces all policies at once, or none: on an error, which names what
// is wrong, the old ones stay. Policies that are not given again are gone. Calls
// in flight keep theirs; banks and breakers keep their state.
func (c *Client) Update(opts ...PolicyOption) error {
	var cfg policyConfig
	for i, o := range opts {
		if o == nil {
			return fmt.Errorf("interceptors: Update: option %d is nil", i)
		}
		o.applyPolicy(&cfg)
	}
	if err := cfg.validate(); err != nil {
		return fmt.Errorf("interceptors: Update: %w", err)
	}
	c.policies.Store(newPolicySet(cfg))
	return nil
}

// Disable is the kill switch: from now on every call makes one attempt and
// nothing is refused, while spans, events and the counts of banks and breakers
// go on. Calls in flight finish under the old rule.
func (c *Client) Disable() { c.disabled.Store(true) }

// Enable undoes Disable.
func (c *Client) Enable() { c.disabled.Store(false) }

// newChannel returns the state of one channel.
func (c *Client) newChannel() *channel {
	ch := &channel{clock: newClock(), bank: c.config.sharedBudget}
	if ch.bank == nil {
		ch.bank = budget.New(budget.Config{})
	}
	ch.hedges.bank = budget.New(hedgeBank)
	if !c.config.noBreaker && c.config.ownBreaker == nil {
		ch.breakers = breaker.NewGroup(c.config.breaker, 0)
	}
	return ch
}

// channelOf returns the state kept for a ClientConn, made on first use. A nil
// ClientConn has the Client's own.
func (c *Client) channelOf(cc *grpc.ClientConn) *channel {
	if cc == nil {
		return c.none
	}
	return c.channels.get(cc, c.newChannel)
}

// Budget returns the retry bank of a channel, to look at or to put on a page.
// cc may be nil.
func (c *Client) Budget(cc *grpc.ClientConn) *budget.Budget { return c.channelOf(cc).bank }

// Breaker returns Belay's breaker for a service, such as "pkg.Service", on a
// channel; nil where breaking is off or a breaker of your own is used.
func (c *Client) Breaker(cc *grpc.ClientConn, service string) *breaker.Breaker {
	ch := c.channelOf(cc)
	if ch.breakers == nil {
		return nil
	}
	return ch.breakers.Get(service)
}

// rulesFor are the methods' rules now in force.
func (c *Client) methodOf(fullMethod string) (*policySet, *method) {
	set := c.policies.Load()
	return set, set.method(fullMethod)
}
