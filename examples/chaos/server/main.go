// Command server is one of the servers of the chaos runs. It is an ordinary
// server with Belay and a SQL store in it; what breaks it sits outside, in a hook
// around the database's driver, an interceptor and a stats handler.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/examples/chaos/chaosv1"
	"github.com/belayrpc/belay/examples/chaos/order"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

func main() {
	if err := run(os.Args[1:], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "chaos server:", err)
		os.Exit(1)
	}
}

// run serves until in ends, and the process is to end with it.
func run(args []string, in io.Reader) error {
	// Ctrl-C reaches the whole process group. Here it is the parent's to act on.
	signal.Ignore(os.Interrupt, syscall.SIGTERM)
	if len(args) != 1 {
		return fmt.Errorf("%d arguments: must be one, the configuration in JSON; `make chaos` starts this program", len(args))
	}
	var cfg order.Server
	if err := json.Unmarshal([]byte(args[0]), &cfg); err != nil {
		return fmt.Errorf("the configuration: %w", err)
	}
	slog.SetDefault(slog.New(slog.DiscardHandler)) // what is logged here is what this program provokes

	p := &perpetrator{report: os.NewFile(order.ReportFile, "report")}
	store, err := openStore(cfg, p)
	if err != nil {
		return err
	}
	belay, err := interceptors.NewServer(interceptors.WithIdempotency(store, idempotency.Config{
		Scope: idempotency.SingleTenant, Lease: cfg.Lease, DisableRenewal: cfg.NoRenewal,
		MaxExecution: cfg.MaxExecution, StoreTimeout: cfg.StoreTimeout,
	}))
	if err != nil {
		return err
	}
	options := append([]grpc.ServerOption{
		grpc.StatsHandler(p),
		grpc.ChainUnaryInterceptor(p.intercept),
	}, belay.ServerOptions()...)
	s := grpc.NewServer(options...)
	chaosv1.RegisterChaosServiceServer(s, &service{store: store, perpetrator: p})
	if err := check(belay, s); err != nil {
		return err
	}
	listener, err := net.FileListener(os.NewFile(order.ListenerFile, "listener"))
	if err != nil {
		return fmt.Errorf("the listener: %w", err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(listener) }()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, in) // whichever way it ends
	}()
	select {
	case err := <-served:
		return err
	case <-ended:
		return nil
	}
}

// check asks again when the reply was lost, as anything else here may be.
func check(belay *interceptors.Server, s *grpc.Server) (err error) {
	for range checkTries {
		if err = belay.Check(s); err == nil {
			return nil
		}
	}
	return err
}

const checkTries = 5
