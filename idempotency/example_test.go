package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/belayrpc/belay/idempotency"
)

// An engine runs one call once, however often it comes. The gRPC edge, package
// interceptors, does this for a server; the same works for a queue's consumer.
func Example() {
	store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
	engine, err := idempotency.NewEngine(store, idempotency.Config{Scope: idempotency.SingleTenant})
	if err != nil {
		fmt.Println(err)
		return
	}
	charges := 0
	charge := func(context.Context) idempotency.Result {
		charges++
		return idempotency.Result{Response: wrapperspb.String("charged")}
	}
	call := idempotency.Call{
		Method:  "/bank.v1.Payments/Charge",
		Key:     idempotency.DeriveKey("orders", time.Time{}, "order-4711", "charge"),
		Request: wrapperspb.Int64(12900),
	}
	for range 3 {
		reply := engine.Do(context.Background(), call, charge)
		fmt.Println(reply.Mark, reply.Executed)
	}
	call.Request = wrapperspb.Int64(99900)
	fmt.Println(engine.Do(context.Background(), call, charge).Refusal.Reason)
	fmt.Println("charges:", charges)
	// Output:
	// executed yes
	// replayed yes
	// replayed yes
	// KEY_REUSED
	// charges: 1
}

// A client saves its key before it sends, and resumes with it after a crash.
func ExampleKey_MarshalText() {
	key := idempotency.Key{Value: "order-4711-charge", FirstSent: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)}
	saved, err := key.MarshalText()
	fmt.Println(string(saved), err)

	var resumed idempotency.Key
	fmt.Println(resumed.UnmarshalText(saved), resumed == key)
	// Output:
	// order-4711-charge 2026-03-04T05:06:07.000Z <nil>
	// <nil> true
}

// A handler says what it knows about its own effect.
func ExampleNoEffect() {
	errDown := errors.New("the card network is down")
	err := idempotency.NoEffect(errDown) // we did not even connect
	fmt.Println(err, errors.Is(err, errDown), idempotency.VerdictOf(err) == idempotency.VerdictNoEffect)
	// Output: the card network is down true true
}

// On call: a record whose outcome nobody knows is looked up by its ID, and
// answered once a person has found out.
func ExampleNewOutcome() {
	ctx := context.Background()
	store := idempotency.NewMemoryStore(idempotency.MemoryConfig{})
	engine, err := idempotency.NewEngine(store, idempotency.Config{Scope: idempotency.SingleTenant})
	if err != nil {
		fmt.Println(err)
		return
	}
	call := idempotency.Call{Method: "/bank.v1.Payments/Charge", Key: idempotency.Key{Value: "k1"}}
	timeout := &spb.Status{Code: int32(code.Code_DEADLINE_EXCEEDED), Message: "the card network did not answer"}
	charge := func(context.Context) idempotency.Result {
		return idempotency.Result{Status: timeout, Err: idempotency.UnknownEffect(errors.New(timeout.GetMessage()))}
	}
	engine.Do(ctx, call, charge)
	fmt.Println(engine.Do(ctx, call, charge).Refusal.Reason)

	outcome, err := idempotency.NewOutcome(wrapperspb.String("charged, says the bank"), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	id := idempotency.IDOf("single-tenant", "/bank.v1.Payments/Charge", "k1")
	fmt.Println(store.Resolve(ctx, id, idempotency.Resolution{State: idempotency.StateDone, Outcome: outcome}))

	reply := engine.Do(ctx, call, charge)
	response, _ := reply.Response.(*wrapperspb.StringValue)
	fmt.Println(reply.Mark, response.GetValue())
	// Output:
	// OUTCOME_UNKNOWN
	// <nil>
	// replayed charged, says the bank
}
