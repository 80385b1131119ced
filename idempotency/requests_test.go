package idempotency_test

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

// flatRequest has 8 fields and no message in it.
func flatRequest() *probev1.Request {
	return &probev1.Request{
		RequestId: "order-4711", Text: "charge the card on file", Number: 129900, Payload: []byte("0123456789abcdef"),
		Ratio: 0.19, Color: 1, Secret: "4242", Limit: new(int64(0)),
	}
}

// mapRequest is flatRequest and a map with 20 entries.
func mapRequest() *probev1.Request {
	r := flatRequest()
	r.Labels = make(map[string]string)
	for i := range 20 {
		r.Labels[fmt.Sprintf("label-%02d", i)] = fmt.Sprintf("value-%02d", i)
	}
	return r
}

// fullRequest has every shape of field.
func fullRequest(tb testing.TB) *probev1.Request {
	tb.Helper()
	node := func(name string) *probev1.Node {
		return &probev1.Node{
			Name: name, Amount: -7,
			Children:   map[string]*probev1.Node{"x": {Name: "x"}, "y": {Amount: 1}, "z": {}},
			ClientTime: timestamppb.New(time.Unix(1, 0)),
		}
	}
	r := mapRequest()
	r.Numbers = []int32{3, 1, 2, -1}
	r.Names = []string{"b", "a", ""}
	r.Nodes = map[int64]*probev1.Node{-1: node("minus"), 0: node("zero"), 9: node("nine")}
	r.Node = node("node")
	r.List = []*probev1.Node{node("first"), {}, node("second")}
	r.Any = unsortedAny(tb, node("packed"))
	r.Choice = &probev1.Request_ChoiceNode{ChoiceNode: node("choice")}
	r.ClientTime = timestamppb.New(time.Unix(2, 0))
	return r
}

// unsortedAny packs m as an encoder does that does not sort maps.
func unsortedAny(tb testing.TB, m proto.Message) *anypb.Any {
	tb.Helper()
	return &anypb.Any{TypeUrl: "type.googleapis.com/" + string(m.ProtoReflect().Descriptor().FullName()), Value: marshal(tb, m)}
}

func marshal(tb testing.TB, m proto.Message) []byte {
	tb.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}
