package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
)

// Defaults of Config, and of the stores.
const (
	DefaultRetention     = 24 * time.Hour
	DefaultMaxExecution  = 30 * time.Second
	DefaultWaitMax       = 5 * time.Second
	DefaultWaitersPerKey = 16
	DefaultWaiters       = 256
	DefaultMaxReply      = 64 << 10
	DefaultFinishReserve = 50 * time.Millisecond
	DefaultSkew          = time.Minute
	DefaultStoreTimeout  = 5 * time.Second
)

// TransientPolicy says what a handler's transient error means for the key.
type TransientPolicy uint8

// The policies.
const (
	// TransientStoreDefault: what the store's Traits say.
	TransientStoreDefault TransientPolicy = iota
	// TransientRelease: the key is free; the next call with it runs.
	TransientRelease
	// TransientUnknown: the record becomes UNKNOWN.
	TransientUnknown
)

// Config says how an Engine treats keyed calls. Zero means the default for
// every field but Scope; a negative number is an error.
type Config struct {
	// Scope returns whose keys these are: the authenticated principal, or
	// tenant. It is mandatory, since two callers that happen to choose the same
	// key must never see each other's replies: ScopeFromTLS, SingleTenant, or
	// your own, reading what your authentication put into ctx. An error, and an
	// empty scope, refuse the call: UNAUTHENTICATED, SCOPE_MISSING.
	Scope func(ctx context.Context) (string, error)

	// Retention is for how long a record is kept, from its claim and again from
	// its finish. Default: the store's (Traits.Retention), else 24 hours. It
	// must be longer than MaxExecution + 2 × Skew: what is left of it is the
	// window in which a key that says when it was first sent is accepted.
	Retention time.Duration

	// MaxExecution bounds one execution of the handler. The execution is
	// detached from its caller: when the caller goes, the handler goes on, and a
	// retry joins it. Default 30 s.
	MaxExecution time.Duration

	// Lease is for how long the store respects a claim without a renewal.
	// Default MaxExecution. A shorter one lets another process take over a
	// crashed one's work sooner.
	Lease time.Duration

	// RenewEvery is the time between two renewals. Default Lease / 3, so that
	// one may fail. It must be shorter than Lease.
	RenewEvery time.Duration

	// DisableRenewal sends no renewals, and lets a handler run past its lease
	// until MaxExecution: others may then take over, as their Rerun and the
	// store say, while the handler works.
	DisableRenewal bool

	// FinishReserve is kept free at the end of MaxExecution, and of a lease that
	// could not be renewed, to record the outcome in. Default 50 ms, or a tenth
	// of Lease or MaxExecution where that is less.
	FinishReserve time.Duration

	// StoreTimeout bounds one step of the store (claim, renewal, finish).
	// Default 5 s.
	StoreTimeout time.Duration

	// WaitMax bounds how long a duplicate waits for the execution it met, as
	// does its own deadline less FinishReserve. Then it is answered IN_FLIGHT.
	// Default 5 s.
	WaitMax time.Duration

	// WaitersPerKey bounds how many duplicates of one call wait in this process;
	// the next ones are answered IN_FLIGHT at once. Default 16.
	WaitersPerKey int

	// Waiters bounds how many duplicates wait in all; the next ones are answered
	// WAITERS_EXCEEDED at once. Default 256.
	Waiters int

	// MaxReply is the largest stored reply, response or status with its kept
	// metadata, in bytes. A larger one leaves a tombstone: the effect is done
	// and will not be repeated, but a repeated call gets RESPONSE_NOT_RETAINED.
	// Default 64 KiB.
	MaxReply int

	// MinKeyLength refuses shorter keys as KEY_INVALID: a floor for their
	// entropy. Default 1, at most MaxKeyLength.
	MinKeyLength int

	// Skew is how far the clocks of client, server and store may disagree.
	// Default 1 minute. A first-sent time further in the future is refused.
	Skew time.Duration

	// FingerprintSecrets make fingerprints HMACs. See NewFingerprinter. All
	// servers on one store need the same.
	FingerprintSecrets []Secret

	// Sealer encrypts stored responses and errors. Nil stores them as they are.
	Sealer Sealer

	// ReplayMetadata lists the response metadata that is stored and replayed, in
	// lower case. Default none: capturing it means wrapping the transport's
	// stream. Credentials and grpc's own names are refused.
	ReplayMetadata []string

	// Limit, when set, is asked before a call that no other call in this process
	// is at work on goes to the store. An error refuses it: RESOURCE_EXHAUSTED,
	// SCOPE_LIMIT. It is called without a lock held.
	Limit func(ctx context.Context, scope, method string) error

	// Rerun declares that the handlers' effects are themselves keyed (the key is
	// passed downstream) or naturally idempotent, so that an execution whose end
	// is unknown may be run again. Default false: it stays UNKNOWN until
	// Store.Resolve. Atomic stores take over without it.
	Rerun bool

	// OnTransientError says what a handler's error of code UNAVAILABLE, ABORTED,
	// RESOURCE_EXHAUSTED or UNAUTHENTICATED means when the store cannot undo
	// effects (Execution.Atomic is false) and the handler gave no verdict. These
	// codes tell the caller "not done, try again", and a client does so with the
	// same key. By default the store decides: the memory store frees the key,
	// because a handler that returned in this very process has said so itself
	// and nothing else could ever resolve the record; a store that outlives the
	// process records UNKNOWN.
	//
	// It says nothing about CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNKNOWN (any
	// plain Go error) and DATA_LOSS, which leave open what happened, about a
	// panic, or about a handler whose context had ended: those are UNKNOWN, and
	// NoEffect is the way to say otherwise.
	OnTransientError TransientPolicy

	// UnknownRetryAfter is set where something resolves UNKNOWN records within
	// about this time: callers are then told to come back, with ABORTED, rather
	// than FAILED_PRECONDITION. Default 0: nothing does.
	UnknownRetryAfter time.Duration

	// OnEvent, when set, is told what happened, for metrics and logs. It is
	// called without a lock held, on the goroutine that made it happen, so it
	// must be quick. A panic in it is recovered and logged.
	OnEvent func(Event)

	// Logger gets what nobody else hears: a handler's panic after its caller has
	// gone, and a panic of OnEvent. Nil means slog.Default().
	Logger *slog.Logger
}

