package interceptors

import (
	"context"
	"reflect"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

func (c *Client) unaryInterceptor(bundled bool) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, fullMethod string, req, reply any, cc *grpc.ClientConn,
		invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		set, m := c.methodOf(fullMethod)
		if m.exempt {
			return invoke(ctx, fullMethod, req, reply, cc, opts...)
		}
		call := calls.Get().(*call) //nolint:forcetypeassert // the pool holds nothing else
		call.client, call.channel, call.cc, call.method, call.bundled = c, c.channelOf(cc), cc, m, bundled
		return call.unary(ctx, set, req, reply, invoke, opts)
	}
}

// calls are the records of unary calls that have ended, zero, to be used again.
var calls = sync.Pool{New: func() any { return new(call) }}

// release gives the record of a call back that was made on the caller's goroutine
// alone: nobody has it any more. Inner interceptors know its attempts' targets, and
// the error what became of the attempts; the losers of a race know the record.
func (c *call) release() {
	*c = call{}
	calls.Put(c)
}

// unary is the whole of a unary call: open, then attempts until one decides.
func (c *call) unary(ctx context.Context, set *policySet, req, reply any, invoke grpc.UnaryInvoker,
	opts []grpc.CallOption,
) (err error) {
	err = c.open(ctx, set, req, opts)
	if c.cancel != nil {
		defer c.cancel()
	}
	if err == nil {
		err = c.attemptUntilDecided(reply, invoke) //nolint:contextcheck // c.ctx is made of ctx
	}
	c.user.finish(err)
	if !c.hedges {
		c.release()
	}
	return err
}

func (c *call) attemptUntilDecided(reply any, invoke grpc.UnaryInvoker) error {
	poll := false
	for {
		permit, err := c.admit()
		if err != nil {
			return err
		}
		a := c.begin(permit, poll, nil)
		if c.total > 1 {
			reset(reply)
		}
		a, v, err := c.try(a, reply, invoke)
		if err == nil {
			c.succeed(a)
			c.user.deliver(a)
			c.finish(NotStopped, nil, int(c.total))
			return nil
		}
		c.settle(v.Decision, v.notSent)
		if err := c.next(v.Decision); err != nil {
			return err
		}
		poll = v.Poll
	}
}

// try makes an attempt, with hedges beside it where they are allowed, and
// returns the one that decided.
func (c *call) try(a *attempt, reply any, invoke grpc.UnaryInvoker) (*attempt, verdict, error) {
	if delay, ok := c.hedgeDelay(); ok {
		return c.race(a, reply, delay, invoke)
	}
	err := c.invoke(a, reply, invoke)
	if err == nil {
		return a, verdict{}, nil
	}
	d, notSent := c.judge(a, err, false)
	return a, verdict{d, notSent}, err
}

// invoke makes one attempt. A panic of an inner interceptor passes through, and
// takes nothing with it.
func (c *call) invoke(a *attempt, reply any, invoke grpc.UnaryInvoker) error {
	returned := false
	defer func() {
		if !returned {
			c.abandon(a)
		}
	}()
	err := invoke(a.ctx, c.method.full, c.request, reply, c.cc, a.opts...)
	returned = true
	return err
}

// reset clears a reply that an earlier attempt may have half filled: codecs
// other than protobuf's merge into what they find.
func reset(reply any) {
	switch m := reply.(type) {
	case proto.Message:
		proto.Reset(m)
	case interface{ Reset() }:
		m.Reset()
	default:
		if v := reflect.ValueOf(reply); v.Kind() == reflect.Pointer && !v.IsNil() {
			v.Elem().SetZero()
		}
	}
}
