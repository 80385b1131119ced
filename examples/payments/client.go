package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/payments/paymentsv1"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

// charge is what a client wants done once, with the key that makes it once.
type charge struct {
	Key     idempotency.Key `json:"key"`
	Account string          `json:"account"`
	Cents   int64           `json:"cents"`
	Order   string          `json:"order"`
}

// chargeOnce charges c, or ends what an earlier run of this program began: its
// key and its request are in the file, and they are in the file before they are
// sent. It returns the charge that was made.
func chargeOnce(ctx context.Context, payments paymentsv1.PaymentsServiceClient, file string, c charge) (charge, *paymentsv1.ChargeResponse, error) {
	pending, err := load(file)
	if errors.Is(err, fs.ErrNotExist) {
		c.Key = idempotency.NewKey()
		pending, err = c, save(file, c)
	}
	if err != nil {
		return pending, nil, err
	}
	request := &paymentsv1.ChargeRequest{Account: pending.Account, AmountCents: pending.Cents, Order: pending.Order}
	receipt, err := payments.Charge(ctx, request, interceptors.WithKey(pending.Key))
	if err == nil || declined(err) { // it is over; anything else leaves the file for the next run
		err = errors.Join(err, forget(file))
	}
	return pending, receipt, err
}

// declined reports whether the service itself said no, for good.
func declined(err error) bool {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == errorDomain && info.GetReason() == reasonInsufficient {
			return true
		}
	}
	return false
}

func forget(file string) error { return os.Remove(file) } //nolint:gosec // see load

func load(file string) (charge, error) {
	text, err := os.ReadFile(file) //nolint:gosec // the person who runs the program names it
	if err != nil {
		return charge{}, err
	}
	var c charge
	if err := json.Unmarshal(text, &c); err != nil {
		return charge{}, fmt.Errorf("%s: %w", file, err)
	}
	return c, c.Key.Validate()
}

// save writes the file whole or not at all, and returns when the disk has it: a
// key that is half there, or not yet there, is none when the power comes back.
func save(file string, c charge) error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	dir := filepath.Dir(file)
	aside, err := os.CreateTemp(dir, filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	_, err = aside.Write(text)
	if err = errors.Join(err, aside.Sync(), aside.Close()); err == nil {
		err = os.Rename(aside.Name(), file) //nolint:gosec // see load
	}
	if err != nil {
		return errors.Join(err, os.Remove(aside.Name())) //nolint:gosec // see load
	}
	return syncDir(dir)
}

// syncDir makes a new name in a folder last.
func syncDir(dir string) error {
	d, err := os.Open(dir) //nolint:gosec // see load
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// dial opens a channel with Belay's defaults.
func dial(addr string) (*grpc.ClientConn, paymentsv1.PaymentsServiceClient, error) {
	belay, err := interceptors.NewClient()
	if err != nil {
		return nil, nil, err
	}
	conn, err := grpc.NewClient(addr, append(belay.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		return nil, nil, err
	}
	return conn, paymentsv1.NewPaymentsServiceClient(conn), nil
}
