package interceptors

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors/policy"
)

// Explanation is what [Client.Explain] finds: the policy in force for a
// method, where each value comes from, and what is retried and why not.
type Explanation struct {
	// Method is the full method, "/pkg.Service/Method".
	Method string

	// Exempt methods (health, reflection, channelz) pass untouched.
	Exempt bool

	// Class is the idempotency relied on, and ClassSource where it comes from.
	Class       policy.Idempotency
	ClassSource string

	// Demoted tells that on this channel the server was seen not to honour
	// keys, so that the method counts as undeclared there.
	Demoted bool

	// Policy is the complete policy, and Fields the same with each value's source.
	Policy policy.Policy
	Fields []ExplainedField

	// Verdicts say for each code what Decide does with it.
	Verdicts []Verdict

	// Notes are what the explanation cannot see.
	Notes []string
}

// ExplainedField is one value of a policy and the source that set it.
type ExplainedField struct{ Name, Value, Source string }

// Verdict is what is done about a failure with one code on a first attempt with
// no deadline in the way.
type Verdict struct {
	Code codes.Code
	// Sent is the verdict on an attempt that may have reached the server, Hinted
	// the same with a delay that the server asked for, NotSent the verdict on one
	// that certainly did not reach it. Each is "retry" or a StopReason.
	Sent, Hinted, NotSent string
}

// Explain returns the policy in force for a method on a channel, with the
// reason of each part. cc may be nil. method is "/pkg.Service/Method" or
// "pkg.Service/Method".
func (c *Client) Explain(cc *grpc.ClientConn, fullMethod string) Explanation {
	full := "/" + strings.TrimPrefix(fullMethod, "/")
	set, m := c.methodOf(full)
	e := Explanation{
		Method: full, Exempt: m.exempt, Class: m.class, ClassSource: m.declared.Source, Policy: m.rules.Clone(),
	}
	layers := append(append([]policy.Sourced(nil), m.above...), m.below...)
	layers = append(layers, policy.Sourced{Policy: policy.Compile(policy.Policy{}).Policy, Source: "default"})
	e.Fields = explainFields(e.Policy, layers)
	if m.rules.Idempotency != policy.Unspecified {
		e.ClassSource = sourceOf(layers, func(p policy.Policy) bool { return p.Idempotency != policy.Unspecified })
	}
	if c.channelOf(cc).demoted.has(full) {
		e.Demoted, e.Class = true, policy.Undeclared
	}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		e.Verdicts = append(e.Verdicts, verdictOn(code, &m.rules, e.Class))
	}
	if n := len(set.config.matchers); n > 0 {
		e.Notes = append(e.Notes, fmt.Sprintf("%d matcher(s) are asked for each call and may change this; they cannot be seen into", n))
	}
	if c.disabled.Load() {
		e.Notes = append(e.Notes, "the client is disabled: every call makes one attempt")
	}
	if cc != nil && cc.GetMethodConfig(full).RetryPolicy != nil {
		e.Notes = append(e.Notes, "the channel's service config has a retryPolicy, which multiplies unless it was dialled with WithDisableRetry")
	}
	return e
}

func verdictOn(code codes.Code, rules *policy.Rules, class policy.Idempotency) Verdict {
	s := policy.Situation{Rules: rules, Class: class, Code: code, Attempts: 1, GraceLeft: rules.ConnectGrace}
	say := func(s policy.Situation) string {
		d := policy.Decide(s)
		if d.Retry {
			return "retry"
		}
		return d.Stop.String()
	}
	v := Verdict{Code: code, Sent: say(s)}
	hinted := s
	hinted.Asked = policy.Asked{Given: true, Delay: time.Millisecond}
	v.Hinted = say(hinted)
	s.NotSent = true
	v.NotSent = say(s)
	return v
}

func explainFields(p policy.Policy, layers []policy.Sourced) []ExplainedField {
	show := func(d time.Duration) string {
		if d == policy.Unlimited {
			return "unlimited"
		}
		return d.String()
	}
	names := make([]string, len(p.Codes))
	for i, c := range p.Codes {
		names[i] = policy.CodeName(c)
	}
	fields := []struct {
		name, value string
		set         func(policy.Policy) bool
	}{
		{"Timeout", show(p.Timeout), func(p policy.Policy) bool { return p.Timeout != 0 }},
		{"AttemptTimeout", show(p.AttemptTimeout), func(p policy.Policy) bool { return p.AttemptTimeout != 0 }},
		{"MinAttempt", show(p.MinAttempt), func(p policy.Policy) bool { return p.MinAttempt != 0 }},
		{"MaxAttempts", strconv.Itoa(p.MaxAttempts), func(p policy.Policy) bool { return p.MaxAttempts != 0 }},
		{"Backoff.Base", show(p.Backoff.Base), func(p policy.Policy) bool { return p.Backoff.Base != 0 }},
		{"Backoff.Max", show(p.Backoff.Max), func(p policy.Policy) bool { return p.Backoff.Max != 0 }},
		{"Backoff.Multiplier", fmt.Sprint(p.Backoff.Multiplier), func(p policy.Policy) bool { return p.Backoff.Multiplier != 0 }},
		{"Backoff.Jitter", p.Backoff.Jitter.String(), func(p policy.Policy) bool { return p.Backoff.Jitter != 0 }},
		{"Codes", strings.Join(names, ","), func(p policy.Policy) bool { return p.Codes != nil }},
		{"ReplayBytes", strconv.Itoa(p.ReplayBytes), func(p policy.Policy) bool { return p.ReplayBytes != 0 }},
		{"MaxIdle", show(p.MaxIdle), func(p policy.Policy) bool { return p.MaxIdle != 0 }},
		{"ConnectGrace", show(p.ConnectGrace), func(p policy.Policy) bool { return p.ConnectGrace != 0 }},
	}
	out := make([]ExplainedField, len(fields))
	for i, f := range fields {
		out[i] = ExplainedField{f.name, f.value, sourceOf(layers, f.set)}
	}
	return out
}

func sourceOf(layers []policy.Sourced, set func(policy.Policy) bool) string {
	for _, l := range layers {
		if set(l.Policy) {
			return l.Source
		}
	}
	return "default"
}

// String lays the explanation out for a person.
func (e Explanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", e.Method)
	if e.Exempt {
		b.WriteString("  exempt: passes untouched\n")
		return b.String()
	}
	fmt.Fprintf(&b, "  class %s, from %s\n", e.Class, e.ClassSource)
	if e.Demoted {
		b.WriteString("  demoted: its server does not honour keys on this channel\n")
	}
	for _, f := range e.Fields {
		fmt.Fprintf(&b, "  %-18s %-14s %s\n", f.Name, f.Value, f.Source)
	}
	fmt.Fprintf(&b, "  %-20s %-14s %-14s %s\n", "code", "sent", "with a hint", "never sent")
	for _, v := range e.Verdicts {
		fmt.Fprintf(&b, "  %-20s %-14s %-14s %s\n", policy.CodeName(v.Code), v.Sent, v.Hinted, v.NotSent)
	}
	for _, n := range e.Notes {
		fmt.Fprintf(&b, "  note: %s\n", n)
	}
	return b.String()
}
