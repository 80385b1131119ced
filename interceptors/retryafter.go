package interceptors

import (
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/belayrpc/belay/idempotency"
)

// RetryAfter is for handlers: it returns err with the wish that it is not
// retried before d has passed, or, for d < 0, not at all. Clients of any
// language see it as gRFC A6 pushback, which the guard sends as a trailer, and
// as a RetryInfo detail. The code, message and details of err stay. RetryAfter
// of nil is nil. Of one around another "not at all" wins, else the longer wait.
// An application's verdict, such as NOT_FOUND, keeps the detail
// but is sent without pushback.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	wish := pushback{given: true, stop: d < 0, delay: max(d, 0)}
	if inner, ok := errors.AsType[*retryAfterError](err); ok {
		wish = wish.stronger(inner.wish)
	}
	return &retryAfterError{err: err, wish: wish, status: withRetryInfo(err, d)}
}

type retryAfterError struct {
	err    error
	wish   pushback
	status *status.Status
}

func (e *retryAfterError) Error() string              { return e.err.Error() }
func (e *retryAfterError) Unwrap() error              { return e.err }
func (e *retryAfterError) GRPCStatus() *status.Status { return e.status }

// withRetryInfo is err's status with RetryInfo added for a delay. "Never" has
// no form in RetryInfo.
func withRetryInfo(err error, d time.Duration) *status.Status {
	st := statusOf(err)
	if d < 0 || st.Code() == codes.OK {
		return st
	}
	with, detailErr := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
	if detailErr != nil {
		return st // a status that cannot take details is still the handler's answer
	}
	return with
}

// statusOf is the status that gRPC's server would send for a handler's error,
// if the handler's verdict on its effect were not around it.
func statusOf(err error) *status.Status {
	err = idempotency.Unmark(err)
	if st, ok := status.FromError(err); ok {
		return st
	}
	return status.FromContextError(err)
}
