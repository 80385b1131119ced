package idempotency

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
)

// ErrorDomain is the domain of every ErrorInfo that Belay writes (AIP-193).
const ErrorDomain = "belay"

// Reason names a refusal. The set is closed but may grow.
type Reason string

// The reasons. Beside each: the code, and what the caller may do.
const (
	// ReasonKeyMissing: INVALID_ARGUMENT; the method requires a key.
	ReasonKeyMissing Reason = "KEY_MISSING"
	// ReasonKeyInvalid: INVALID_ARGUMENT; the key is malformed, there are two,
	// or its first-sent time is malformed or in the future.
	ReasonKeyInvalid Reason = "KEY_INVALID"
	// ReasonKeyConflict: INVALID_ARGUMENT; metadata and request field differ.
	ReasonKeyConflict Reason = "KEY_CONFLICT"
	// ReasonKeyReused: FAILED_PRECONDITION; the key belongs to another request.
	ReasonKeyReused Reason = "KEY_REUSED"
	// ReasonInFlight: ABORTED; the call is being executed. Same key, later.
	ReasonInFlight Reason = "IN_FLIGHT"
	// ReasonWaitersExceeded: RESOURCE_EXHAUSTED; too many calls wait for others,
	// or too many executions use the store. The key is untouched. Later.
	ReasonWaitersExceeded Reason = "WAITERS_EXCEEDED"
	// ReasonStoreFull: RESOURCE_EXHAUSTED; a bounded store takes no new key.
	ReasonStoreFull Reason = "STORE_FULL"
	// ReasonScopeLimit: RESOURCE_EXHAUSTED; Config.Limit said no.
	ReasonScopeLimit Reason = "SCOPE_LIMIT"
	// ReasonStoreUnavailable: UNAVAILABLE; the store did not answer and nothing
	// was executed. Same key, later.
	ReasonStoreUnavailable Reason = "STORE_UNAVAILABLE"
	// ReasonOutcomePending: UNAVAILABLE; the commit's fate is open. Same key, later.
	ReasonOutcomePending Reason = "OUTCOME_PENDING"
	// ReasonOutcomeUnknown: FAILED_PRECONDITION, or ABORTED where records are
	// reconciled; an execution ended without a verdict. Never with a new key.
	ReasonOutcomeUnknown Reason = "OUTCOME_UNKNOWN"
	// ReasonKeyExpired: FAILED_PRECONDITION; the key is too old to be sure.
	ReasonKeyExpired Reason = "KEY_EXPIRED"
	// ReasonKeyCancelled: FAILED_PRECONDITION; the call was cancelled for good.
	ReasonKeyCancelled Reason = "KEY_CANCELLED"
	// ReasonResponseNotRetained: FAILED_PRECONDITION; done, but the reply was
	// too large to keep.
	ReasonResponseNotRetained Reason = "RESPONSE_NOT_RETAINED"
	// ReasonRecordCorrupt: DATA_LOSS; the record cannot be read.
	ReasonRecordCorrupt Reason = "RECORD_CORRUPT"
	// ReasonScopeMissing: UNAUTHENTICATED; the caller has no principal.
	ReasonScopeMissing Reason = "SCOPE_MISSING"
	// ReasonLeaseLost: ABORTED; nothing of this execution was committed. Same
	// key, later.
	ReasonLeaseLost Reason = "LEASE_LOST"
	// ReasonTxConflict: ABORTED; the database refused the commit, nothing
	// happened. Same key, later.
	ReasonTxConflict Reason = "TX_CONFLICT"
	// ReasonNoStore: FAILED_PRECONDITION; the method requires a key and the
	// server has no store.
	ReasonNoStore Reason = "NO_STORE"
	// ReasonCallerGone: CANCELLED or DEADLINE_EXCEEDED; the caller's own context
	// ended while it waited. The execution goes on and is recorded.
	ReasonCallerGone Reason = "CALLER_GONE"
)

// Executed answers: may the effect of this call have happened?
type Executed uint8

// The answers. The zero value is the careful one.
const (
	// ExecutedMaybe: it may have, now or in an earlier attempt.
	ExecutedMaybe Executed = iota
	// ExecutedNo: this attempt provably left no effect.
	ExecutedNo
	// ExecutedYes: it has happened.
	ExecutedYes
)

// String returns "maybe", "no" or "yes", the values of the trailer.
func (e Executed) String() string {
	switch e {
	case ExecutedNo:
		return "no"
	case ExecutedYes:
		return "yes"
	default:
		return "maybe"
	}
}

