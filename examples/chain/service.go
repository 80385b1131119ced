package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"slices"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/examples/chain/chainv1"
)

// serveCommand is the first argument of a process that is a service; the
// second is its role.
const serveCommand = "serve"

// serve is the main function of a service. It returns when in ends, and the
// process is to end with it.
func serve(role string, in io.Reader, out io.Writer) (err error) {
	// Ctrl-C reaches the whole process group. Here it is the parent's to act on.
	signal.Ignore(os.Interrupt)
	defer signal.Reset(os.Interrupt)

	orders := json.NewDecoder(in)
	var cfg config
	if err := orders.Decode(&cfg); err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	report := newReporter(out)

	flush, err := startTracing(context.Background(), role, report)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), flushLimit)
		defer cancel()
		err = errors.Join(err, flush(ctx))
	}()

	s := service{role: role, config: cfg, report: report}
	server, err := s.build()
	if err != nil {
		return err
	}
	addr, err := serveAt(server, "127.0.0.1:0")
	if err != nil {
		return err
	}
	report.send(fact{Listening: addr})

	for {
		var o order
		switch err := orders.Decode(&o); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("reading an order: %w", err)
		}
		s.faults.set(o.Fault)
		if o.Listen != "" {
			if _, err := serveAt(server, o.Listen); err != nil {
				return err
			}
		}
		if o.Drill != nil && s.auditor != nil {
			go s.auditor.run(*o.Drill) // ends with this process, if not before
		}
		report.send(fact{Ack: o.Ack})
	}
}

// serveAt listens and returns the address. Nobody stops the server: Stop waits
// for connections that have not yet said hello, for minutes, and the end of this
// process stops everything.
func serveAt(server *grpc.Server, addr string) (string, error) {
	listener, err := new(net.ListenConfig).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return "", err
	}
	go func() { _ = server.Serve(listener) }()
	return listener.Addr().String(), nil
}

// service is one process of the chain while it is put together.
type service struct {
	role   string
	config config
	report *reporter
	faults faults

	auditor *auditor // nil in every other role
}

// build returns the server, with its role's service registered.
func (s *service) build() (*grpc.Server, error) {
	stack, err := newStack(s.config.Stack)
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer(append(
		[]grpc.ServerOption{grpc.ChainUnaryInterceptor(s.faults.loseReplies)}, // what is outside of everything
		stack.serve...,
	)...)
	peers := map[string]*grpc.ClientConn{}
	for _, peer := range callees[s.role] {
		conn, err := s.dial(peer, stack)
		if err != nil {
			return nil, err
		}
		peers[peer] = conn
	}

	switch s.role {
	case roleEdge:
		chainv1.RegisterEdgeServiceServer(server, &edge{
			orders: chainv1.NewOrdersServiceClient(peers[roleOrders]),
			ledger: chainv1.NewLedgerServiceClient(peers[roleLedger]),
		})
	case roleOrders:
		chainv1.RegisterOrdersServiceServer(server, &orders{
			payments: chainv1.NewPaymentsServiceClient(peers[rolePayments]),
		})
	case rolePayments:
		chainv1.RegisterPaymentsServiceServer(server, &payments{
			ledger: chainv1.NewLedgerServiceClient(peers[roleLedger]), report: s.report,
		})
	case roleLedger:
		chainv1.RegisterLedgerServiceServer(server, &ledger{faults: &s.faults, report: s.report})
	case roleAuditor: // it is called by nobody
		s.auditor = &auditor{ledger: chainv1.NewLedgerServiceClient(peers[roleLedger]), report: s.report}
	default:
		return nil, fmt.Errorf("role %q: must be one of %q", s.role, roles)
	}
	return server, stack.check(server)
}

func (s *service) dial(peer string, stack stack) (*grpc.ClientConn, error) {
	opts := slices.Concat(stack.dial, dialOptions()) // of two that set the same, the later one counts
	if s.config.CountAtCaller {
		opts = append(opts, grpc.WithChainUnaryInterceptor(s.countInvocations)) // the innermost: it sees each attempt
	}
	return grpc.NewClient(s.config.Peers[peer], opts...)
}

// countInvocations counts what the last caller asks of the leaf, also when
// there is no leaf any more to count it.
func (s *service) countInvocations(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
	invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	if get, ok := req.(*chainv1.GetRequest); ok {
		s.report.invoked(get.GetIntent().GetSecond())
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}
