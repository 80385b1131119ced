package interceptors

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

// Server holds what Belay does on the side that is called: the guard, outermost,
// and dedupe, innermost. Make one with [NewServer]; it may serve any number of
// grpc.Servers and is safe for concurrent use.
type Server struct {
	config serverConfig
	tracer *tracer
	banks  serverBanks
	stores []storeRule  // the most specific pattern first
	keyed  sync.Map     // full method → *keyedMethod
	spool  atomic.Int64 // bytes of keyed streams that are being read
	warned once
}

// serverConfig is what the options of NewServer say.
type serverConfig struct {
	commonConfig

	deadline    DeadlineConfig
	stores      []storeRule
	streamLimit int
	errs        []error
}

type serverOption func(*serverConfig)

func (o serverOption) applyServer(c *serverConfig) { o(c) }

// DeadlineConfig is how a server uses the time that a caller gives it.
type DeadlineConfig struct {
	// Reserve is taken off the caller's deadline before the handler sees it, so
	// that an answer still reaches a caller who waits. Default: 5 % of the time
	// left, at most 5 ms.
	Reserve time.Duration

	// Floor is the least time for which a handler is started; with less the
	// call is refused with DEADLINE_EXCEEDED before any work. Default 1 ms.
	Floor time.Duration

	// Default is the deadline of calls that come without one. Default: none.
	Default time.Duration
}

const (
	defaultStreamLimit = 4 << 20
	spoolFactor        = 16

	maxReserve     = 5 * time.Millisecond
	reserveDivisor = 20 // 5 %
	defaultFloor   = time.Millisecond
)

// Validate returns an error that names the field with a bad value, the value
// and the rule.
func (d DeadlineConfig) Validate() error {
	var errs []error
	for _, f := range []struct {
		name  string
		value time.Duration
	}{{"Reserve", d.Reserve}, {"Floor", d.Floor}, {"Default", d.Default}} {
		if f.value < 0 {
			errs = append(errs, fmt.Errorf("%s: %v must not be negative", f.name, f.value))
		}
	}
	if d.Default > 0 && d.Default-max(d.Reserve, 0) <= max(d.Floor, defaultFloor) { // not a sum, which may overflow
		errs = append(errs, fmt.Errorf("Default: %v must be longer than Reserve and Floor together", d.Default)) //nolint:staticcheck // a field's name
	}
	return errors.Join(errs...)
}

// WithServerDeadline sets how the server uses the time that it is given.
func WithServerDeadline(d DeadlineConfig) ServerOption {
	return serverOption(func(c *serverConfig) {
		c.deadline = d
		if err := d.Validate(); err != nil {
			c.errs = append(c.errs, fmt.Errorf("WithServerDeadline: %w", err))
		}
	})
}

// WithKeyedStreamLimit sets how many bytes of requests one keyed client stream
// may have. A keyed stream is read to its end before its handler starts; one
// above the limit is refused with RESOURCE_EXHAUSTED, nothing executed. Default
// 4 MiB. All such streams of a server together may hold 16 times as much.
func WithKeyedStreamLimit(bytes int) ServerOption {
	return serverOption(func(c *serverConfig) {
		c.streamLimit = bytes
		if bytes <= 0 {
			c.errs = append(c.errs, fmt.Errorf("WithKeyedStreamLimit: %d must be positive", bytes))
		}
	})
}

// Drain waits until no keyed execution is at work, or ctx ends. Call it after
// grpc.Server.GracefulStop and before the process exits: an execution outlives
// its caller, and one that dies with the process leaves a record that says only
// that it began.
func (s *Server) Drain(ctx context.Context) error {
	errs := make([]error, len(s.stores))
	for i, r := range s.stores {
		errs[i] = r.engine.Drain(ctx)
	}
	return errors.Join(errs...)
}

// NewServer returns a Server with safe defaults for everything not given.
// Without a store nothing is deduplicated, and keyed methods whose key is
// REQUIRED are refused; see [WithIdempotency].
func NewServer(opts ...ServerOption) (*Server, error) {
	s := &Server{config: serverConfig{streamLimit: defaultStreamLimit}}
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("interceptors: NewServer: option %d is nil", i)
		}
		o.applyServer(&s.config)
	}
	if s.config.logger == nil {
		s.config.logger = slog.Default()
	}
	s.tracer = newTracer(&s.config.commonConfig)
	s.stores = sortStores(s.config.stores)
	if err := errors.Join(s.config.errs...); err != nil {
		return nil, fmt.Errorf("interceptors: NewServer: %w", err)
	}
	return s, nil
}

// ServerOptions returns the options of grpc.NewServer in the order that is
// safe: the guard, then yours, then dedupe. Give your interceptors with
// grpc.ChainUnaryInterceptor and grpc.ChainStreamInterceptor: gRPC puts a plain
// grpc.UnaryInterceptor before everything, the guard included.
func (s *Server) ServerOptions(between ...grpc.ServerOption) []grpc.ServerOption {
	all := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(s.UnaryGuard()),
		grpc.ChainStreamInterceptor(s.StreamGuard()),
	}
	all = append(all, between...)
	return append(all,
		grpc.ChainUnaryInterceptor(s.UnaryDedupe()),
		grpc.ChainStreamInterceptor(s.StreamDedupe()),
	)
}