// Refusal is an answer of Belay's own in place of the handler's. It is an
// error, and Status is its form on the wire.
type Refusal struct { //nolint:errname // it is first an answer, and an error where one is needed
	// Code of the status.
	Code code.Code

	// Reason says why, for programs.
	Reason Reason

	// Message says why, for people. It holds no key, no payload and no text of
	// the store's.
	Message string

	// Executed says whether the effect may have happened.
	Executed Executed

	// RetryAfter is when the same key may be tried again: positive, a delay;
	// negative, never; zero, nothing is said and the code decides.
	RetryAfter time.Duration

	// Metadata of the ErrorInfo detail. May be nil.
	Metadata map[string]string

	// Field, when set, becomes a BadRequest detail about this field.
	Field string

	// Subject, when set, becomes a PreconditionFailure detail of type
	// IDEMPOTENCY_KEY about this subject, which is an ID, never a key.
	Subject string

	// Cause is for logs and never leaves the process. May be nil.
	Cause error
}

// Error returns reason and message, and the cause when there is one.
func (r *Refusal) Error() string {
	if r.Cause != nil {
		return fmt.Sprintf("belay: %s: %s: %v", r.Reason, r.Message, r.Cause)
	}
	return fmt.Sprintf("belay: %s: %s", r.Reason, r.Message)
}

// Unwrap returns the cause.
func (r *Refusal) Unwrap() error { return r.Cause }

// Status returns the google.rpc.Status with its details: ErrorInfo always,
// RetryInfo when a delay is named, BadRequest and PreconditionFailure when they
// have a subject.
func (r *Refusal) Status() *spb.Status {
	st := &spb.Status{Code: int32(r.Code), Message: r.Message}
	add := func(detail proto.Message) {
		// Marshalling fails on invalid UTF-8 only; the answer then goes without
		// this detail, since code, trailers and message still say enough.
		if packed, err := anypb.New(detail); err == nil {
			st.Details = append(st.Details, packed)
		}
	}
	add(&errdetails.ErrorInfo{Reason: string(r.Reason), Domain: ErrorDomain, Metadata: r.Metadata})
	if r.RetryAfter > 0 {
		add(&errdetails.RetryInfo{RetryDelay: durationpb.New(r.RetryAfter)})
	}
	if r.Field != "" {
		add(&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{
			Field: r.Field, Description: r.Message, Reason: string(r.Reason),
		}}})
	}
	if r.Subject != "" {
		add(&errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{{
			Type: "IDEMPOTENCY_KEY", Subject: r.Subject, Description: r.Message,
		}}})
	}
	return st
}

const metadataField = "metadata.idempotency-key"

// RefuseKeyMissing is the answer to a call without a key of a method that
// requires one. Field is where the key belongs; empty means the metadata.
func RefuseKeyMissing(field string) *Refusal {
	if field == "" {
		field = metadataField
	}
	return &Refusal{
		Code: code.Code_INVALID_ARGUMENT, Reason: ReasonKeyMissing, Executed: ExecutedNo, RetryAfter: -1, Field: field,
		Message: "this method requires an idempotency key",
	}
}

// RefuseKeyConflict is the answer to a call whose metadata and request field
// hold different keys: nobody guesses which was meant.
func RefuseKeyConflict(field string) *Refusal {
	return &Refusal{
		Code: code.Code_INVALID_ARGUMENT, Reason: ReasonKeyConflict, Executed: ExecutedNo, RetryAfter: -1, Field: field,
		Message: "the key in the metadata and the key in the request differ",
	}
}

// RefuseNoStore is the answer of a server without a store to a call of a method
// that requires a key: running it would break the promise in the .proto.
func RefuseNoStore() *Refusal {
	return &Refusal{
		Code: code.Code_FAILED_PRECONDITION, Reason: ReasonNoStore, Executed: ExecutedNo, RetryAfter: -1,
		Message: "this method requires an idempotency key and the server keeps no record of them",
	}
}

func refuseKeyInvalid(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_INVALID_ARGUMENT, Reason: ReasonKeyInvalid, Executed: ExecutedNo, RetryAfter: -1,
		Field: metadataField,
		// What Key.Validate and ParseFirstSent say holds no key: safe to send.
		Message:  cause.Error(),
		Metadata: map[string]string{"maxLength": strconv.Itoa(MaxKeyLength)},
	}
}

func refuseScopeMissing(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_UNAUTHENTICATED, Reason: ReasonScopeMissing, Executed: ExecutedNo, RetryAfter: -1, Cause: cause,
		Message: "a keyed call needs an authenticated principal",
	}
}

func refuseScopeLimit(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_RESOURCE_EXHAUSTED, Reason: ReasonScopeLimit, Executed: ExecutedNo, RetryAfter: -1, Cause: cause,
		Message: "the caller's limit of keyed calls is reached",
	}
}

func refuseKeyReused(id ID) *Refusal {
	return &Refusal{
		Code: code.Code_FAILED_PRECONDITION, Reason: ReasonKeyReused, Executed: ExecutedNo, RetryAfter: -1, Subject: id.String(),
		Message: "the idempotency key was used for a different request",
	}
}

func refuseKeyExpired(id ID, window time.Duration) *Refusal {
	return &Refusal{
		// Maybe: an attempt from inside the window may have run and be forgotten.
		Code: code.Code_FAILED_PRECONDITION, Reason: ReasonKeyExpired, Executed: ExecutedMaybe, RetryAfter: -1, Subject: id.String(),
		Message:  "the idempotency key was first sent too long ago",
		Metadata: map[string]string{"acceptWindow": window.String()},
	}
}

