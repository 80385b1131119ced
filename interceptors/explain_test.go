package interceptors_test

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/google/go-cmp/cmp"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
)

var update = flag.Bool("update", false, "write the golden files anew")

func wantGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		wantOK(t, os.WriteFile(path, []byte(got), 0o600))
	}
	want, err := os.ReadFile(path)
	wantOK(t, err)
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// What a person reads, whole: each value with where it comes from, and what is
// done on each code.
func TestExplainGolden(t *testing.T) {
	for name, method := range map[string]string{
		"explain_read.golden": probe.Read, "explain_undeclared.golden": probe.Undeclared, "explain_keyed.golden": probe.Keyed,
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t,
				interceptors.WithPolicy(policy.Policy{Timeout: 3 * time.Second}),
				interceptors.WithRule("belay.probe.v1.ProbeService/*", policy.Policy{AttemptTimeout: 500 * time.Millisecond}),
				interceptors.WithRule("belay.probe.v1.ProbeService/Keyed", policy.Policy{MaxAttempts: 6, Codes: []codes.Code{codes.Unavailable, codes.Aborted}}),
				interceptors.WithRule("*", policy.Policy{Backoff: policy.Backoff{Base: 20 * time.Millisecond}}),
			)
			wantGolden(t, name, c.Explain(nil, method).String())
		})
	}
}

// Where a value comes from is the most specific source that sets it.
func TestExplainSources(t *testing.T) {
	matcher := selector.MatchFunc(func(context.Context, middleware.CallMeta) bool { return true })
	c := newClient(t,
		interceptors.WithPolicy(policy.Policy{MaxAttempts: 2}),
		interceptors.WithRule("*", policy.Policy{Timeout: time.Second}),
		interceptors.WithRule("belay.probe.v1.ProbeService/Undeclared", policy.Policy{Timeout: time.Minute, Idempotency: policy.Idempotent}),
		interceptors.WithMatcher(matcher, policy.Policy{MaxAttempts: 9}),
	)
	e := c.Explain(nil, "belay.probe.v1.ProbeService/Undeclared") // without the slash
	fields := map[string]interceptors.ExplainedField{}
	for _, f := range e.Fields {
		fields[f.Name] = f
	}
	for _, want := range []interceptors.ExplainedField{
		{Name: "MaxAttempts", Value: "2", Source: "WithPolicy"},
		{Name: "Timeout", Value: "1m0s", Source: `WithRule("belay.probe.v1.ProbeService/Undeclared")`},
		{Name: "MinAttempt", Value: "2ms", Source: "default"},
	} {
		wantEqual(t, want.Name, fields[want.Name], want)
	}
	wantEqual(t, "method", e.Method, probe.Undeclared)
	wantEqual(t, "class", e.Class, policy.Idempotent)
	wantEqual(t, "class source", e.ClassSource, `WithRule("belay.probe.v1.ProbeService/Undeclared")`)
	if len(e.Notes) != 1 || !strings.Contains(e.Notes[0], "1 matcher(s)") {
		t.Errorf("notes %q, want one on the matcher", e.Notes)
	}
	wantEqual(t, "source of a declared class", c.Explain(nil, probe.Inherits).ClassSource, "(belay.v1.service).key")
	c.Disable()
	if notes := c.Explain(nil, probe.Read).Notes; len(notes) != 2 {
		t.Errorf("notes %q, want one more on the kill switch", notes)
	}
	// An explanation is a copy.
	e.Policy.MaxAttempts = 77
	wantEqual(t, "attempts", c.Explain(nil, probe.Undeclared).Policy.MaxAttempts, 2)
}

// The verdicts that Explain prints are those that calls meet.
func TestExplainTellsTheTruth(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{plainServer: true})
		for _, method := range []string{probe.Undeclared, probe.Read, probe.Keyed} {
			for _, v := range r.client.Explain(r.conn, method).Verdicts {
				for _, hinted := range []bool{false, true} {
					step, want := probe.Step{Code: v.Code}, v.Sent
					if hinted {
						step.Pushback, want = "1", v.Hinted
					}
					before := r.srv.Hits(method)
					r.srv.Script(method, step, probe.Step{Code: codes.NotFound})
					_, _ = r.call(t, method, request("x"))
					if retried := r.srv.Hits(method)-before > 1; retried != (want == "retry") {
						t.Errorf("%s on %v, hinted %v: Explain says %q, retried %v", method, v.Code, hinted, want, retried)
					}
				}
			}
		}
	})
}

func TestExplainNativeRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{dial: []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeRetry)}})
		_, err := r.call(t, probe.Read, request("x"))
		wantOK(t, err)
		if notes := strings.Join(r.client.Explain(r.conn, probe.Read).Notes, "\n"); !strings.Contains(notes, "retryPolicy") {
			t.Errorf("notes %q do not tell of the channel's retryPolicy", notes)
		}
	})
}
