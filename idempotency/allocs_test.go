package idempotency_test

import (
	"strconv"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/belayrpc/belay/idempotency"
)

// The bars are what the code needs today. An allocation more on these paths is
// paid by every keyed call of every server.
func TestAllocations(t *testing.T) {
	bar := func(name string, most float64, f func()) {
		t.Helper()
		if n := testing.AllocsPerRun(200, f); n > most && !raceEnabled {
			t.Errorf("%s: %v allocations: want at most %v", name, n, most)
		}
	}
	bar("IDOf", 0, func() {
		idempotency.IDOf("spiffe://bank/orders", "/bank.v1.Payments/Charge", "5f0c8f6e-8a3a-4d4e-9d0e-0a1b2c3d4e5f")
	})
	bar("Key.Validate", 0, func() { _ = idempotency.Key{Value: "5f0c8f6e-8a3a-4d4e-9d0e-0a1b2c3d4e5f"}.Validate() })

	f := newFingerprinter(t)
	flat, withMap := flatRequest(), mapRequest()
	bar("fingerprint, flat", 1, func() { f.Of(flat) })
	bar("fingerprint, map of 20", 46, func() { f.Of(withMap) })

	e, err := idempotency.NewEngine(newMemory(t), idempotency.Config{Scope: idempotency.SingleTenant})
	if err != nil {
		t.Fatal(err)
	}
	call := idempotency.Call{Method: method, Request: flat, NewResponse: func() proto.Message { return &wrapperspb.StringValue{} }}
	run := answering(ok("done"))
	n := 0
	bar("executed", 26, func() {
		n++
		call.Key.Value = "key-" + strconv.Itoa(n)
		e.Do(bg, call, run)
	})
	bar("replayed", 19, func() { e.Do(bg, call, run) })
	if err := e.Drain(bg); err != nil {
		t.Fatal(err)
	}
}
