package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/internal/probe"
	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
)

// keying is a method's policy with a key, and a field for it unless empty.
func keying(k belayv1.Keying, field string) *belayv1.MethodPolicy {
	p := &belayv1.MethodPolicy{}
	if k != belayv1.Keying_KEYING_UNSPECIFIED {
		p.Key = k.Enum()
	}
	if field != "" {
		p.KeyField = new(field)
	}
	return p
}

// registered is what a grpc.Server tells Check of its services.
type registered map[string]grpc.ServiceInfo

func (r registered) GetServiceInfo() map[string]grpc.ServiceInfo { return r }

// services counts the made-up services, whose names must not meet in the
// registry.
var services int

// serviceWith registers a service with one method M of these options, and
// returns it as a server would.
func serviceWith(t *testing.T, level descriptorpb.MethodOptions_IdempotencyLevel, p *belayv1.MethodPolicy, clientStreams, serverStreams bool) registered {
	t.Helper()
	options := &descriptorpb.MethodOptions{}
	if level != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN {
		options.IdempotencyLevel = level.Enum()
	}
	if p != nil {
		proto.SetExtension(options, belayv1.E_Method, p)
	}
	field := func(name string, number int32, kind descriptorpb.FieldDescriptorProto_Type, label descriptorpb.FieldDescriptorProto_Label) *descriptorpb.FieldDescriptorProto {
		return &descriptorpb.FieldDescriptorProto{Name: new(name), Number: new(number), Type: kind.Enum(), Label: label.Enum()}
	}
	const (
		text     = descriptorpb.FieldDescriptorProto_TYPE_STRING
		number   = descriptorpb.FieldDescriptorProto_TYPE_INT64
		optional = descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL
		repeated = descriptorpb.FieldDescriptorProto_LABEL_REPEATED
	)
	choice := field("in_choice", 4, text, optional)
	choice.OneofIndex = new(int32(0))
	services++
	pkg := fmt.Sprintf("check%d.test", services)
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: new(pkg + ".proto"), Package: new(pkg), Syntax: new("proto3"),
		Dependency: []string{"belay/v1/policy.proto"},
		MessageType: []*descriptorpb.DescriptorProto{{
			Name: new("Request"),
			Field: []*descriptorpb.FieldDescriptorProto{
				field("id", 1, text, optional), field("amount", 2, number, optional), field("names", 3, text, repeated), choice,
			},
			OneofDecl: []*descriptorpb.OneofDescriptorProto{{Name: new("choice")}},
		}},
		Service: []*descriptorpb.ServiceDescriptorProto{{
			Name: new("Service"),
			Method: []*descriptorpb.MethodDescriptorProto{{
				Name: new("M"), InputType: new("." + pkg + ".Request"), OutputType: new("." + pkg + ".Request"),
				Options: options, ClientStreaming: new(clientStreams), ServerStreaming: new(serverStreams),
			}},
		}},
	}, protoregistry.GlobalFiles)
	wantOK(t, err)
	wantOK(t, protoregistry.GlobalFiles.RegisterFile(file))
	return registered{pkg + ".Service": {Methods: []grpc.MethodInfo{{Name: "M", IsClientStream: clientStreams, IsServerStream: serverStreams}}}}
}

