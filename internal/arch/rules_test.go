package arch_test

import (
	"fmt"
	"slices"
	"strings"
)

const module = "github.com/belayrpc/belay"

// Paths that the rules name. One of another module stands for all that is below
// it too, one of this module for itself alone.
const (
	protobuf   = "google.golang.org/protobuf"
	genproto   = "google.golang.org/genproto/googleapis/rpc"
	grpc       = "google.golang.org/grpc"
	otel       = "go.opentelemetry.io/otel"
	middleware = "github.com/grpc-ecosystem/go-grpc-middleware/v2"

	cmp    = "github.com/google/go-cmp"
	goleak = "go.uber.org/goleak"
	rapid  = "pgregory.net/rapid"

	belayv1     = module + "/proto/belay/v1"
	budget      = module + "/budget"
	breaker     = module + "/breaker"
	idempotency = module + "/idempotency"
	policy      = module + "/interceptors/policy"
	probe       = module + "/internal/probe"
	probev1     = probe + "/probev1"
	storetest   = idempotency + "/storetest"
	lint        = module + "/proto/lint"
)

// A rule says what the code of one package may import beside the standard
// library. The arrows it draws point down only:
//
//	examples → interceptors → {budget, breaker, idempotency, policy} → proto
type rule struct {
	folder string
	may    []string
	why    string

	// kit marks a package of help for tests, which alone may import testing.
	kit bool
}

// rules has one entry for every package of the module.
var rules = []rule{
	{
		folder: "budget",
		why:    "the retry bank is arithmetic: who uses it without gRPC, or reads it, must need nothing else",
	},
	{
		folder: "breaker",
		why:    "the breaker is a state machine: who uses it without gRPC, or reads it, must need nothing else",
	},
	{
		folder: "idempotency",
		may:    []string{protobuf, genproto, belayv1},
		why:    "the state machine returns outcomes and the edge speaks gRPC, so that jobs and queues can be idempotent too",
	},
	{
		folder: "idempotency/sqlstore",
		may:    []string{protobuf, genproto, belayv1, idempotency},
		why:    "a store speaks database/sql: a driver here would be a driver in every user's go.sum",
	},
	{
		folder: "idempotency/storetest",
		may:    []string{protobuf, genproto, belayv1, idempotency, rapid, cmp},
		why:    "anyone can run the contract on a store of his own, with nothing but what the contract needs",
		kit:    true,
	},
	{
		folder: "interceptors",
		may:    []string{protobuf, genproto, grpc, otel, middleware, belayv1, lint, budget, breaker, idempotency, policy},
		why:    "the edge ties the parts to gRPC and to OpenTelemetry's API; it stores nothing and imports no store, driver or SDK",
	},
	{
		folder: "interceptors/policy",
		may:    []string{protobuf, grpc + "/codes", grpc + "/status", belayv1},
		why:    "the verdict is a pure function: with no channel, stream or clock in reach its tests can enumerate it",
	},
	{
		folder: "proto/belay/v1",
		may:    []string{protobuf},
		why:    "whoever imports the options to declare a method must not import what acts on them",
	},
	{
		folder: "proto/lint",
		may:    []string{protobuf, belayv1},
		why:    "a linter in CI reads descriptors and must not need what acts on them",
	},
	{
		folder: "internal/probe",
		may:    []string{protobuf, genproto, grpc, belayv1, probev1},
		why:    "the probe must not know what it probes: it would agree with its mistakes",
		kit:    true,
	},
	{
		folder: "internal/probe/probev1",
		may:    []string{protobuf, grpc, belayv1},
		why:    "generated code",
	},
	{
		folder: "internal/arch",
		why:    "holds no code",
	},
}

// reasons says more about imports that no rule, or not every one, allows.
var reasons = []struct{ path, why string }{
	{otel + "/sdk", "the SDK is the program's choice; a library that brings one brings its version to everyone"},
	{otel + "/exporters", "exporters are the program's choice"},
	{otel, "telemetry is the edge's: everything below reports events to it"},
	{grpc, "gRPC is the edge's: everything below is told codes, durations and outcomes"},
	{probe, probeWhy},
	{probev1, probeWhy},
	{cmp, "for tests only: it panics by design"},
	{goleak, "for tests only"},
	{rapid, "for tests only"},
	{"testing", "it would put testing's flags into users' binaries"},
	{"github.com/stretchr/testify", "tests here use the standard library and go-cmp"},
}

const probeWhy = "the probe serves tests and examples; in production it would be a server that fails on request"

// testsMay is what test files may import beside what their package may.
var testsMay = []string{cmp, goleak, rapid, protobuf, genproto, probe, probev1, storetest}

// requirements is what the module's go.mod may require directly, and why.
var requirements = map[string]string{
	grpc:             "what this library is for",
	protobuf:         "messages, descriptors and options",
	genproto:         "the standard error details and codes",
	middleware:       "selector.Matcher and CallMeta, the ecosystem's way to choose calls",
	otel:             "API only",
	otel + "/trace":  "API only",
	otel + "/metric": "API only",
	cmp:              "tests only",
	goleak:           "tests only",
	rapid:            "tests only",
}

// forbidden reports why the file, given by its folder and name, may not import
// path; "" when it may.
func forbidden(folder, name, path string) string {
	i := slices.IndexFunc(rules, func(r rule) bool { return r.folder == folder })
	if i < 0 {
		return fmt.Sprintf("package %s has no rule: say in internal/arch what it may import, and why", folder)
	}
	r := rules[i]

	may := r.may
	if strings.HasSuffix(name, "_test.go") {
		may = slices.Concat(may, testsMay, []string{module + "/" + folder})
	}
	switch {
	case path == "testing" || strings.HasPrefix(path, "testing/"):
		if r.kit || strings.HasSuffix(name, "_test.go") {
			return ""
		}
	case isStandard(path):
		return ""
	case slices.ContainsFunc(may, func(allowed string) bool { return covers(allowed, path) }):
		// A prefix that is allowed may hold one that nobody may import.
		if !covers(otel+"/sdk", path) && !covers(otel+"/exporters", path) {
			return ""
		}
	}

	why := fmt.Sprintf("package %s may import only the standard library and %q: %s", folder, r.may, r.why)
	for _, reason := range reasons {
		if covers(reason.path, path) {
			return reason.why + "; " + why
		}
	}
	return why
}

// covers reports whether prefix stands for path. A package of this module does
// not stand for those below it: they are other ideas, with rules of their own.
func covers(prefix, path string) bool {
	return path == prefix || strings.HasPrefix(path, prefix+"/") && !strings.HasPrefix(prefix, module+"/")
}

// isStandard reports whether path is of the standard library: the first element
// of every other path is a host's name.
func isStandard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}
