package policy_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe/probev1"
	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
)

const (
	stringKind  = descriptorpb.FieldDescriptorProto_TYPE_STRING
	bytesKind   = descriptorpb.FieldDescriptorProto_TYPE_BYTES
	int32Kind   = descriptorpb.FieldDescriptorProto_TYPE_INT32
	enumKind    = descriptorpb.FieldDescriptorProto_TYPE_ENUM
	messageKind = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE
	optional    = descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL
	repeated    = descriptorpb.FieldDescriptorProto_LABEL_REPEATED

	unknownLevel  = descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
	noSideEffects = descriptorpb.MethodOptions_NO_SIDE_EFFECTS
	idempotent    = descriptorpb.MethodOptions_IDEMPOTENT

	unspecified = belayv1.Keying_KEYING_UNSPECIFIED
	noKey       = belayv1.Keying_KEYING_NONE
	keyOptional = belayv1.Keying_KEYING_OPTIONAL
	keyRequired = belayv1.Keying_KEYING_REQUIRED
	futureKey   = belayv1.Keying(7)
)

// methodOptions states a key and a level; no policy at all for a nil one.
func methodOptions(p *belayv1.MethodPolicy, level descriptorpb.MethodOptions_IdempotencyLevel) *descriptorpb.MethodOptions {
	options := &descriptorpb.MethodOptions{}
	if level != unknownLevel {
		options.IdempotencyLevel = &level
	}
	if p != nil {
		proto.SetExtension(options, belayv1.E_Method, p)
	}
	return options
}

func serviceOptions(p *belayv1.ServicePolicy) *descriptorpb.ServiceOptions {
	options := &descriptorpb.ServiceOptions{}
	if p != nil {
		proto.SetExtension(options, belayv1.E_Service, p)
	}
	return options
}

// The table of what a method's own options declare. "error" is two statements
// that cannot both hold, neither of which is relied on.
var declaredTable = map[belayv1.Keying]map[descriptorpb.MethodOptions_IdempotencyLevel]string{
	unspecified: {unknownLevel: "undeclared", noSideEffects: "no_side_effects", idempotent: "idempotent"},
	noKey:       {unknownLevel: "undeclared", noSideEffects: "no_side_effects", idempotent: "idempotent"},
	keyOptional: {unknownLevel: "keyed", noSideEffects: "error", idempotent: "error"},
	keyRequired: {unknownLevel: "keyed, required", noSideEffects: "error", idempotent: "keyed, required"},
	futureKey:   {unknownLevel: "undeclared", noSideEffects: "no_side_effects", idempotent: "idempotent"},
}

// All combinations of what a method and its service can say.
func TestDeclaredOf(t *testing.T) {
	services := map[string]*belayv1.ServicePolicy{
		"no policy":   nil,
		"unspecified": {},
		"none":        {Key: noKey.Enum()},
		"optional":    {Key: keyOptional.Enum()},
		"required":    {Key: keyRequired.Enum()},
	}
	for key, levels := range declaredTable {
		for level, own := range levels {
			for serviceSays, service := range services {
				for _, streams := range []struct{ client, server bool }{{}, {client: true}, {server: true}, {client: true, server: true}} {
					want := own
					// "for unary methods with no key and no idempotency_level of their own"
					unary := !streams.client && !streams.server
					if inherits := unary && key == unspecified && level == unknownLevel; inherits {
						want = declaredTable[service.GetKey()][unknownLevel]
					}
					name := fmt.Sprintf("%v/%v/service %s/streams %v", key, level, serviceSays, streams)
					t.Run(name, func(t *testing.T) {
						a := api{
							method: methodOptions(&belayv1.MethodPolicy{Key: key.Enum()}, level), service: serviceOptions(service),
							client: streams.client, server: streams.server,
						}
						if got := says(policy.DeclaredOf(a.descriptor(t))); got != want {
							t.Errorf("got %s, want %s", got, want)
						}
						if key == unspecified { // an empty policy says no more than none
							a.method = methodOptions(nil, level)
							if got := says(policy.DeclaredOf(a.descriptor(t))); got != want {
								t.Errorf("without the option: got %s, want %s", got, want)
							}
						}
					})
				}
			}
		}
	}
}

