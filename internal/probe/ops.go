package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// Op is one thing that a stream's handler does. A list of them reads as the
// server's column in a table of cases: Recv(1), Send(2), Fail(…).
type Op struct {
	name string
	run  func(*streamRun) error
}

// String returns the op as it is written, for a failing row's message.
func (o Op) String() string { return o.name }

// Send sends n responses. Their index goes on from the last one sent.
func Send(n int) Op {
	return Op{fmt.Sprintf("Send(%d)", n), func(r *streamRun) error {
		for range n {
			if err := r.send(); err != nil {
				return err
			}
		}
		return nil
	}}
}

// Recv receives n requests and fails the stream when the client sends fewer. A
// server stream has exactly one.
func Recv(n int) Op {
	return Op{fmt.Sprintf("Recv(%d)", n), func(r *streamRun) error {
		for i := range n {
			switch err := r.recv(); {
			case errors.Is(err, io.EOF):
				return status.Errorf(codes.Internal, "probe: Recv(%d): the client had sent %d and closed", n, i)
			case err != nil:
				return err
			}
		}
		return nil
	}}
}

// RecvAll receives until the client closes its side.
func RecvAll() Op {
	return Op{"RecvAll()", func(r *streamRun) error {
		for {
			switch err := r.recv(); {
			case errors.Is(err, io.EOF):
				return nil
			case err != nil:
				return err
			}
		}
	}}
}

// Echo answers every request with one response until the client closes its side.
func Echo() Op {
	return Op{"Echo()", func(r *streamRun) error {
		for {
			switch err := r.recv(); {
			case errors.Is(err, io.EOF):
				return nil
			case err != nil:
				return err
			}
			if err := r.send(); err != nil {
				return err
			}
		}
	}}
}

// Header sends the response headers now, with pairs of key and value added.
func Header(pairs ...string) Op {
	return Op{fmt.Sprintf("Header(%q)", pairs), func(r *streamRun) error {
		return r.stream.SendHeader(metadata.Pairs(pairs...))
	}}
}

// Sleep waits, and fails the stream if its context ends meanwhile.
func Sleep(d time.Duration) Op {
	return Op{fmt.Sprintf("Sleep(%v)", d), func(r *streamRun) error {
		return (&Step{Delay: d}).wait(r.ctx)
	}}
}

// Hang blocks until the stream's context ends.
func Hang() Op {
	return Op{"Hang()", func(r *streamRun) error { return hang(r.ctx) }}
}

// Fail ends the stream with a status. What follows it is not run.
func Fail(code codes.Code, message string) Op {
	return Op{fmt.Sprintf("Fail(%v, %q)", code, message), func(*streamRun) error {
		return status.Error(code, message)
	}}
}

// streamRun is the run of a stream's handler. Used by one goroutine.
type streamRun struct {
	*run

	stream grpc.ServerStream

	// unread is a server stream's request, which the generated code has already
	// received: the first recv returns it, and nothing comes after it.
	unread *probev1.Request

	last           *probev1.Request // nil before the first recv
	received, sent uint64
}

// recv receives the next request into last; io.EOF when there are no more.
func (r *streamRun) recv() error {
	switch {
	case r.kind.clientStreams:
		req := new(probev1.Request)
		if err := r.stream.RecvMsg(req); err != nil {
			return err
		}
		r.last = req
	case r.unread != nil:
		r.last, r.unread = r.unread, nil
	default:
		return io.EOF
	}
	r.received++
	r.server.history.received(r.entry, r.last)
	return nil
}

func (r *streamRun) send() error {
	r.sent++
	if err := r.stream.SendMsg(r.response(r.last, r.sent, r.received)); err != nil {
		return err
	}
	r.server.history.sent(r.entry)
	return nil
}

// hang blocks until ctx ends and returns its error as a status.
func hang(ctx context.Context) error {
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}