func refuseKeyCancelled(id ID) *Refusal {
	return &Refusal{
		Code: code.Code_FAILED_PRECONDITION, Reason: ReasonKeyCancelled, Executed: ExecutedNo, RetryAfter: -1, Subject: id.String(),
		Message: "the call with this idempotency key was cancelled",
	}
}

// refuseInFlight names a delay of up to half a second, jittered so that
// duplicates do not come back together, and no longer than the holder's lease.
func refuseInFlight(left time.Duration) *Refusal {
	delay := jitter(250*time.Millisecond, 500*time.Millisecond)
	if left > 0 {
		delay = max(min(delay, left), minRetryAfter)
	}
	return &Refusal{
		Code: code.Code_ABORTED, Reason: ReasonInFlight, Executed: ExecutedMaybe, RetryAfter: delay,
		Message: "a call with this idempotency key is being executed",
	}
}

func refuseWaitersExceeded(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_RESOURCE_EXHAUSTED, Reason: ReasonWaitersExceeded, Executed: ExecutedMaybe,
		RetryAfter: jitter(250*time.Millisecond, 500*time.Millisecond), Cause: cause,
		Message: "too many keyed calls are waiting",
	}
}

func refuseStoreFull(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_RESOURCE_EXHAUSTED, Reason: ReasonStoreFull, Executed: ExecutedNo, RetryAfter: -1, Cause: cause,
		Message: "the server has no room for another idempotency key",
	}
}

func refuseStoreUnavailable(cause error, executed Executed) *Refusal {
	return &Refusal{
		Code: code.Code_UNAVAILABLE, Reason: ReasonStoreUnavailable, Executed: executed,
		RetryAfter: jitter(minRetryAfter, 200*time.Millisecond), Cause: cause,
		Message:  "the store of idempotency keys is unavailable",
		Metadata: map[string]string{"executed": executed.String()},
	}
}

func refuseOutcomePending(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_UNAVAILABLE, Reason: ReasonOutcomePending, Executed: ExecutedMaybe,
		RetryAfter: jitter(minRetryAfter, 200*time.Millisecond), Cause: cause,
		Message:  "the outcome of the call is not known yet",
		Metadata: map[string]string{"executed": ExecutedMaybe.String()},
	}
}

func refuseOutcomeUnknown(id ID, retryAfter time.Duration) *Refusal {
	r := &Refusal{
		Code: code.Code_FAILED_PRECONDITION, Reason: ReasonOutcomeUnknown, Executed: ExecutedMaybe, RetryAfter: -1, Subject: id.String(),
		Message: "an earlier execution ended without a verdict; do not repeat the call with another key",
		// A new key would turn "maybe once" into "maybe twice".
		Metadata: map[string]string{"newKeySafe": "false"},
	}
	if retryAfter > 0 {
		r.Code, r.RetryAfter = code.Code_ABORTED, jitter(retryAfter, retryAfter+retryAfter/2)
	}
	return r
}

func refuseNotRetained(id ID, original code.Code) *Refusal {
	return &Refusal{
		Code: code.Code_FAILED_PRECONDITION, Reason: ReasonResponseNotRetained, Executed: ExecutedYes, RetryAfter: -1, Subject: id.String(),
		Message:  "the call was executed and its response was too large to keep",
		Metadata: map[string]string{"originalCode": original.String()},
	}
}

func refuseRecordCorrupt(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_DATA_LOSS, Reason: ReasonRecordCorrupt, Executed: ExecutedMaybe, RetryAfter: -1, Cause: cause,
		Message: "the record of this idempotency key cannot be read",
	}
}

func refuseLeaseLost(cause error) *Refusal {
	return &Refusal{
		// Maybe: this execution committed nothing, the one that took over may.
		Code: code.Code_ABORTED, Reason: ReasonLeaseLost, Executed: ExecutedMaybe,
		RetryAfter: jitter(minRetryAfter, 200*time.Millisecond), Cause: cause,
		Message: "the execution lost its claim and committed nothing",
	}
}

func refuseTxConflict(cause error) *Refusal {
	return &Refusal{
		Code: code.Code_ABORTED, Reason: ReasonTxConflict, Executed: ExecutedNo,
		RetryAfter: jitter(minRetryAfter, 200*time.Millisecond), Cause: cause,
		Message: "the transaction conflicted with another and was rolled back",
	}
}

// minRetryAfter is the shortest delay that a refusal names: the client's own
// lower bound for waiting on a call in flight.
const minRetryAfter = 50 * time.Millisecond

// jitter returns a duration in [low, high).
func jitter(low, high time.Duration) time.Duration {
	if high <= low {
		return low
	}
	return low + rand.N(high-low) //nolint:gosec // spreads load, guards nothing
}
