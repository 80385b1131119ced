package lint_test

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/durationpb"

	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
	"github.com/belayrpc/belay/proto/lint"
)

func TestMethod(t *testing.T) {
	const idempotent = descriptorpb.MethodOptions_IDEMPOTENT
	const readOnly = descriptorpb.MethodOptions_NO_SIDE_EFFECTS
	keyed := func(k belayv1.Keying) *belayv1.MethodPolicy { return &belayv1.MethodPolicy{Key: k.Enum()} }
	field := func(name string) *belayv1.MethodPolicy {
		p := keyed(belayv1.Keying_KEYING_REQUIRED)
		p.KeyField = &name
		return p
	}
	for _, c := range []struct {
		name   string
		level  descriptorpb.MethodOptions_IdempotencyLevel
		policy *belayv1.MethodPolicy
		client bool
		server bool
		want   []string // a part of each problem, in order
	}{
		{name: "nothing declared"},
		{name: "required", policy: keyed(belayv1.Keying_KEYING_REQUIRED)},
		{name: "required and idempotent", level: idempotent, policy: keyed(belayv1.Keying_KEYING_REQUIRED)},
		{name: "no key on a read", level: readOnly, policy: keyed(belayv1.Keying_KEYING_NONE)},
		{name: "key on a read", level: readOnly, policy: keyed(belayv1.Keying_KEYING_OPTIONAL), want: []string{"E1: lint.test.Svc.Call: key KEYING_OPTIONAL"}},
		{name: "optional and idempotent", level: idempotent, policy: keyed(belayv1.Keying_KEYING_OPTIONAL), want: []string{"E2: "}},
		{name: "key field", policy: field("id")},
		{name: "missing field", policy: field("nope"), want: []string{`E3: lint.test.Svc.Call: key_field "nope": lint.test.Req has no field`}},
		{name: "repeated field", policy: field("ids"), want: []string{"must be singular"}},
		{name: "field of another type", policy: field("number"), want: []string{"must be a string, not int64"}},
		{name: "field in a oneof", policy: field("choice"), want: []string{"must not be in a oneof"}},
		{name: "field without a key", policy: &belayv1.MethodPolicy{KeyField: new("id")}, want: []string{"needs key KEYING_OPTIONAL or KEYING_REQUIRED"}},
		{name: "key on a client stream", policy: keyed(belayv1.Keying_KEYING_REQUIRED), client: true},
		{name: "key on a bidirectional stream", policy: keyed(belayv1.Keying_KEYING_REQUIRED), client: true, server: true, want: []string{"E4: "}},
		{
			name:   "negative retention",
			policy: &belayv1.MethodPolicy{Key: belayv1.Keying_KEYING_REQUIRED.Enum(), Retention: &durationpb.Duration{Seconds: -1}},
			want:   []string{"E5: lint.test.Svc.Call: retention -1s"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := lint.Method(method(t, c.level, c.policy, c.client, c.server))
			if len(got) != len(c.want) {
				t.Fatalf("problems %v, want %d", got, len(c.want))
			}
			for i, p := range got {
				if !strings.Contains(p.Error(), c.want[i]) {
					t.Errorf("problem %q, want %q in it", p, c.want[i])
				}
			}
		})
	}
}

// method builds a method with these options, as protoc would.
func method(t *testing.T, level descriptorpb.MethodOptions_IdempotencyLevel, p *belayv1.MethodPolicy, client, server bool) protoreflect.MethodDescriptor {
	t.Helper()
	options := &descriptorpb.MethodOptions{IdempotencyLevel: level.Enum()}
	if p != nil {
		proto.SetExtension(options, belayv1.E_Method, p)
	}
	str, num := descriptorpb.FieldDescriptorProto_TYPE_STRING, descriptorpb.FieldDescriptorProto_TYPE_INT64
	one, many := descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL, descriptorpb.FieldDescriptorProto_LABEL_REPEATED
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: new("lint/test.proto"), Package: new("lint.test"), Syntax: new("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{{
			Name: new("Req"),
			Field: []*descriptorpb.FieldDescriptorProto{
				{Name: new("id"), Number: new(int32(1)), Type: &str, Label: &one},
				{Name: new("ids"), Number: new(int32(2)), Type: &str, Label: &many},
				{Name: new("number"), Number: new(int32(3)), Type: &num, Label: &one},
				{Name: new("choice"), Number: new(int32(4)), Type: &str, Label: &one, OneofIndex: new(int32(0))},
			},
			OneofDecl: []*descriptorpb.OneofDescriptorProto{{Name: new("one")}},
		}},
		Service: []*descriptorpb.ServiceDescriptorProto{{
			Name: new("Svc"),
			Method: []*descriptorpb.MethodDescriptorProto{{
				Name: new("Call"), InputType: new(".lint.test.Req"), OutputType: new(".lint.test.Req"),
				ClientStreaming: &client, ServerStreaming: &server, Options: options,
			}},
		}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return file.Services().Get(0).Methods().Get(0)
}
