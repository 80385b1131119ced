package main

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The dedupe races call the server's inner half as gRPC does, with a transport
// stream for the metadata that it sets. The bare call puts the same metadata
// into the context and calls the handler.

func dedupeRaces() []race {
	return []race{
		dedupeRace("flat8", flatRequest, freshKeys),
		dedupeRace("map20", mapRequest, freshKeys),
		dedupeRace("flat8-replay", flatRequest, oneKey),
	}
}

func dedupeRace(name string, request func() *probev1.Request, key keys) race {
	return race{what: "dedupe-memory", name: name, base: bare, contestants: []contestant{
		{bare, keyedCalls(handlerOnly, request, key)},
		{belay, keyedCalls(withDedupe, request, key)},
	}}
}

// flatRequest has eight fields, none of them a message or a map.
func flatRequest() *probev1.Request {
	return &probev1.Request{
		RequestId: "order-4711", Text: "a charge for one order", Number: 1299, Payload: []byte("0123456789abcdef"),
		Ratio: 0.19, Color: probev1.Color_COLOR_BLUE, Numbers: []int32{1, 2, 3}, Names: []string{"anna", "bert"},
	}
}

// mapRequest has a map with twenty entries.
func mapRequest() *probev1.Request {
	req := &probev1.Request{Text: "a charge for one order", ClientTime: timestamppb.New(time.Unix(1, 0)), Labels: map[string]string{}}
	for i := range 20 {
		req.Labels[fmt.Sprintf("label-%02d", i)] = "value " + strconv.Itoa(i)
	}
	return req
}

// keys yields the key of each call of one goroutine.
type keys func() func() string

//nolint:gochecknoglobals // tells goroutines' keys apart
var lastGoroutine atomic.Int64

func freshKeys() func() string {
	prefix := "key-of-goroutine-" + strconv.FormatInt(lastGoroutine.Add(1), 10) + "-"
	n := 0
	return func() string {
		n++
		return prefix + strconv.Itoa(n)
	}
}

func oneKey() func() string {
	key := freshKeys()()
	return func() string { return key }
}

func handlerOnly() (grpc.UnaryServerInterceptor, error) {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		return handler(ctx, req)
	}, nil
}

func withDedupe() (grpc.UnaryServerInterceptor, error) {
	server, err := newDedupeServer()
	if err != nil {
		return nil, err
	}
	return server.UnaryDedupe(), nil
}

func keyedCalls(build func() (grpc.UnaryServerInterceptor, error), request func() *probev1.Request, keys keys) func() (subject, error) {
	return func() (subject, error) {
		through, err := build()
		if err != nil {
			return subject{}, err
		}
		return subject{worker: func() worker { return keyedCaller(through, request(), keys()) }}, nil
	}
}

func keyedCaller(through grpc.UnaryServerInterceptor, req *probev1.Request, nextKey func() string) worker {
	info := &grpc.UnaryServerInfo{FullMethod: probev1.ProbeService_Keyed_FullMethodName}
	resp := &probev1.Response{Text: "charged", Execution: 1}
	handler := func(context.Context, any) (any, error) { return resp, nil } //nolint:unparam // it is gRPC's type
	base := grpc.NewContextWithServerTransportStream(context.Background(), transportStream{})
	firstSent := idempotency.FormatFirstSent(time.Now())
	return func(n int) error {
		for range n {
			ctx := metadata.NewIncomingContext(base, metadata.MD{
				interceptors.MetadataKey: {nextKey()}, interceptors.MetadataFirstSent: {firstSent},
			})
			if _, err := through(ctx, req, info, handler); err != nil {
				return err
			}
		}
		return nil
	}
}

// transportStream takes the metadata that a server sets and forgets it.
type transportStream struct{}

func (transportStream) Method() string               { return probev1.ProbeService_Keyed_FullMethodName }
func (transportStream) SetHeader(metadata.MD) error  { return nil }
func (transportStream) SendHeader(metadata.MD) error { return nil }
func (transportStream) SetTrailer(metadata.MD) error { return nil }
