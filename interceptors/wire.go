package interceptors

import (
	"strconv"
	"time"

	"google.golang.org/grpc/metadata"
)

// Metadata that Belay reads and writes. Everything here is hop-scoped: a server
// speaks for itself only, and nothing is forwarded.
const (
	// MetadataKey carries the idempotency key of a request.
	MetadataKey = "idempotency-key"

	// MetadataFirstSent is when the key was first sent: RFC 3339, UTC.
	MetadataFirstSent = "idempotency-first-sent"

	// MetadataStatus tells how a keyed call was answered: executed, replayed,
	// joined, ignored or unrecorded. Header and trailer on OK, trailer on errors.
	MetadataStatus = "idempotency-status"

	// MetadataExecuted is a trailer: no, maybe or yes. It is only ever set by
	// the Belay server that answers.
	MetadataExecuted = "belay-executed"

	// MetadataReason is a trailer that names a refusal of Belay's own, such as
	// IN_FLIGHT. The ErrorInfo detail of the same name is for people: details
	// are forwarded by handlers that return a downstream error, trailers are not.
	// DEADLINE is no refusal of a key: it says that a DEADLINE_EXCEEDED is about
	// the deadline that this server was given, not one of its own making.
	MetadataReason = "belay-reason"

	// metadataPushback and metadataAttempts are gRFC A6's.
	metadataPushback = "grpc-retry-pushback-ms"
	metadataAttempts = "grpc-previous-rpc-attempts"
)

// reasonDeadline is MetadataReason of a call that its own deadline ended.
const reasonDeadline = "DEADLINE"

// pushback is a server's word on the next attempt: gRFC A6, "Pushback".
type pushback struct {
	given bool
	stop  bool
	delay time.Duration
}

// readPushback reads the value from a trailer. More than one value, and one
// that is not a canonical 32-bit decimal, mean "do not retry", as A6 says.
func readPushback(trailer metadata.MD) pushback {
	values := trailer[metadataPushback]
	if len(values) == 0 {
		return pushback{}
	}
	if len(values) > 1 {
		return pushback{given: true, stop: true}
	}
	ms, err := strconv.ParseInt(values[0], 10, 32)
	if err != nil || ms < 0 || strconv.FormatInt(ms, 10) != values[0] {
		return pushback{given: true, stop: true}
	}
	return pushback{given: true, delay: time.Duration(ms) * time.Millisecond}
}

// stronger returns the one of two wishes that a server may speak: any "stop"
// wins, else the longer delay.
func (p pushback) stronger(q pushback) pushback {
	switch {
	case !p.given:
		return q
	case !q.given, p.stop:
		return p
	case q.stop || q.delay > p.delay:
		return q
	}
	return p
}

// value is the trailer's form. Delays are rounded up: coming back early is what
// the server asked not to be done.
func (p pushback) value() string {
	if p.stop {
		return "-1"
	}
	ms := p.delay / time.Millisecond
	if p.delay%time.Millisecond > 0 { // not rounded up by adding first: "for ever" would overflow
		ms++
	}
	return strconv.FormatInt(min(int64(ms), 1<<31-1), 10)
}
