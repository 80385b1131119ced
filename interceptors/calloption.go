package interceptors

import (
	"google.golang.org/grpc"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors/policy"
)

// overrideOption, noRetryOption and keyOption are grpc.CallOptions that gRPC
// itself ignores, so a call that carries one on a channel without Belay works.
type (
	overrideOption struct {
		grpc.EmptyCallOption

		policy policy.Policy
	}
	noRetryOption struct{ grpc.EmptyCallOption }
	keyOption     struct {
		grpc.EmptyCallOption

		key idempotency.Key
	}
)

// Override goes over every other source of policy, field by field, for one
// call. A bad value fails the call with INVALID_ARGUMENT, nothing sent.
func Override(p policy.Policy) grpc.CallOption { return overrideOption{policy: p.Clone()} }

// NoRetry makes one call with one attempt. Deadlines, breaker and spans stay.
func NoRetry() grpc.CallOption { return noRetryOption{} }

// WithKey gives one call its idempotency key, so that it can be resumed after
// a restart: store the key before the call. Without it a keyed method gets a
// new key for each call. A key does not make a method repeatable; its .proto,
// or a policy, does.
//
// This is the only way in. A key in a context would leak into the next call.
func WithKey(k idempotency.Key) grpc.CallOption { return keyOption{key: k} }

// callOptions is what the options of one call say, with those that Belay has to
// handle itself taken out of the list.
type callOptions struct {
	override *policy.Policy
	key      *idempotency.Key // the caller's, then the call's; nil when it carries none
	user     *userTargets     // nil when the caller gave none, as most do
}

// userTargets are the caller's options that write through pointers, or run,
// once per call. Attempts get private ones, so that a dead attempt never shows
// and two can never race; the deciding attempt's values are copied at the end.
type userTargets struct {
	headers  []grpc.HeaderCallOption
	trailers []grpc.TrailerCallOption
	peers    []grpc.PeerCallOption
	finishes []grpc.OnFinishCallOption
}

// split takes our options and the caller's targets out of opts, and appends
// the others to rest. Most calls carry none of these, and then nothing is allocated.
func (c *callOptions) split(opts, rest []grpc.CallOption) (others []grpc.CallOption, noRetry bool) {
	for _, o := range opts {
		switch o := o.(type) {
		case overrideOption:
			p := o.policy
			if c.override != nil {
				p = p.Over(*c.override) // the later option goes over the earlier
			}
			c.override = &p
		case noRetryOption:
			noRetry = true
		case keyOption:
			key := o.key
			c.key = &key
		case grpc.HeaderCallOption:
			u := c.targets()
			u.headers = append(u.headers, o)
		case grpc.TrailerCallOption:
			u := c.targets()
			u.trailers = append(u.trailers, o)
		case grpc.PeerCallOption:
			u := c.targets()
			u.peers = append(u.peers, o)
		case grpc.OnFinishCallOption:
			u := c.targets()
			u.finishes = append(u.finishes, o)
		default:
			rest = append(rest, o)
		}
	}
	return rest, noRetry
}

func (c *callOptions) targets() *userTargets {
	if c.user == nil {
		c.user = &userTargets{}
	}
	return c.user
}

// deliver copies what gRPC wrote about the deciding attempt to where the
// caller wants it.
func (u *userTargets) deliver(a *attempt) {
	if u == nil {
		return
	}
	for _, o := range u.headers {
		*o.HeaderAddr = a.header
	}
	for _, o := range u.trailers {
		*o.TrailerAddr = a.trailer
	}
	for _, o := range u.peers {
		if a.peer.Addr != nil {
			*o.PeerAddr = a.peer
		}
	}
}

// finish runs the caller's OnFinish options, once for the whole call.
func (u *userTargets) finish(err error) {
	if u == nil {
		return
	}
	for _, o := range u.finishes {
		o.OnFinish(err)
	}
}
