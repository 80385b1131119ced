package policy

import (
	"fmt"

	"google.golang.org/grpc/codes"
)

// codeNames are the canonical names, which codes.Code.String does not use.
var codeNames = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
	"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// CodeName returns the canonical name of a code, such as "UNAVAILABLE".
func CodeName(c codes.Code) string { return codeName(c) }

func codeName(c codes.Code) string {
	if int(c) < len(codeNames) {
		return codeNames[c]
	}
	return fmt.Sprintf("CODE(%d)", uint32(c))
}

// codeSet is a set of gRPC's 17 codes.
type codeSet uint32

func setOf(list []codes.Code) codeSet {
	var s codeSet
	for _, c := range list {
		if int(c) < len(codeNames) {
			s |= 1 << c
		}
	}
	return s
}

func (s codeSet) has(c codes.Code) bool { return int(c) < len(codeNames) && s&(1<<c) != 0 }

// verdicts are the codes that are an application's answer: the server worked,
// and asking again asks the same question.
var verdicts = setOf([]codes.Code{
	codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied,
	codes.Unauthenticated, codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented,
})

// IsVerdict reports whether a code is an application's answer about the
// request, rather than a failure to give one.
func IsVerdict(c codes.Code) bool { return verdicts.has(c) }
