package probe

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// The full names of the probe's methods, in the form that interceptors see.
const (
	Undeclared    = probev1.ProbeService_Undeclared_FullMethodName
	Read          = probev1.ProbeService_Read_FullMethodName
	Idempotent    = probev1.ProbeService_Idempotent_FullMethodName
	Keyed         = probev1.ProbeService_Keyed_FullMethodName
	KeyedOptional = probev1.ProbeService_KeyedOptional_FullMethodName
	KeyedField    = probev1.ProbeService_KeyedField_FullMethodName

	ServerStream           = probev1.ProbeService_ServerStream_FullMethodName
	ClientStream           = probev1.ProbeService_ClientStream_FullMethodName
	Bidi                   = probev1.ProbeService_Bidi_FullMethodName
	ServerStreamUndeclared = probev1.ProbeService_ServerStreamUndeclared_FullMethodName
	ClientStreamKeyed      = probev1.ProbeService_ClientStreamKeyed_FullMethodName

	Inherits = probev1.KeyedService_Inherits_FullMethodName
	Reads    = probev1.KeyedService_Reads_FullMethodName
	Exempt   = probev1.KeyedService_Exempt_FullMethodName
)

// Call makes one unary call by the method's full name, so that a table of
// methods needs no table of stubs. Safe for concurrent use.
func Call(ctx context.Context, cc grpc.ClientConnInterface, method string, req *probev1.Request, opts ...grpc.CallOption) (*probev1.Response, error) {
	resp := new(probev1.Response)
	// The generated stubs mark their methods as static, and so telemetry sees
	// their names instead of "other"; a call through here must look the same.
	opts = append([]grpc.CallOption{grpc.StaticMethod()}, opts...)
	if err := cc.Invoke(ctx, method, req, resp, opts...); err != nil {
		return nil, err
	}
	return resp, nil
}

// kind is which side of a method streams.
type kind struct {
	clientStreams, serverStreams bool
}

var unary = kind{}

// kinds is every method of the probe, by full name.
var kinds = kindsOf(&probev1.ProbeService_ServiceDesc, &probev1.KeyedService_ServiceDesc)

func kindsOf(services ...*grpc.ServiceDesc) map[string]kind {
	all := map[string]kind{}
	for _, svc := range services {
		for _, m := range svc.Methods {
			all["/"+svc.ServiceName+"/"+m.MethodName] = unary
		}
		for _, s := range svc.Streams {
			all["/"+svc.ServiceName+"/"+s.StreamName] = kind{clientStreams: s.ClientStreams, serverStreams: s.ServerStreams}
		}
	}
	return all
}

// mustKnow panics on a method name that no call can ever have: the test that
// uses it would pass without testing anything.
func mustKnow(where, method string) kind {
	k, ok := kinds[method]
	if !ok {
		panic(fmt.Sprintf("probe: %s: %q is not a method of the probe; want a full name such as %q", where, method, Read))
	}
	return k
}
