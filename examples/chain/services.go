package main

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/examples/chain/chainv1"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

// The roles: which service a process is.
const (
	roleEdge     = "edge"
	roleOrders   = "orders"
	rolePayments = "payments"
	roleLedger   = "ledger"

	// roleAuditor stands beside the chain; see streams.go.
	roleAuditor = "auditor"
)

// roles in the order in which they are started: a service after those it calls.
var roles = []string{roleLedger, rolePayments, roleOrders, roleEdge}

// callees are the services that each role calls.
var callees = map[string][]string{
	roleEdge:     {roleOrders, roleLedger},
	roleOrders:   {rolePayments},
	rolePayments: {roleLedger},
	roleAuditor:  {roleLedger},
}

// keyFor names a step of an intent. A step that is tried again, by whichever
// hop, gets the same key again, so that it has its effect once. A key made
// inside the handler would be another one each time the handler runs.
//
// Where the stack is not Belay's, gRPC ignores the option.
func keyFor(step string, intent *chainv1.Intent) grpc.CallOption {
	return interceptors.WithKey(idempotency.DeriveKey("chain", intent.GetDecidedAt().AsTime(), step, intent.GetId()))
}

// edge is what users call.
type edge struct {
	chainv1.UnimplementedEdgeServiceServer

	orders chainv1.OrdersServiceClient
	ledger chainv1.LedgerServiceClient
}

// Checkout implements [chainv1.EdgeServiceServer].
func (s *edge) Checkout(ctx context.Context, req *chainv1.CheckoutRequest) (*chainv1.CheckoutResponse, error) {
	intent := req.GetIntent()
	placed, err := s.orders.Place(ctx, &chainv1.PlaceRequest{Intent: intent}, keyFor("place", intent))
	if err != nil {
		return nil, err
	}
	return &chainv1.CheckoutResponse{OrderId: placed.GetOrderId()}, nil
}

// Remark implements [chainv1.EdgeServiceServer].
func (s *edge) Remark(ctx context.Context, req *chainv1.RemarkRequest) (*chainv1.RemarkResponse, error) {
	if _, err := s.ledger.Append(ctx, &chainv1.AppendRequest{Intent: req.GetIntent()}); err != nil {
		return nil, err
	}
	return &chainv1.RemarkResponse{}, nil
}

// orders places orders.
type orders struct {
	chainv1.UnimplementedOrdersServiceServer

	payments chainv1.PaymentsServiceClient
}

// Place implements [chainv1.OrdersServiceServer].
func (s *orders) Place(ctx context.Context, req *chainv1.PlaceRequest) (*chainv1.PlaceResponse, error) {
	intent := req.GetIntent()
	if _, err := s.payments.Charge(ctx, &chainv1.ChargeRequest{Intent: intent}, keyFor("charge", intent)); err != nil {
		return nil, err
	}
	return &chainv1.PlaceResponse{OrderId: "order-" + intent.GetId()}, nil
}

// payments takes money, which is the effect that must not happen twice.
type payments struct {
	chainv1.UnimplementedPaymentsServiceServer

	ledger chainv1.LedgerServiceClient
	report *reporter
}

// Charge implements [chainv1.PaymentsServiceServer].
func (s *payments) Charge(ctx context.Context, req *chainv1.ChargeRequest) (*chainv1.ChargeResponse, error) {
	intent := req.GetIntent()
	if _, err := s.ledger.Get(ctx, &chainv1.GetRequest{Intent: intent}); err != nil {
		return nil, err
	}
	s.report.effect(effectCharge, intent.GetId())
	return &chainv1.ChargeResponse{Receipt: "receipt-" + intent.GetId()}, nil
}

// ledgerWork is how long the ledger takes when it is well.
const ledgerWork = 2 * time.Millisecond

// ledger is the leaf.
type ledger struct {
	chainv1.UnimplementedLedgerServiceServer

	faults *faults
	report *reporter

	imports atomic.Int64 // that were asked for; see fault.Blip
}

// Get implements [chainv1.LedgerServiceServer].
func (s *ledger) Get(ctx context.Context, req *chainv1.GetRequest) (*chainv1.GetResponse, error) {
	intent := req.GetIntent()
	s.report.leaf(intent.GetSecond(), time.Now().After(intent.GetGivesUpAt().AsTime()))
	if err := s.faults.strike(ctx); err != nil {
		return nil, err
	}
	if err := work(ctx, ledgerWork); err != nil {
		return nil, err
	}
	return &chainv1.GetResponse{Balance: 100}, nil
}

// Append implements [chainv1.LedgerServiceServer].
func (s *ledger) Append(ctx context.Context, req *chainv1.AppendRequest) (*chainv1.AppendResponse, error) {
	if err := s.faults.strike(ctx); err != nil {
		return nil, err
	}
	if err := work(ctx, ledgerWork); err != nil {
		return nil, err
	}
	s.report.effect(effectAppend, req.GetIntent().GetId())
	return &chainv1.AppendResponse{}, nil
}