// says writes what is declared as the table does.
func says(d policy.Declared) string {
	s := d.Class.String()
	switch {
	case strings.HasPrefix(d.Source, "contradiction") && d.Class == policy.Undeclared && !d.Required:
		return "error"
	case d.Required:
		s += ", required"
	}
	return s
}

// Source says which statement counts, so that a person can find it.
func TestDeclaredOf_source(t *testing.T) {
	for _, test := range []struct {
		a    api
		want string
	}{
		{api{}, "nothing is declared"},
		{api{method: methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum()}, unknownLevel)}, "(belay.v1.method).key"},
		{api{method: methodOptions(&belayv1.MethodPolicy{Key: keyRequired.Enum()}, idempotent)}, "(belay.v1.method).key"},
		{api{method: methodOptions(nil, idempotent)}, "idempotency_level"},
		{api{method: methodOptions(nil, noSideEffects)}, "idempotency_level"},
		{api{service: serviceOptions(&belayv1.ServicePolicy{Key: keyOptional.Enum()})}, "(belay.v1.service).key"},
		{api{method: methodOptions(&belayv1.MethodPolicy{Key: noKey.Enum()}, unknownLevel)}, "(belay.v1.method).key is KEYING_NONE"},
		{api{service: serviceOptions(&belayv1.ServicePolicy{Key: noKey.Enum()})}, "(belay.v1.service).key is KEYING_NONE"},
		{
			api{method: methodOptions(&belayv1.MethodPolicy{Key: keyRequired.Enum()}, noSideEffects)},
			"contradiction: a key on a method with idempotency_level = NO_SIDE_EFFECTS",
		},
		{
			api{method: methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum()}, idempotent)},
			"contradiction: KEYING_OPTIONAL with idempotency_level = IDEMPOTENT: a generic client would repeat without a key",
		},
	} {
		m := test.a.descriptor(t)
		d := policy.DeclaredOf(m)
		if d.Source != test.want {
			t.Errorf("source %q, want %q", d.Source, test.want)
		}
		if d.Method != m {
			t.Errorf("%s: the descriptor is not the one that was given", test.want)
		}
	}
}

func TestDeclaredOf_retention(t *testing.T) {
	hour, day := durationpb.New(time.Hour), durationpb.New(24*time.Hour)
	service := serviceOptions(&belayv1.ServicePolicy{Key: keyOptional.Enum(), Retention: day})
	for _, test := range []struct {
		name string
		a    api
		want time.Duration
	}{
		{"nowhere", api{method: methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum()}, unknownLevel)}, 0},
		{"the method's", api{method: methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum(), Retention: hour}, unknownLevel)}, time.Hour},
		{"the service's", api{service: service}, 24 * time.Hour},
		{"the method's beside the service's key", api{method: methodOptions(&belayv1.MethodPolicy{Retention: hour}, unknownLevel), service: service}, time.Hour},
		{"a method with a key of its own takes nothing from the service", api{method: methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum()}, unknownLevel), service: service}, 0},
		{"nor does one with a level", api{method: methodOptions(nil, idempotent), service: service}, 0},
		{"nor a stream", api{service: service, server: true}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := policy.DeclaredOf(test.a.descriptor(t)).Retention; got != test.want {
				t.Errorf("retention %v, want %v", got, test.want)
			}
		})
	}
}

