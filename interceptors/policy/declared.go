package policy

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
)

// Declared is what the .proto says about a method. The zero value is a method
// about which nothing is known: undeclared.
type Declared struct {
	// Class is never Unspecified after [DeclaredFor].
	Class Idempotency

	// Source says which statement Class comes from, for people:
	// "(belay.v1.method).key", "idempotency_level", "(belay.v1.service).key",
	// or why there is none.
	Source string

	// Required tells that the server refuses calls without a key.
	Required bool

	// KeyField is the request field that carries the key; empty when the key
	// travels in metadata.
	KeyField protoreflect.Name

	// Retention is the least time that the server remembers a key; 0 when the
	// .proto does not say.
	Retention time.Duration

	// Method is the descriptor; nil where the method is not registered.
	Method protoreflect.MethodDescriptor
}

// ErrNotRegistered is wrapped by [Find] when no linked-in .proto describes the
// method.
var ErrNotRegistered = errors.New("not in the protobuf registry of this program")

// Find returns the descriptor of a method given as "/pkg.Service/Method" or
// "pkg.Service/Method", from the files linked into this program.
func Find(fullMethod string) (protoreflect.MethodDescriptor, error) {
	service, method, ok := strings.Cut(strings.TrimPrefix(fullMethod, "/"), "/")
	if !ok || service == "" || method == "" || strings.Contains(method, "/") {
		return nil, fmt.Errorf("method %q: want the form pkg.Service/Method", fullMethod)
	}
	d, err := FindService(service)
	if err != nil {
		return nil, err
	}
	m := d.Methods().ByName(protoreflect.Name(method))
	if m == nil {
		return nil, fmt.Errorf("method %q: service %s has no method %s", fullMethod, service, method)
	}
	return m, nil
}

// FindService returns the descriptor of a service given as "pkg.Service".
func FindService(name string) (protoreflect.ServiceDescriptor, error) {
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	if err != nil {
		return nil, fmt.Errorf("service %q: %w", name, ErrNotRegistered)
	}
	s, ok := d.(protoreflect.ServiceDescriptor)
	if !ok {
		return nil, fmt.Errorf("service %q: the name belongs to something that is not a service", name)
	}
	return s, nil
}

// DeclaredFor reads what is declared of a method from the descriptors linked
// into this program. A method that cannot be found, and an option that cannot
// be read, leave it undeclared; Source says why. It does not panic.
func DeclaredFor(fullMethod string) Declared {
	m, err := Find(fullMethod)
	if err != nil {
		return Declared{Class: Undeclared, Source: err.Error()}
	}
	return DeclaredOf(m)
}

// DeclaredOf is DeclaredFor on a descriptor. The first of these that says
// anything decides: (belay.v1.method).key, idempotency_level, for unary methods
// (belay.v1.service).key.
func DeclaredOf(m protoreflect.MethodDescriptor) Declared {
	d := Declared{Class: Undeclared, Source: "nothing is declared", Method: m}
	level := levelOf(m)
	own := methodOption(m)
	d.Retention = own.GetRetention().AsDuration()

	key := own.GetKey()
	keySource := "(belay.v1.method).key"
	unary := !m.IsStreamingClient() && !m.IsStreamingServer()
	if key == belayv1.Keying_KEYING_UNSPECIFIED && level == descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN && unary {
		service := serviceOption(m)
		key = service.GetKey()
		keySource = "(belay.v1.service).key"
		if d.Retention == 0 {
			d.Retention = service.GetRetention().AsDuration()
		}
	}

	switch {
	case key == belayv1.Keying_KEYING_OPTIONAL || key == belayv1.Keying_KEYING_REQUIRED:
		if problem := contradiction(key, level); problem != "" {
			d.Source = problem
			return d
		}
		d.Class, d.Source = Keyed, keySource
		d.Required = key == belayv1.Keying_KEYING_REQUIRED
		d.KeyField = keyField(m, own.GetKeyField())
	case level == descriptorpb.MethodOptions_NO_SIDE_EFFECTS:
		d.Class, d.Source = NoSideEffects, "idempotency_level"
	case level == descriptorpb.MethodOptions_IDEMPOTENT:
		d.Class, d.Source = Idempotent, "idempotency_level"
	case key == belayv1.Keying_KEYING_NONE:
		d.Source = keySource + " is KEYING_NONE"
	}
	return d
}

