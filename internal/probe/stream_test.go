package probe_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// talk runs one stream of any kind: it sends the texts, closes its side, and
// reads to the end. What came back is written as "index/received:text".
func talk(ctx context.Context, t *testing.T, conn *grpc.ClientConn, method string, number int64, texts ...string) ([]string, error) {
	t.Helper()
	// A descriptor that streams both ways reads and writes any kind by hand.
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	stream, err := conn.NewStream(ctx, desc, method)
	if err != nil {
		return nil, err
	}
	for _, text := range texts {
		// EOF says that the stream is over: the reason comes with RecvMsg.
		if err := stream.SendMsg(&probev1.Request{Text: text, Number: number}); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return nil, err
	}
	var got []string
	for {
		resp := new(probev1.Response)
		switch err := stream.RecvMsg(resp); {
		case errors.Is(err, io.EOF):
			return got, nil
		case err != nil:
			return got, err
		}
		got = append(got, fmt.Sprintf("%d/%d:%s", resp.GetIndex(), resp.GetReceived(), resp.GetText()))
	}
}

func TestStreams(t *testing.T) {
	for _, c := range []struct {
		name     string
		method   string
		step     probe.Step
		number   int64
		send     []string
		want     []string
		code     codes.Code
		received int
	}{
		{
			name: "server stream by default", method: probe.ServerStream,
			number: 3, send: []string{"a"}, want: []string{"1/1:a", "2/1:a", "3/1:a"}, received: 1,
		},
		{
			name: "undeclared server stream by default", method: probe.ServerStreamUndeclared,
			number: 1, send: []string{"a"}, want: []string{"1/1:a"}, received: 1,
		},
		{
			name: "client stream by default", method: probe.ClientStream,
			send: []string{"a", "b", "c"}, want: []string{"1/3:c"}, received: 3,
		},
		{
			name: "keyed client stream by default", method: probe.ClientStreamKeyed,
			send: []string{"a"}, want: []string{"1/1:a"}, received: 1,
		},
		{
			name: "bidi by default", method: probe.Bidi,
			send: []string{"a", "b"}, want: []string{"1/1:a", "2/2:b"}, received: 2,
		},
		{
			name: "fails before any message", method: probe.ServerStream,
			step: probe.Step{Code: codes.Unavailable}, number: 3, send: []string{"a"}, code: codes.Unavailable,
		},
		{
			name: "fails half-way", method: probe.ServerStream,
			step: probe.Step{Ops: []probe.Op{probe.Recv(1), probe.Send(2)}, Code: codes.Unavailable},
			send: []string{"a"}, want: []string{"1/1:a", "2/1:a"}, code: codes.Unavailable, received: 1,
		},
		{
			name: "sends before it reads", method: probe.Bidi,
			step: probe.Step{Ops: []probe.Op{probe.Send(1), probe.Recv(2), probe.Send(1), probe.RecvAll()}},
			send: []string{"a", "b", "c"}, want: []string{"1/0:", "2/2:b"}, received: 3,
		},
		{
			name: "fails by an op, which ends it", method: probe.Bidi,
			step: probe.Step{Ops: []probe.Op{probe.Recv(1), probe.Fail(codes.Aborted, "no"), probe.Send(1)}},
			send: []string{"a"}, code: codes.Aborted, received: 1,
		},
		{
			name: "wants more than comes", method: probe.ClientStream,
			step: probe.Step{Ops: []probe.Op{probe.Recv(3)}},
			send: []string{"a", "b"}, code: codes.Internal, received: 2,
		},
		{
			name: "a server stream has one request", method: probe.ServerStream,
			step: probe.Step{Ops: []probe.Op{probe.Recv(2)}},
			send: []string{"a"}, code: codes.Internal, received: 1,
		},
		{
			name: "reply of a client stream is lost", method: probe.ClientStream,
			step: probe.Step{LoseReply: true},
			send: []string{"a"}, want: []string{"1/1:a"}, code: codes.Unavailable, received: 1,
		},
		{
			name: "panics half-way", method: probe.Bidi,
			step: probe.Step{Ops: []probe.Op{probe.Recv(1), probe.Send(1)}, Panic: true},
			send: []string{"a"}, want: []string{"1/1:a"}, code: codes.Internal, received: 1,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conn, srv := probe.Start(t)
				srv.Script(c.method, c.step)
				got, err := talk(t.Context(), t, conn, c.method, c.number, c.send...)
				if status.Code(err) != c.code {
					t.Errorf("ended with %v, want %v", err, c.code)
				}
				if diff := cmp.Diff(c.want, got); diff != "" {
					t.Errorf("messages (-want +got):\n%s", diff)
				}
				synctest.Wait()
				entry := srv.Seen(c.method)[0]
				if entry.Received != c.received || entry.Sent != len(c.want) || !entry.Ended {
					t.Errorf("the handler received %d, sent %d, ended: %t; want %d, %d, true", entry.Received, entry.Sent, entry.Ended, c.received, len(c.want))
				}
				if !slices.Equal(c.send[:c.received], entry.Texts) {
					t.Errorf("texts received %q, want %q", entry.Texts, c.send[:c.received])
				}
			})
		})
	}
}

func TestStreamHeaderAndSleepAreSeenAtTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, srv := probe.Start(t)
		srv.Script(probe.Bidi, probe.Step{Ops: []probe.Op{
			probe.Sleep(time.Second), probe.Header("h", "early"), probe.Sleep(2 * time.Second), probe.Send(1),
		}})
		start := time.Now()
		stream, err := probev1.NewProbeServiceClient(conn).Bidi(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		header, err := stream.Header()
		if err != nil || !cmp.Equal(header.Get("h"), []string{"early"}) || time.Since(start) != time.Second {
			t.Errorf("header %v, %v after %v; want h=early after exactly 1s", header, err, time.Since(start))
		}
		if _, err := stream.Recv(); err != nil || time.Since(start) != 3*time.Second {
			t.Errorf("message: %v after %v, want after exactly 3s", err, time.Since(start))
		}
		if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("end: %v, want EOF", err)
		}
	})
}

func TestStreamHangsUntilCancelled(t *testing.T) {
	for _, step := range []probe.Step{
		{Ops: []probe.Op{probe.Send(1), probe.Hang()}},
		{Ops: []probe.Op{probe.Send(1)}, Hang: true},
	} {
		synctest.Test(t, func(t *testing.T) {
			conn, srv := probe.Start(t)
			srv.Script(probe.Bidi, step)
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Minute, cancel)
			got, err := talk(ctx, t, conn, probe.Bidi, 0)
			if status.Code(err) != codes.Canceled || len(got) != 1 {
				t.Errorf("got %q, %v; want one message, then CANCELED", got, err)
			}
			synctest.Wait()
			if entry := srv.Seen()[0]; entry.CtxErr == nil || entry.Took != time.Minute {
				t.Errorf("entry %+v; want ended by its context after exactly 1m", entry)
			}
		})
	}
}

func TestOpNames(t *testing.T) {
	ops := []probe.Op{
		probe.Send(2), probe.Recv(1), probe.RecvAll(), probe.Echo(), probe.Header("k", "v"),
		probe.Sleep(time.Second), probe.Hang(), probe.Fail(codes.Aborted, "m"),
	}
	want := `[Send(2) Recv(1) RecvAll() Echo() Header(["k" "v"]) Sleep(1s) Hang() Fail(Aborted, "m")]`
	if got := fmt.Sprint(ops); got != want {
		t.Errorf("ops print as %s, want %s", got, want)
	}
}
