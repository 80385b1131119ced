// Package lint holds the rules that the options of belay/v1/policy.proto must
// keep, over descriptors: one set for servers at start and for linters in CI.
package lint

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
)

// Problem is one broken rule. It is an error.
type Problem struct { //nolint:errname // a finding, one of a list; that it is an error lets a caller return it
	// Rule is the rule's stable name, such as "E1".
	Rule string
	// Element is the full name of what breaks it.
	Element protoreflect.FullName
	// Text says what is wrong, with the field and the value.
	Text string
}

// Error returns rule, element and text.
func (p Problem) Error() string { return fmt.Sprintf("%s: %s: %s", p.Rule, p.Element, p.Text) }

// Method returns the rules that a method's own options break:
//
//	E1  a key on a method with idempotency_level = NO_SIDE_EFFECTS
//	E2  KEYING_OPTIONAL with idempotency_level = IDEMPOTENT: generic clients
//	    would repeat it without a key
//	E3  key_field names no top-level, singular string field outside a oneof, or
//	    is set without a key
//	E4  a key on a bidirectional stream
//	E5  a negative retention
func Method(m protoreflect.MethodDescriptor) []Problem {
	options, ok := m.Options().(*descriptorpb.MethodOptions)
	if !ok || options == nil || !proto.HasExtension(options, belayv1.E_Method) {
		return nil
	}
	p, ok := proto.GetExtension(options, belayv1.E_Method).(*belayv1.MethodPolicy)
	if !ok {
		return nil
	}
	var problems []Problem
	report := func(rule, format string, args ...any) {
		problems = append(problems, Problem{rule, m.FullName(), fmt.Sprintf(format, args...)})
	}
	keyed := p.GetKey() == belayv1.Keying_KEYING_OPTIONAL || p.GetKey() == belayv1.Keying_KEYING_REQUIRED
	level := options.GetIdempotencyLevel()
	if keyed && level == descriptorpb.MethodOptions_NO_SIDE_EFFECTS {
		report("E1", "key %v: a method with idempotency_level NO_SIDE_EFFECTS has nothing to record", p.GetKey())
	}
	if p.GetKey() == belayv1.Keying_KEYING_OPTIONAL && level == descriptorpb.MethodOptions_IDEMPOTENT {
		report("E2", "key %v with idempotency_level IDEMPOTENT: a client that knows no keys would repeat it without one; require the key, or leave the level out", p.GetKey())
	}
	if f := p.GetKeyField(); f != "" {
		if rule := keyFieldRule(m.Input(), f); rule != "" {
			report("E3", "key_field %q: %s", f, rule)
		}
		if !keyed {
			report("E3", "key_field %q: needs key KEYING_OPTIONAL or KEYING_REQUIRED, not %v", f, p.GetKey())
		}
	}
	if keyed && m.IsStreamingClient() && m.IsStreamingServer() {
		report("E4", "key %v: a bidirectional stream cannot be recorded and replayed", p.GetKey())
	}
	if d := p.GetRetention(); d != nil && (d.CheckValid() != nil || d.AsDuration() < 0) {
		report("E5", "retention %v: must be a duration that is not negative", d.AsDuration())
	}
	return problems
}

// keyFieldRule says which rule a key_field breaks; empty when it keeps them.
func keyFieldRule(request protoreflect.MessageDescriptor, name string) string {
	field := request.Fields().ByName(protoreflect.Name(name))
	switch {
	case field == nil:
		return fmt.Sprintf("%s has no field of that name", request.FullName())
	case field.IsList() || field.IsMap():
		return "must be singular"
	case field.Kind() != protoreflect.StringKind:
		return fmt.Sprintf("must be a string, not %v", field.Kind())
	case field.ContainingOneof() != nil && !field.ContainingOneof().IsSynthetic():
		return "must not be in a oneof"
	}
	return ""
}