// An option that is not ours, or that cannot be read, leaves the method
// undeclared, whatever number or name it has, and does not panic.
func TestDeclaredOf_foreignOptions(t *testing.T) {
	const number = 50731
	const extendee = ".google.protobuf.MethodOptions"
	keyed := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), uint64(keyRequired))
	unresolved := protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), keyed)

	set := func(x protoreflect.ExtensionType, v any) *descriptorpb.MethodOptions {
		options := &descriptorpb.MethodOptions{}
		proto.SetExtension(options, x, v)
		return options
	}
	unknown := func(wire []byte) *descriptorpb.MethodOptions {
		options := &descriptorpb.MethodOptions{}
		options.ProtoReflect().SetUnknown(wire)
		return options
	}
	fields := func(fields ...*descriptorpb.FieldDescriptorProto) *descriptorpb.DescriptorProto {
		return &descriptorpb.DescriptorProto{Name: new("Note"), Field: fields}
	}
	text := extension(t, "acme", "note", number, extendee, ofKind(stringKind, optional))
	num := extension(t, "acme", "note", number, extendee, ofKind(int32Kind, optional))
	same := extension(t, "acme", "note", number, extendee, ofMessage(".acme.Note"), fields(field("key", int32Kind, optional, nil)))
	textOfOurName := extension(t, "belay.v1", "method", number, extendee, ofKind(stringKind, optional))
	listOfOurName := extension(t, "belay.v1", "method", number, extendee, ofKind(stringKind, repeated))
	badText := extension(t, "belay.v1", "method", number, extendee, ofMessage(".belay.v1.Note"), func() *descriptorpb.DescriptorProto {
		d := fields(field("key", int32Kind, optional, nil), field("key_field", bytesKind, optional, nil))
		d.Field[1].Number = new(int32(2))
		return d
	}())

	for name, options := range map[string]*descriptorpb.MethodOptions{
		"a string with our number":              set(text, "required"),
		"a number with our number":              set(num, int32(3)),
		"a message like ours with our number":   set(same, message(same, map[protoreflect.Name]protoreflect.Value{"key": protoreflect.ValueOfInt32(3)})),
		"a string with our name":                set(textOfOurName, "required"),
		"a list with our name":                  set(listOfOurName, oneString(listOfOurName)),
		"our name, and what is no UTF-8 inside": set(badText, message(badText, map[protoreflect.Name]protoreflect.Value{"key": protoreflect.ValueOfInt32(3), "key_field": protoreflect.ValueOfBytes([]byte{0xff})})),
		"never resolved":                        unknown(unresolved),
		"never resolved, another wire type":     unknown(protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), 3)),
		"never resolved, malformed inside":      unknown(protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), []byte{0xff})),
	} {
		t.Run(name, func(t *testing.T) {
			d := policy.DeclaredOf(api{method: options}.descriptor(t))
			if d.Class != policy.Undeclared || d.Required || d.KeyField != "" {
				t.Errorf("declared %v, required %v, key field %q; want undeclared", d.Class, d.Required, d.KeyField)
			}
		})
	}
}

func oneString(x protoreflect.ExtensionType) any {
	list := x.New()
	list.List().Append(protoreflect.ValueOfString("required"))
	return x.InterfaceOf(list)
}

// Our option is ours in any Go type: descriptors that come over reflection or
// from a file often hold a dynamic message.
func TestDeclaredOf_dynamicOptions(t *testing.T) {
	x := dynamicpb.NewExtensionType(belayv1.E_Method.TypeDescriptor().Descriptor())
	options := &descriptorpb.MethodOptions{}
	proto.SetExtension(options, x, message(x, map[protoreflect.Name]protoreflect.Value{
		"key":       protoreflect.ValueOfEnum(keyRequired.Number()),
		"key_field": protoreflect.ValueOfString("order_id"),
	}))
	d := policy.DeclaredOf(api{method: options}.descriptor(t))
	if says(d) != "keyed, required" || d.KeyField != "order_id" {
		t.Errorf("declared %s with key field %q, want keyed, required with order_id", says(d), d.KeyField)
	}

	x = dynamicpb.NewExtensionType(belayv1.E_Service.TypeDescriptor().Descriptor())
	service := &descriptorpb.ServiceOptions{}
	proto.SetExtension(service, x, message(x, map[protoreflect.Name]protoreflect.Value{"key": protoreflect.ValueOfEnum(keyOptional.Number())}))
	if got := says(policy.DeclaredOf(api{service: service}.descriptor(t))); got != "keyed" {
		t.Errorf("declared %s by the service, want keyed", got)
	}
}

// A request whose own .proto is missing has no fields, and is no reason to panic.
func TestDeclaredOf_unlinkedRequest(t *testing.T) {
	d := policy.DeclaredOf(api{method: methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum()}, unknownLevel), unlinked: true}.descriptor(t))
	if says(d) != "keyed" || d.KeyField != "" {
		t.Errorf("declared %s with key field %q, want keyed with none", says(d), d.KeyField)
	}
}

