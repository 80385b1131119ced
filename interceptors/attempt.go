package interceptors

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/interceptors/policy"
)

// attempt is one attempt under way.
type attempt struct {
	*targets

	early   bool // its timeout is the call's deadline, told a little early
	start   time.Time
	delay   time.Duration   // the wait before it
	timeout time.Duration   // its own; 0 without one
	ctx     context.Context //nolint:containedctx // an attempt is its context
	cancel  context.CancelFunc
	span    trace.Span
	permit  breakerPermit

	stream *streamAttempt    // nil for a unary call
	opts   []grpc.CallOption // the call's options and then the private targets
}

// targets are where gRPC writes what is known of an attempt. Each attempt has its
// own, so what a dead one left behind is never taken for the living one's, and
// nothing can write to them twice. They are never used again: an inner interceptor
// may keep the options that it was given.
type targets struct {
	// A stream's are copied here when it is judged; see streamAttempt.
	header, trailer metadata.MD
	peer            peer.Peer

	// finishes counts the runs of OnFinish, one however the attempt ends once
	// gRPC has seen it, more where an inner interceptor retries.
	finishes atomic.Int32

	room [6]grpc.CallOption // where opts live, as far as they fit
}

// newAttempt returns an attempt with its targets.
func newAttempt() *attempt {
	both := &struct {
		attempt attempt
		targets targets
	}{}
	both.attempt.targets = &both.targets
	return &both.attempt
}

// privateTargets is how many options target adds.
const privateTargets = 4

// target appends the private targets to opts, which lives in a.room if it fits.
func (a *attempt) target(opts []grpc.CallOption) {
	header, trailer, from, finish := &a.header, &a.trailer, &a.peer, a.onFinish
	if a.stream != nil {
		header, trailer, from, finish = &a.stream.header, &a.stream.trailer, &a.stream.peer, a.stream.onFinish
	}
	opts = append(opts, grpc.Header(header), grpc.Trailer(trailer), grpc.Peer(from), grpc.OnFinish(finish))
	// Clipped, so that an inner interceptor's append makes a copy.
	a.opts = slices.Clip(opts)
}

func (t *targets) onFinish(error) { t.finishes.Add(1) }

// finished reports whether gRPC has seen the attempt, and its end.
func (a *attempt) finished() bool { return a.finishes.Load() > 0 }

// expired reports whether it was the attempt's own time that ended it.
func (a *attempt) expired(ran time.Duration) bool {
	if a.stream != nil {
		return a.stream.cut
	}
	return a.timeout > 0 && ran >= a.timeout && a.ctx.Err() != nil
}

// neverSent reports whether it is certain that no stream was made for the
// attempt: gRPC finished it, and it never had a peer. Where gRPC may have made
// attempts of its own below, the last of which is all that shows, it is not.
func (a *attempt) neverSent(nativeRetries bool) bool {
	return a.finished() && a.peer.Addr == nil && !nativeRetries
}

// said returns the one value that the peer's trailer has under a key. Two
// values are no value: they were not written by one Belay server.
func (a *attempt) said(key string) string {
	if v := a.trailer[key]; len(v) == 1 {
		return v[0]
	}
	return ""
}

// executed is what is known of the attempt's effect.
func (a *attempt) executed(err error, notSent, local bool) Executed {
	switch a.said(MetadataExecuted) {
	case "no":
		return No
	case "yes":
		return Yes
	case "maybe":
		return Maybe
	}
	switch {
	case err == nil:
		return Yes
	case notSent:
		return No
	case local && a.header == nil:
		return No // refused on the way out
	case local:
		return Yes // refused on the way in: the answer was made
	}
	return Maybe
}

// origin says who made the answer.
func (a *attempt) origin(notSent, local bool) Origin {
	switch {
	case local:
		return OriginLocal
	case notSent || len(a.trailer) == 0 && len(a.header) == 0:
		return OriginTransport
	}
	for _, md := range []metadata.MD{a.trailer, a.header} {
		if ct := md["content-type"]; len(ct) > 0 && !strings.HasPrefix(ct[0], "application/grpc") {
			return OriginProxy
		}
	}
	return OriginPeer
}

// madeHere recognises errors of gRPC's own client code, by what is missing
// around them: every status that a server sends comes with a trailer.
//
//   - RESOURCE_EXHAUSTED: the message is above a size limit of this side.
//   - INTERNAL: the request cannot be encoded. Whether it can is tried, as
//     the connection's protocol errors look the same.
func (a *attempt) madeHere(code codes.Code, req any) bool {
	if len(a.trailer) != 0 || !a.finished() {
		return false
	}
	switch code {
	case codes.ResourceExhausted:
		return true
	case codes.Internal:
		m, ok := req.(proto.Message)
		if !ok || a.header != nil {
			return false
		}
		_, err := proto.Marshal(m)
		return err != nil
	default:
		return false
	}
}

// report gives the breaker's permit back. Only the first does.
func (a *attempt) report(health policy.Health, ran time.Duration, now time.Time) {
	var outcome breaker.Outcome
	switch health {
	case policy.Healthy:
		outcome = breaker.Success
	case policy.Unhealthy:
		outcome = breaker.Failure
	default:
		outcome = breaker.Neutral
	}
	if done := a.permit.done; done != nil {
		a.permit.done = nil
		done(outcome, ran)
		return
	}
	a.permit.belay.DoneAt(outcome, ran, now)
}

// end releases what the attempt holds.
func (a *attempt) end(code codes.Code, message string) {
	if a.stream != nil && a.stream.timer != nil {
		a.stream.timer.Stop()
	}
	if a.cancel != nil {
		a.cancel()
		a.cancel = nil
	}
	endSpan(a.span, code, message)
	a.span = nil
}

// retryInfo reads the delay of a google.rpc.RetryInfo detail; of several, the
// longest. A negative one asks for nothing (AsDuration saturates, so an enormous
// one stays enormous).
func retryInfo(st *status.Status) (delay time.Duration, given bool) {
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok && info.GetRetryDelay() != nil {
			delay, given = max(delay, info.GetRetryDelay().AsDuration()), true
		}
	}
	return delay, given
}
