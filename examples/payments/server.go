package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/examples/payments/paymentsv1"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

const (
	sweepEvery   = time.Minute
	stopPatience = 10 * time.Second
)

// serve runs the service until ctx ends.
func serve(ctx context.Context, dsn, listen, pages string, out io.Writer) error {
	db, store, err := openDatabase(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()

	// Two lines of Belay. Scope says whose keys these are; with several tenants it
	// returns the authenticated one (idempotency.ScopeFromTLS, or your own).
	belay, err := interceptors.NewServer(interceptors.WithIdempotency(store, idempotency.Config{Scope: idempotency.SingleTenant}))
	if err != nil {
		return err
	}
	s := grpc.NewServer(belay.ServerOptions( /* grpc.ChainUnaryInterceptor(yours...) */ )...) //nolint:contextcheck // a stream has its own
	paymentsv1.RegisterPaymentsServiceServer(s, &service{db: db, store: store})
	if err := belay.Check(s); err != nil { //nolint:contextcheck // methods, schema and durability are what they must be; it bounds itself
		return err
	}

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	failed := make(chan error, 3) // one for each goroutine below, so that none waits
	go func() { failed <- s.Serve(listener) }()
	sweeping, stopSweeping := context.WithCancel(ctx)
	defer stopSweeping()
	go func() { failed <- idempotency.RunSweeper(sweeping, store, sweepEvery) }()
	if pages != "" {
		page, err := servePages(ctx, pages, &desk{db: db, store: store, postgres: isPostgres(dsn)}, failed)
		if err != nil {
			return err
		}
		defer func() { _ = page.Close() }()
		if _, err := fmt.Fprintln(out, "pages on", page.Addr); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintln(out, "serving on", listener.Addr()); err != nil {
		return err
	}
	select {
	case err = <-failed:
	case <-ctx.Done():
		err = nil
	}
	stop(s)
	if errors.Is(err, context.Canceled) { // the sweeper, told so by ctx
		err = nil
	}
	return err
}

// stop lets calls end, for a while.
func stop(s *grpc.Server) {
	timer := time.AfterFunc(stopPatience, s.Stop)
	defer timer.Stop()
	s.GracefulStop()
}

func servePages(ctx context.Context, addr string, d *desk, failed chan<- error) (*http.Server, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	server := &http.Server{Addr: l.Addr().String(), Handler: d.pages(), ReadHeaderTimeout: time.Second}
	go func() { failed <- server.Serve(l) }()
	return server, nil
}