// Validate reports the first field that breaks its rule, with its value. It is
// what NewEngine reports, before the store's own defaults are known.
func (c *Config) Validate() error {
	_, err := c.withDefaults(Traits{})
	return err
}

// withDefaults returns a copy with every default filled in, and checked.
func (c *Config) withDefaults(traits Traits) (Config, error) {
	cfg := *c
	if err := cfg.checkSigns(); err != nil {
		return Config{}, err
	}
	if cfg.Scope == nil {
		return Config{}, errors.New("idempotency: Config.Scope is nil: must be set, since keys of different callers must not meet; " +
			"use ScopeFromTLS, a function of your own, or SingleTenant on a server whose callers all belong together")
	}
	cfg.Retention = firstPositive(cfg.Retention, traits.Retention, DefaultRetention)
	cfg.MaxExecution = firstPositive(cfg.MaxExecution, DefaultMaxExecution)
	cfg.Lease = firstPositive(cfg.Lease, cfg.MaxExecution)
	cfg.RenewEvery = firstPositive(cfg.RenewEvery, cfg.Lease/3)
	cfg.FinishReserve = firstPositive(cfg.FinishReserve, min(DefaultFinishReserve, cfg.Lease/10, cfg.MaxExecution/10))
	cfg.StoreTimeout = firstPositive(cfg.StoreTimeout, DefaultStoreTimeout)
	cfg.WaitMax = firstPositive(cfg.WaitMax, DefaultWaitMax)
	cfg.Skew = firstPositive(cfg.Skew, DefaultSkew)
	cfg.WaitersPerKey = firstPositive(cfg.WaitersPerKey, DefaultWaitersPerKey)
	cfg.Waiters = firstPositive(cfg.Waiters, DefaultWaiters)
	cfg.MaxReply = firstPositive(cfg.MaxReply, DefaultMaxReply)
	cfg.MinKeyLength = firstPositive(cfg.MinKeyLength, 1)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return cfg, cfg.checkRelations()
}