// contradiction says why two statements about a method cannot both hold, in
// which case neither is relied on.
func contradiction(key belayv1.Keying, level descriptorpb.MethodOptions_IdempotencyLevel) string {
	switch {
	case level == descriptorpb.MethodOptions_NO_SIDE_EFFECTS:
		return "contradiction: a key on a method with idempotency_level = NO_SIDE_EFFECTS"
	case level == descriptorpb.MethodOptions_IDEMPOTENT && key == belayv1.Keying_KEYING_OPTIONAL:
		return "contradiction: KEYING_OPTIONAL with idempotency_level = IDEMPOTENT: a generic client would repeat without a key"
	}
	return ""
}

// keyField is the request field that holds the key: the declared one, or
// AIP-155's request_id. A declared field that does not exist is left to
// Server.Check and the linter; here it is returned as it stands, so that the
// caller's own look-up fails with its name.
func keyField(m protoreflect.MethodDescriptor, declared string) protoreflect.Name {
	if declared != "" {
		return protoreflect.Name(declared)
	}
	f := m.Input().Fields().ByName("request_id")
	if f != nil && f.Kind() == protoreflect.StringKind && !f.IsList() && isUUID4(f) {
		return f.Name()
	}
	return ""
}

// isUUID4 reads (google.api.field_info).format == UUID4 without depending on
// the package that declares it: only programs that link it can have it.
func isUUID4(f protoreflect.FieldDescriptor) bool {
	const uuid4 = 1 // google.api.FieldInfo.Format.UUID4
	info := extensionOf(f.Options(), "google.api.field_info")
	if info == nil {
		return false
	}
	format := info.Descriptor().Fields().ByName("format")
	return format != nil && format.Kind() == protoreflect.EnumKind && !format.IsList() && info.Get(format).Enum() == uuid4
}

func levelOf(m protoreflect.MethodDescriptor) descriptorpb.MethodOptions_IdempotencyLevel {
	options, _ := m.Options().(*descriptorpb.MethodOptions)
	return options.GetIdempotencyLevel()
}

// methodOption returns a policy that says nothing where the option is absent or
// its extension was not linked when the file was read.
func methodOption(m protoreflect.MethodDescriptor) *belayv1.MethodPolicy {
	p := new(belayv1.MethodPolicy)
	readOption(m.Options(), "belay.v1.method", p)
	return p
}

// serviceOption is methodOption for the service of the method.
func serviceOption(m protoreflect.MethodDescriptor) *belayv1.ServicePolicy {
	p := new(belayv1.ServicePolicy)
	readOption(m.Parent().Options(), "belay.v1.service", p)
	return p
}

// readOption copies the option of that name into p, and leaves p empty where
// there is none that can be read. It goes by the wire form: a descriptor that
// was built at run time may hold the option as another Go type of the same
// message.
func readOption(options proto.Message, name protoreflect.FullName, p proto.Message) {
	option := extensionOf(options, name)
	if option == nil {
		return
	}
	wire, err := proto.Marshal(option.Interface())
	if err != nil || proto.Unmarshal(wire, p) != nil {
		proto.Reset(p)
	}
}

// extensionOf returns the message that options hold under the full name of an
// extension, or nil. It goes by name: [proto.GetExtension] goes by number, and
// panics where another extension with the same number holds another type.
func extensionOf(options proto.Message, name protoreflect.FullName) protoreflect.Message {
	var found protoreflect.Message
	options.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if !f.IsExtension() || f.FullName() != name {
			return true
		}
		if f.Message() != nil && f.Cardinality() != protoreflect.Repeated {
			found = v.Message()
		}
		return false
	})
	return found
}