// fieldInfo makes (google.api.field_info) as its own .proto has it, with a
// format of the given kind.
func fieldInfo(t *testing.T, kind descriptorpb.FieldDescriptorProto_Type) protoreflect.ExtensionType {
	t.Helper()
	format := field("format", kind, optional, nil)
	info := &descriptorpb.DescriptorProto{Name: new("FieldInfo"), Field: []*descriptorpb.FieldDescriptorProto{format}}
	if kind == enumKind {
		format.TypeName = new(".google.api.FieldInfo.Format")
		enum := &descriptorpb.EnumDescriptorProto{Name: new("Format")}
		for n, name := range []string{"FORMAT_UNSPECIFIED", "UUID4", "IPV4"} {
			enum.Value = append(enum.Value, &descriptorpb.EnumValueDescriptorProto{Name: new(name), Number: new(int32(n))})
		}
		info.EnumType = []*descriptorpb.EnumDescriptorProto{enum}
	}
	return extension(t, "google.api", "field_info", 291403980, ".google.protobuf.FieldOptions", ofMessage(".google.api.FieldInfo"), info)
}

func TestDeclaredOf_keyField(t *testing.T) {
	enumInfo, intInfo := fieldInfo(t, enumKind), fieldInfo(t, int32Kind)
	format := func(x protoreflect.ExtensionType, v protoreflect.Value) *descriptorpb.FieldOptions {
		options := &descriptorpb.FieldOptions{}
		proto.SetExtension(options, x, message(x, map[protoreflect.Name]protoreflect.Value{"format": v}))
		return options
	}
	uuid4 := format(enumInfo, protoreflect.ValueOfEnum(1))
	keyed := methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum()}, unknownLevel)
	named := methodOptions(&belayv1.MethodPolicy{Key: keyOptional.Enum(), KeyField: new("order_id")}, unknownLevel)
	isText := extension(t, "google.api", "field_info", 291403980, ".google.protobuf.FieldOptions", ofKind(stringKind, optional))
	text := &descriptorpb.FieldOptions{}
	proto.SetExtension(text, isText, "UUID4")
	nested := field("request_id", messageKind, optional, uuid4)
	nested.TypeName = new(".test.api.Response")

	for _, test := range []struct {
		name   string
		method *descriptorpb.MethodOptions
		field  *descriptorpb.FieldDescriptorProto
		want   protoreflect.Name
	}{
		{"AIP-155", keyed, field("request_id", stringKind, optional, uuid4), "request_id"},
		{"declared", named, field("order_id", stringKind, optional, nil), "order_id"},
		{"declared beside AIP-155", named, field("request_id", stringKind, optional, uuid4), "order_id"},
		{"of another name", keyed, field("order_id", stringKind, optional, uuid4), ""},
		{"no format", keyed, field("request_id", stringKind, optional, nil), ""},
		{"another format", keyed, field("request_id", stringKind, optional, format(enumInfo, protoreflect.ValueOfEnum(2))), ""},
		{"no string", keyed, field("request_id", bytesKind, optional, uuid4), ""},
		{"a message", keyed, nested, ""},
		{"a list", keyed, field("request_id", stringKind, repeated, uuid4), ""},
		{"a format that is no enum", keyed, field("request_id", stringKind, optional, format(intInfo, protoreflect.ValueOfInt32(1))), ""},
		{"another option of that name", keyed, field("request_id", stringKind, optional, text), ""},
		{"a method without keys", methodOptions(nil, idempotent), field("request_id", stringKind, optional, uuid4), ""},
		{"a method with nothing", nil, field("request_id", stringKind, optional, uuid4), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := api{method: test.method, request: []*descriptorpb.FieldDescriptorProto{test.field}}
			if got := policy.DeclaredOf(a.descriptor(t)).KeyField; got != test.want {
				t.Errorf("key field %q, want %q", got, test.want)
			}
		})
	}
}

