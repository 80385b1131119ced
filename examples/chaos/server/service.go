package main

import (
	"context"
	"crypto/rand"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/chaos/chaosv1"
	"github.com/belayrpc/belay/examples/chaos/order"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// service writes the effects. It is a handler as any other, but that it lets
// itself be interrupted.
type service struct {
	chaosv1.UnimplementedChaosServiceServer
	*perpetrator

	store  *sqlstore.Store
	flaked sync.Map // keys of ENDING_FLAKY that have failed in this process
}

// Effect implements [chaosv1.ChaosServiceServer].
func (s *service) Effect(ctx context.Context, req *chaosv1.EffectRequest) (*chaosv1.EffectResponse, error) {
	s.executions.Add(1)
	s.tell("start", req.GetKey())
	s.at(ctx, order.HandlerStart)
	if deaf(ctx) {
		// A handler that has been slow, or asleep, and does not look whether it is
		// still wanted. The store must cope with it.
		ctx = context.WithoutCancel(ctx)
	}
	tx, err := s.store.Tx(ctx)
	if err != nil {
		return nil, unavailable(err)
	}
	token := rand.Text()
	if _, err := tx.ExecContext(ctx, `INSERT INTO effects (call_key, token) VALUES ($1, $2)`, req.GetKey(), token); err != nil {
		return nil, unavailable(err)
	}
	s.at(ctx, order.MidEffect)
	if req.GetWorkMs() > 0 {
		time.Sleep(time.Duration(req.GetWorkMs()) * time.Millisecond)
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO halves (call_key, token) VALUES ($1, $2)`, req.GetKey(), token); err != nil {
		return nil, unavailable(err)
	}
	switch req.GetEnding() {
	case chaosv1.Ending_ENDING_DECLINED:
		return nil, status.Error(codes.FailedPrecondition, "declined")
	case chaosv1.Ending_ENDING_FLAKY:
		if _, again := s.flaked.LoadOrStore(req.GetKey(), true); !again {
			return nil, status.Error(codes.Unavailable, "not now")
		}
	default:
	}
	return &chaosv1.EffectResponse{Token: token}, nil
}

// Cost implements [chaosv1.ChaosServiceServer].
func (s *service) Cost(context.Context, *chaosv1.CostRequest) (*chaosv1.CostResponse, error) {
	return &chaosv1.CostResponse{
		StoreStatements: s.statements.Load(), Connections: s.connections.Load(), Calls: s.calls.Load(), Executions: s.executions.Load(),
	}, nil
}

// unavailable: the database did not do it, and everything is undone.
func unavailable(err error) error { return status.Error(codes.Unavailable, err.Error()) }
