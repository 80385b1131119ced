package probe

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// pushbackKey is the trailer in which a server says when, or whether, to retry
// (gRFC A6).
const pushbackKey = "grpc-retry-pushback-ms"

// Step is what one run of a handler does, in this order: it sets Header and
// Trailer, waits for Delay, runs Ops (streams only), and then ends in exactly
// one way: Panic, Hang, Do, or with Code.
//
// The zero value succeeds at once: a unary call is answered; a server stream
// sends as many responses as the request's number says; a client stream is read
// to its end and answered; a bidi stream is echoed.
type Step struct {
	// Code, Message and Details are the status that the handler returns. A zero
	// Code succeeds; an empty Message names the code.
	Code    codes.Code
	Message string
	Details []proto.Message

	// RetryInfo, if not nil, adds a google.rpc.RetryInfo to the details. Needs a
	// Code.
	RetryInfo *time.Duration

	// Pushback, if not empty, is sent as it stands in the trailer
	// grpc-retry-pushback-ms, so that a test can send nonsense.
	Pushback string

	// Header and Trailer are set, not flushed: they leave with the first
	// message or with the status. Their keys are lower case.
	Header, Trailer metadata.MD

	// Delay is slept first. The handler gives up when its context ends, as a
	// well-behaved one does, unless Deaf.
	Delay time.Duration

	// Deaf makes Delay ignore the end of the context: the handler that works on
	// for nobody.
	Deaf bool

	// LoseReply lets the handler succeed and turns its reply into UNAVAILABLE
	// outside of every other interceptor: the effect is done and the caller does
	// not know. Needs [LoseReplies], which [Start] installs.
	LoseReply bool

	// Hang blocks until the handler's context ends.
	Hang bool

	// Panic panics with a value that names the method.
	Panic bool

	// Do is a handler of the test's own, for unary methods.
	Do func(context.Context, *probev1.Request) (*probev1.Response, error)

	// Ops is what a stream does before it ends.
	Ops []Op
}

// check reports a step that cannot mean what its author hopes: a field that
// this kind of method ignores, or two ways to end.
func (s *Step) check(k kind) error {
	var ways []string
	for _, way := range []struct {
		name string
		set  bool
	}{
		{"Code", s.Code != codes.OK},
		{"Hang", s.Hang},
		{"Panic", s.Panic},
		{"Do", s.Do != nil},
	} {
		if way.set {
			ways = append(ways, way.name)
		}
	}

	switch {
	case len(ways) > 1:
		return fmt.Errorf("ends in more than one way: %v", ways)
	case s.Do != nil && k != unary:
		return errors.New("has Do, which only unary methods call")
	case s.Ops != nil && k == unary:
		return errors.New("has Ops, which only streams run")
	case s.LoseReply && len(ways) == 1 && s.Do == nil:
		return fmt.Errorf("has LoseReply and %s: only a success can be lost", ways[0])
	case s.Code == codes.OK && (s.Message != "" || s.Details != nil || s.RetryInfo != nil):
		return errors.New("has Message, Details or RetryInfo without a Code")
	case s.Deaf && s.Delay <= 0:
		return errors.New("has Deaf without a Delay")
	case s.Delay < 0:
		return fmt.Errorf("has a negative Delay %v", s.Delay)
	}
	return nil
}

// succeeds reports whether the step's end is a plain success.
func (s *Step) succeeds() bool {
	return s.Code == codes.OK && !s.Hang && !s.Panic
}

// wait sleeps for Delay.
func (s *Step) wait(ctx context.Context) error {
	switch {
	case s.Delay == 0:
		return nil
	case s.Deaf:
		time.Sleep(s.Delay)
		return nil
	}
	timer := time.NewTimer(s.Delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// err returns the status error of a step with a Code, nil without one.
func (s *Step) err() error {
	if s.Code == codes.OK {
		return nil
	}
	message := s.Message
	if message == "" {
		message = "scripted " + s.Code.String()
	}
	st := &spb.Status{Code: int32(s.Code), Message: message} //nolint:gosec // gRPC's codes are small

	details := s.Details
	if s.RetryInfo != nil {
		details = append(slices.Clip(details), &errdetails.RetryInfo{RetryDelay: durationpb.New(*s.RetryInfo)})
	}
	for _, d := range details {
		packed, err := anypb.New(d)
		if err != nil {
			return status.Errorf(codes.Internal, "probe: detail %T cannot be packed: %v", d, err)
		}
		st.Details = append(st.Details, packed)
	}
	return status.ErrorProto(st)
}

// trailer returns the trailer with the pushback in it.
func (s *Step) trailer() metadata.MD {
	if s.Pushback == "" {
		return s.Trailer
	}
	return metadata.Join(s.Trailer, metadata.Pairs(pushbackKey, s.Pushback))
}