// What a .proto promises and a server cannot keep is found before it serves.
func TestCheck(t *testing.T) {
	const (
		noEffects  = descriptorpb.MethodOptions_NO_SIDE_EFFECTS
		idempotent = descriptorpb.MethodOptions_IDEMPOTENT
		unset      = belayv1.Keying_KEYING_UNSPECIFIED
		none       = belayv1.Keying_KEYING_NONE
		optional   = belayv1.Keying_KEYING_OPTIONAL
		required   = belayv1.Keying_KEYING_REQUIRED
	)
	for _, c := range []struct {
		name                  string
		level                 descriptorpb.MethodOptions_IdempotencyLevel
		policy                *belayv1.MethodPolicy
		client, server, store bool
		want                  []string // nil: fine
	}{
		{name: "nothing declared"},
		{name: "idempotent", level: idempotent},
		{name: "keyed", policy: keying(required, "id"), store: true},
		{name: "keyed and idempotent", level: idempotent, policy: keying(required, ""), store: true},
		{name: "switched off", policy: keying(none, "")},
		{name: "a keyed client stream", policy: keying(required, ""), client: true, store: true},

		{name: "key on a read", level: noEffects, policy: keying(required, ""), store: true, want: []string{"E1", "KEYING_REQUIRED", "NO_SIDE_EFFECTS"}},
		{name: "optional on idempotent", level: idempotent, policy: keying(optional, ""), store: true, want: []string{"E2", "KEYING_OPTIONAL", "IDEMPOTENT"}},
		{name: "no such field", policy: keying(required, "nope"), store: true, want: []string{"E3", `"nope"`, "no field of that name"}},
		{name: "a number", policy: keying(required, "amount"), store: true, want: []string{"E3", `"amount"`, "must be a string"}},
		{name: "a list", policy: keying(required, "names"), store: true, want: []string{"E3", `"names"`, "must be singular"}},
		{name: "in a oneof", policy: keying(required, "in_choice"), store: true, want: []string{"E3", `"in_choice"`, "must not be in a oneof"}},
		{name: "a field without a key", policy: keying(unset, "id"), want: []string{"E3", `"id"`, "needs key"}},
		{name: "a bidi stream", policy: keying(optional, ""), client: true, server: true, store: true, want: []string{"E4", "bidirectional"}},
		{name: "retention", policy: &belayv1.MethodPolicy{Key: required.Enum(), Retention: durationpb.New(-time.Second)}, store: true, want: []string{"E5", "-1s", "not negative"}},
		{name: "required on a server stream", policy: keying(required, ""), server: true, store: true, want: []string{"KEYING_REQUIRED", "streams responses"}},
		{name: "required without a store", policy: keying(required, ""), want: []string{"has no store", "WithIdempotency"}},
		{name: "optional without a store", policy: keying(optional, ""), want: []string{"has no store", "WithIdempotency"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var opts []interceptors.ServerOption
			if c.store {
				opts = append(opts, memory(idempotency.Config{}))
			}
			s := serviceWith(t, c.level, c.policy, c.client, c.server)
			err := newServer(t, opts...).Check(s)
			if c.want == nil {
				wantOK(t, err)
				return
			}
			if err == nil {
				t.Fatal("no error")
			}
			for name := range s {
				c.want = append(c.want, "/"+name+"/M")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not contain %q", err, w)
				}
			}
		})
	}

	t.Run("the probe, as it is registered", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := newServer(t, memory(idempotency.Config{}))
			probe.Start(t, probe.Registered(func(s *grpc.Server) {
				healthpb.RegisterHealthServer(s, health.NewServer())
				wantOK(t, server.Check(s))
				err := newServer(t).Check(s)
				for _, method := range []string{probe.Keyed, probe.KeyedOptional, probe.KeyedField, probe.Inherits} {
					if err == nil || !strings.Contains(err.Error(), method+": declared keyed") {
						t.Errorf("without a store: error %v does not name %s", err, method)
					}
				}
				for _, method := range []string{probe.Read, probe.Exempt, probe.Undeclared} {
					if strings.Contains(err.Error(), method+":") {
						t.Errorf("without a store: error %v names %s, which promises nothing", err, method)
					}
				}
			}))
			settle() // see start
		})
	})

	t.Run("not described anywhere", func(t *testing.T) {
		wantOK(t, newServer(t).Check(registered{"no.such.Service": {Methods: []grpc.MethodInfo{{Name: "M"}}}}))
	})

	t.Run("an unfit store", func(t *testing.T) {
		bad := &unfitStore{Store: idempotency.NewMemoryStore(idempotency.MemoryConfig{})}
		err := newServer(t, stored(bad, idempotency.Config{})).Check(registered{})
		if err == nil || !strings.Contains(err.Error(), `store of "*"`) || !errors.Is(err, errUnfit) {
			t.Errorf("error %v, want the store's", err)
		}
	})
}

var errUnfit = errors.New("the eviction policy is allkeys-lru: must be noeviction")

type unfitStore struct{ idempotency.Store }

func (s *unfitStore) Check(ctx context.Context) error {
	if _, bounded := ctx.Deadline(); !bounded {
		return errors.New("Check was given no deadline")
	}
	return errUnfit
}