// The same through the registry of this program, on generated code.
func TestDeclaredFor(t *testing.T) {
	_ = probev1.File_belay_probe_v1_probe_proto // linked
	for method, want := range map[string]string{
		"ProbeService/Undeclared":             "undeclared",
		"ProbeService/Read":                   "no_side_effects",
		"ProbeService/Idempotent":             "idempotent",
		"ProbeService/Keyed":                  "keyed, required",
		"ProbeService/KeyedOptional":          "keyed",
		"ProbeService/KeyedField":             "keyed, required",
		"ProbeService/ServerStream":           "no_side_effects",
		"ProbeService/ServerStreamUndeclared": "undeclared",
		"ProbeService/ClientStreamKeyed":      "keyed, required",
		"KeyedService/Inherits":               "keyed",
		"KeyedService/Reads":                  "no_side_effects",
		"KeyedService/Exempt":                 "undeclared",
	} {
		for _, slash := range []string{"", "/"} {
			d := policy.DeclaredFor(slash + "belay.probe.v1." + method)
			if got := says(d); got != want {
				t.Errorf("%s%s: declared %s, want %s (%s)", slash, method, got, want, d.Source)
			}
			if d.Method == nil || !strings.HasSuffix(method, "/"+string(d.Method.Name())) {
				t.Errorf("%s%s: the descriptor is that of %v", slash, method, d.Method)
			}
		}
	}
	if got := policy.DeclaredFor("belay.probe.v1.ProbeService/KeyedField").KeyField; got != "request_id" {
		t.Errorf("key field %q, want request_id", got)
	}
	if got := policy.DeclaredFor("belay.probe.v1.ProbeService/Keyed").KeyField; got != "" {
		t.Errorf("key field %q, want none: its request_id has no format", got)
	}
}

func TestFind_refuses(t *testing.T) {
	for _, test := range []struct {
		method     string
		want       string
		registered bool
	}{
		{"no.such.Service/Method", `service "no.such.Service": not in the protobuf registry of this program`, false},
		{"belay.probe.v1.ProbeService/Kyed", `method "belay.probe.v1.ProbeService/Kyed": service belay.probe.v1.ProbeService has no method Kyed`, true},
		{"belay.probe.v1.Request/text", `service "belay.probe.v1.Request": the name belongs to something that is not a service`, true},
		{"belay.probe.v1.ProbeService", `method "belay.probe.v1.ProbeService": want the form pkg.Service/Method`, true},
		{"belay.probe.v1.ProbeService/", `method "belay.probe.v1.ProbeService/": want the form pkg.Service/Method`, true},
		{"/Keyed", `method "/Keyed": want the form pkg.Service/Method`, true},
		{"//belay.probe.v1.ProbeService/Keyed", `method "//belay.probe.v1.ProbeService/Keyed": want the form pkg.Service/Method`, true},
		{"belay.probe.v1.ProbeService/Keyed/x", `method "belay.probe.v1.ProbeService/Keyed/x": want the form pkg.Service/Method`, true},
		{"", `method "": want the form pkg.Service/Method`, true},
		{"..\x00/Keyed", `service "..\x00": not in the protobuf registry of this program`, false},
	} {
		t.Run(test.method, func(t *testing.T) {
			m, err := policy.Find(test.method)
			if m != nil || err == nil {
				t.Fatalf("found %v", m)
			}
			if err.Error() != test.want {
				t.Errorf("got  %v\nwant %s", err, test.want)
			}
			if got := errors.Is(err, policy.ErrNotRegistered); got == test.registered {
				t.Errorf("errors.Is(%v, ErrNotRegistered) = %v", err, got)
			}
			// For a call, the same is no error: the method is undeclared, and why.
			d := policy.DeclaredFor(test.method)
			if d.Class != policy.Undeclared || d.Method != nil || d.Source != err.Error() {
				t.Errorf("declared %v by %q, want undeclared by %q", d.Class, d.Source, err)
			}
		})
	}
}

// A method's name comes from whoever makes the call: none of them panics.
func TestDeclaredFor_anyName(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.String(), rapid.StringMatching(`/?[a-z.]{0,8}/[A-Za-z/.*]{0,8}`)).Draw(t, "name")
		d := policy.DeclaredFor(name)
		if d.Class != policy.Undeclared || d.Source == "" {
			t.Fatalf("%q is declared %v by %q", name, d.Class, d.Source)
		}
	})
}
