package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/payments/paymentsv1"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// service has no code for repeated calls, none for keys, and no COMMIT: the
// interceptor commits, when the handler has returned OK, together with the reply
// that a repeated call will get.
type service struct {
	paymentsv1.UnimplementedPaymentsServiceServer

	db    *sql.DB
	store *sqlstore.Store
}

// Charge implements [paymentsv1.PaymentsServiceServer].
func (s *service) Charge(ctx context.Context, req *paymentsv1.ChargeRequest) (*paymentsv1.ChargeResponse, error) {
	if req.GetAmountCents() <= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "amount_cents is %d: must be positive", req.GetAmountCents())
	}
	tx, err := s.store.Tx(ctx)
	if err != nil {
		return nil, unavailable(ctx, err)
	}
	receipt := &paymentsv1.ChargeResponse{ChargeId: rand.Text()}
	err = tx.QueryRowContext(ctx,
		`UPDATE accounts SET balance_cents = balance_cents - $1 WHERE name = $2 AND balance_cents >= $1 RETURNING balance_cents`,
		req.GetAmountCents(), req.GetAccount()).Scan(&receipt.BalanceCents)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, insufficient(req)
	case err != nil:
		return nil, unavailable(ctx, err)
	}
	if _, err = tx.ExecContext(ctx, `INSERT INTO charges (charge_id, account, order_name, amount_cents) VALUES ($1, $2, $3, $4)`,
		receipt.GetChargeId(), req.GetAccount(), req.GetOrder(), req.GetAmountCents()); err != nil {
		return nil, unavailable(ctx, err)
	}
	event, err := json.Marshal(map[string]any{"type": "charged", "account": req.GetAccount(), "order": req.GetOrder(), "cents": req.GetAmountCents()})
	if err != nil {
		return nil, err
	}
	// The event is committed with the charge, or neither is: nobody is told of a
	// charge that was rolled back, and none is forgotten.
	if _, err = tx.ExecContext(ctx, `INSERT INTO outbox (charge_id, event) VALUES ($1, $2)`, receipt.GetChargeId(), string(event)); err != nil {
		return nil, unavailable(ctx, err)
	}
	return receipt, nil
}

// GetBalance implements [paymentsv1.PaymentsServiceServer].
func (s *service) GetBalance(ctx context.Context, req *paymentsv1.GetBalanceRequest) (*paymentsv1.GetBalanceResponse, error) {
	var balance int64
	err := s.db.QueryRowContext(ctx, `SELECT balance_cents FROM accounts WHERE name = $1`, req.GetAccount()).Scan(&balance)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, status.Errorf(codes.NotFound, "account %q does not exist", req.GetAccount())
	case err != nil:
		return nil, unavailable(ctx, err)
	}
	return &paymentsv1.GetBalanceResponse{BalanceCents: balance}, nil
}

// The domain of this service's errors, and the reason that a client looks for.
const (
	errorDomain        = "payments.example"
	reasonInsufficient = "INSUFFICIENT_FUNDS"
)

// insufficient is a verdict: its code is final, so it is recorded, and a repeated
// call gets it again even when the account has been filled since.
func insufficient(req *paymentsv1.ChargeRequest) error {
	st := status.Newf(codes.FailedPrecondition, "account %q does not have %d cents", req.GetAccount(), req.GetAmountCents())
	if detailed, err := st.WithDetails(&errdetails.ErrorInfo{Domain: errorDomain, Reason: reasonInsufficient}); err == nil {
		st = detailed
	}
	return st.Err()
}

// unavailable: the database did not do it, and what it did is rolled back. The
// code says "not done, try again", so the key is free, and Belay's client comes
// back with it.
func unavailable(ctx context.Context, err error) error {
	slog.WarnContext(ctx, "the database", "error", err)
	return status.Error(codes.Unavailable, "the database is not available")
}