func firstPositive[T ~int | ~int64](values ...T) T {
	for _, v := range values {
		if v > 0 {
			return v
		}
	}
	return 0
}

func (c *Config) checkSigns() error {
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"Retention", c.Retention},
		{"MaxExecution", c.MaxExecution},
		{"Lease", c.Lease},
		{"RenewEvery", c.RenewEvery},
		{"FinishReserve", c.FinishReserve},
		{"StoreTimeout", c.StoreTimeout},
		{"WaitMax", c.WaitMax},
		{"Skew", c.Skew},
		{"UnknownRetryAfter", c.UnknownRetryAfter},
	} {
		if d.value < 0 {
			return fmt.Errorf("idempotency: Config.%s is %v: must not be negative", d.name, d.value)
		}
	}
	for _, n := range []struct {
		name  string
		value int
	}{
		{"WaitersPerKey", c.WaitersPerKey},
		{"Waiters", c.Waiters},
		{"MaxReply", c.MaxReply},
		{"MinKeyLength", c.MinKeyLength},
	} {
		if n.value < 0 {
			return fmt.Errorf("idempotency: Config.%s is %d: must not be negative", n.name, n.value)
		}
	}
	return nil
}

func (c *Config) checkRelations() error {
	switch {
	case c.window(c.Retention) <= 0:
		return fmt.Errorf("idempotency: Config.Retention is %v: must be longer than MaxExecution (%v) + 2 × Skew (%v)",
			c.Retention, c.MaxExecution, c.Skew)
	case c.Lease >= c.Retention:
		return fmt.Errorf("idempotency: Config.Lease is %v: must be shorter than Retention (%v)", c.Lease, c.Retention)
	case c.RenewEvery >= c.Lease:
		return fmt.Errorf("idempotency: Config.RenewEvery is %v: must be shorter than Lease (%v)", c.RenewEvery, c.Lease)
	case c.FinishReserve >= c.Lease:
		return fmt.Errorf("idempotency: Config.FinishReserve is %v: must be shorter than Lease (%v)", c.FinishReserve, c.Lease)
	case c.FinishReserve >= c.MaxExecution:
		return fmt.Errorf("idempotency: Config.FinishReserve is %v: must be shorter than MaxExecution (%v)", c.FinishReserve, c.MaxExecution)
	case c.MinKeyLength > MaxKeyLength:
		return fmt.Errorf("idempotency: Config.MinKeyLength is %d: must be at most %d", c.MinKeyLength, MaxKeyLength)
	case c.OnTransientError > TransientUnknown:
		return fmt.Errorf("idempotency: Config.OnTransientError is %d: must be TransientStoreDefault, TransientRelease or TransientUnknown", c.OnTransientError)
	}
	if err := validateSecrets("Config.FingerprintSecrets", c.FingerprintSecrets); err != nil {
		return err
	}
	for i, name := range c.ReplayMetadata {
		if err := validateReplayName(name); err != nil {
			return fmt.Errorf("idempotency: Config.ReplayMetadata[%d] is %q: %w", i, name, err)
		}
	}
	return nil
}

// window is for how long after its first-sent time a key is accepted when there
// is no record: until then, a record of it cannot have been swept.
func (c *Config) window(retention time.Duration) time.Duration {
	return retention - c.MaxExecution - 2*c.Skew
}

func validateReplayName(name string) error {
	if name == "" {
		return errors.New("must not be empty")
	}
	for _, r := range name {
		if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789-_.", r) {
			return errors.New("must be a lower-case metadata key")
		}
	}
	switch {
	case name == "authorization", name == "set-cookie", name == "cookie", name == "proxy-authorization", name == "www-authenticate":
		return errors.New("must not name credentials, which belong to one caller and one moment")
	case strings.HasPrefix(name, "grpc-"), strings.HasPrefix(name, "belay-"), strings.HasPrefix(name, "idempotency-"), name == "content-type":
		return errors.New("must not name what the transport or Belay writes for each reply")
	}
	return nil
}
