package main

import (
	"context"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The stream races receive the messages of a server stream; one operation is one
// message. In "no-op" the stream below the interceptor does nothing, so that
// nothing hides what is added to a message; "loopback" is a real one.

func streamRaces() []race {
	return []race{
		{what: "stream-message", name: "no-op", base: bare, contestants: []contestant{
			{bare, messages(noStreamInterceptor)},
			{belay, messages(belayStream)},
			{middleware, messages(middlewareStream)},
		}},
		{what: "stream-message", name: "loopback", base: bare, contestants: []contestant{
			{bare, rpcs(withoutSuite, receiveMessages)},
			{belay, rpcs(belaySuite, receiveMessages)},
			{middleware, rpcs(middlewareSuite, receiveMessages)},
		}},
	}
}

func receiveMessages(client probev1.ProbeServiceClient, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	stream, err := client.ServerStream(ctx, &probev1.Request{Text: "hello", Number: int64(n)})
	if err != nil {
		return err
	}
	return receive(stream, &probev1.Response{}, n)
}

func receive(stream grpc.ClientStream, msg *probev1.Response, n int) error {
	for range n {
		if err := stream.RecvMsg(msg); err != nil {
			return err
		}
	}
	return nil
}

func noStreamInterceptor() (grpc.StreamClientInterceptor, error) {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		return streamer(ctx, desc, cc, method, opts...)
	}, nil
}

func belayStream() (grpc.StreamClientInterceptor, error) {
	client, err := interceptors.NewClient()
	if err != nil {
		return nil, err
	}
	return client.Stream(), nil
}

func middlewareStream() (grpc.StreamClientInterceptor, error) {
	return retry.StreamClientInterceptor(middlewareOptions()...), nil
}

// messages is a subject whose goroutines each have a stream of their own.
func messages(build func() (grpc.StreamClientInterceptor, error)) func() (subject, error) {
	return func() (subject, error) {
		through, err := build()
		if err != nil {
			return subject{}, err
		}
		cc, err := grpc.NewClient("passthrough:///bench", grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return subject{}, err
		}
		return subject{worker: func() worker { return receiver(through, cc) }, close: cc.Close}, nil
	}
}

func receiver(through grpc.StreamClientInterceptor, cc *grpc.ClientConn) worker {
	desc := &grpc.StreamDesc{StreamName: "ServerStream", ServerStreams: true}
	return func(n int) error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		stream, err := through(ctx, desc, cc, probev1.ProbeService_ServerStream_FullMethodName, openNothing, grpc.StaticMethod())
		if err != nil {
			return err
		}
		if err := stream.SendMsg(&probev1.Request{}); err != nil {
			return err
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		return receive(stream, &probev1.Response{}, n)
	}
}

func openNothing(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return nothing{ctx}, nil
}

// nothing is a stream whose messages are all empty.
type nothing struct {
	ctx context.Context //nolint:containedctx // gRPC's interface has it so
}

func (nothing) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (nothing) Trailer() metadata.MD         { return nil }
func (nothing) CloseSend() error             { return nil }
func (s nothing) Context() context.Context   { return s.ctx }
func (nothing) SendMsg(any) error            { return nil }
func (nothing) RecvMsg(any) error            { return nil }
