package policy_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

// api is a .proto of one service with one method, built at run time: what a
// program that reads descriptors from a file or from reflection has.
type api struct {
	service  *descriptorpb.ServiceOptions
	method   *descriptorpb.MethodOptions
	request  []*descriptorpb.FieldDescriptorProto
	client   bool // a stream of requests
	server   bool // a stream of responses
	unlinked bool // the request's own .proto is missing
}

func (a api) descriptor(t testing.TB) protoreflect.MethodDescriptor {
	t.Helper()
	input := ".test.api.Request"
	if a.unlinked {
		input = ".test.missing.Request"
	}
	file, err := protodesc.FileOptions{AllowUnresolvable: a.unlinked}.New(&descriptorpb.FileDescriptorProto{
		Name:    new("test/api.proto"),
		Package: new("test.api"),
		Syntax:  new("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{
			{Name: new("Request"), Field: a.request},
			{Name: new("Response")},
		},
		Service: []*descriptorpb.ServiceDescriptorProto{{
			Name:    new("Service"),
			Options: a.service,
			Method: []*descriptorpb.MethodDescriptorProto{{
				Name:            new("Method"),
				InputType:       new(input),
				OutputType:      new(".test.api.Response"),
				Options:         a.method,
				ClientStreaming: &a.client,
				ServerStreaming: &a.server,
			}},
		}},
	}, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	return file.Services().Get(0).Methods().Get(0)
}

func field(name string, kind descriptorpb.FieldDescriptorProto_Type, label descriptorpb.FieldDescriptorProto_Label, options *descriptorpb.FieldOptions) *descriptorpb.FieldDescriptorProto {
	return &descriptorpb.FieldDescriptorProto{Name: &name, Number: new(int32(1)), Type: &kind, Label: &label, Options: options}
}

// extension makes an extension that is linked into no program: it is known to
// the options it is set on and to no registry.
func extension(t testing.TB, pkg, name string, number int32, extendee string, as *descriptorpb.FieldDescriptorProto, messages ...*descriptorpb.DescriptorProto) protoreflect.ExtensionType {
	t.Helper()
	as.Name, as.Number, as.Extendee = &name, &number, &extendee
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name:        new("test/extension.proto"),
		Package:     &pkg,
		Syntax:      new("proto2"),
		Dependency:  []string{"google/protobuf/descriptor.proto"},
		MessageType: messages,
		Extension:   []*descriptorpb.FieldDescriptorProto{as},
	}, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	return dynamicpb.NewExtensionType(file.Extensions().Get(0))
}

func ofKind(kind descriptorpb.FieldDescriptorProto_Type, label descriptorpb.FieldDescriptorProto_Label) *descriptorpb.FieldDescriptorProto {
	return &descriptorpb.FieldDescriptorProto{Type: &kind, Label: &label}
}

func ofMessage(name string) *descriptorpb.FieldDescriptorProto {
	f := ofKind(descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL)
	f.TypeName = &name
	return f
}

// message makes a value of an extension's message type with some fields set.
func message(x protoreflect.ExtensionType, values map[protoreflect.Name]protoreflect.Value) proto.Message {
	m := x.New().Message()
	for name, v := range values {
		m.Set(m.Descriptor().Fields().ByName(name), v)
	}
	return m.Interface()
}
