package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/chaos/chaosv1"
	"github.com/belayrpc/belay/examples/chaos/order"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

// callTime bounds one call; a client that gets no verdict calls again with the
// same key, for as long as it takes.
const callTime = 3 * time.Second

// intent is one thing that a client wants done once, and what it was told.
type intent struct {
	key    idempotency.Key
	ending chaosv1.Ending

	mu       sync.Mutex // guards all below
	replies  []reply
	stranded error // an answer that ends the matter without a verdict
	last     error // the last answer that left it open
}

// reply is a verdict that a client was given.
type reply struct {
	token    string // empty for a declined call
	declined bool
	executed bool // by the handler that this very call started
}

func (i *intent) request() *chaosv1.EffectRequest {
	return &chaosv1.EffectRequest{Key: i.key.Value, Ending: i.ending}
}

// settled reports whether a client has a verdict, or knows that there is none.
func (i *intent) settled() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.replies) > 0 || i.stranded != nil
}

// add keeps what a call was told, and reports whether that ends the matter.
func (i *intent) add(resp *chaosv1.EffectResponse, err error, marks ...metadata.MD) bool {
	r := reply{token: resp.GetToken()}
	for _, md := range marks {
		r.executed = r.executed || slices.Contains(md[interceptors.MetadataStatus], "executed")
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	switch code := status.Code(err); {
	case err == nil:
	case code == codes.FailedPrecondition && status.Convert(err).Message() == "declined":
		r.declined = true
	case slices.Contains([]codes.Code{codes.Unavailable, codes.Aborted, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Canceled}, code):
		i.last = err
		return false
	default:
		i.stranded = err
		return true
	}
	i.replies = append(i.replies, r)
	return true
}

// client is one program that calls: a channel to all servers.
type client struct {
	chaosv1.ChaosServiceClient

	conn *grpc.ClientConn
}

func newClient(addrs []string) (*client, error) {
	// Without a breaker: it would keep calls away from servers that fail, and calls
	// to servers that fail are what this is about.
	belay, err := interceptors.NewClient(interceptors.WithoutBreaker())
	if err != nil {
		return nil, err
	}
	servers := manual.NewBuilderWithScheme("chaos")
	var state resolver.State
	for _, a := range addrs {
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: a}}})
	}
	servers.InitialState(state)
	options := append(belay.DialOptions(),
		grpc.WithResolvers(servers),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond}}),
		grpc.WithChainUnaryInterceptor(carryOrder),
	)
	conn, err := grpc.NewClient("chaos:///servers", options...)
	if err != nil {
		return nil, err
	}
	return &client{chaosv1.NewChaosServiceClient(conn), conn}, nil
}

func (c *client) close() { _ = c.conn.Close() } // its only error is that it is closed

// call makes one call and reports whether it ended the matter.
func (c *client) call(ctx context.Context, i *intent) bool {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	var header, trailer metadata.MD
	resp, err := c.Effect(ctx, i.request(), interceptors.WithKey(i.key), grpc.Header(&header), grpc.Trailer(&trailer))
	if errors.Is(ctx.Err(), context.Canceled) && err != nil {
		return false
	}
	return i.add(resp, err, header, trailer)
}

// insist calls until there is a verdict.
func (c *client) insist(ctx context.Context, i *intent) {
	for !c.call(ctx, i) {
		timer := time.NewTimer(10 * time.Millisecond)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// orderKey is the context key of an order that the first attempt carries.
type orderKey struct{}

// onceOrder is an order that has not been sent yet.
type onceOrder struct {
	order order.Order
	sent  atomic.Bool
}

func withOrder(ctx context.Context, o *order.Order) context.Context {
	if o == nil {
		return ctx
	}
	return context.WithValue(ctx, orderKey{}, &onceOrder{order: *o})
}

// carryOrder stands below Belay, so it runs once for each attempt; the order goes
// out with the first, since what is retried is to come through.
func carryOrder(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if o, ok := ctx.Value(orderKey{}).(*onceOrder); ok && o.sent.CompareAndSwap(false, true) {
		ctx = metadata.AppendToOutgoingContext(ctx, order.Metadata, o.order.String())
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}
