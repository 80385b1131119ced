//go:build unix

package main

import (
	"context"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/belayrpc/belay/examples/chaos/chaosv1"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

// A thousand calls with one key at the same moment, over three processes, with
// clients and servers as they come.
func TestDuplicates_OneKey(t *testing.T) {
	for _, c := range cells() {
		if c.phase == kills && c.mutant == unchanged {
			t.Run(c.store+"_"+c.mode, func(t *testing.T) { testDuplicates(t, c) })
		}
	}
}

const (
	duplicateFor = 5 * time.Second
	workMillis   = 100
)

func testDuplicates(t *testing.T, c cell) {
	t.Helper()
	h := testHarness(t)
	program, err := h.binaries.of(t.Context(), c.mutant)
	if err != nil {
		t.Fatal(err)
	}
	base, err := h.databases.open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(base.close)
	cfg := c.server(base.dsn)
	cfg.Lease, cfg.MaxExecution, cfg.IdleTimeout, cfg.LockTimeout, cfg.StoreTimeout = 0, 0, 0, 0, 0 // the defaults
	servers, err := startFleet(program, cfg, newOrders(c, goals{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(servers.close)
	before := costs(t, servers.addrs)

	payments := defaultClient(t, servers.addrs)
	key := idempotency.NewKey()
	tokens := make([]string, duplicates)
	errs := make([]error, duplicates)
	var all sync.WaitGroup
	start := make(chan struct{})
	for i := range duplicates {
		all.Go(func() {
			<-start
			ctx, cancel := context.WithTimeout(t.Context(), duplicateFor)
			defer cancel()
			resp, err := payments.Effect(ctx, &chaosv1.EffectRequest{Key: key.Value, WorkMs: workMillis}, interceptors.WithKey(key))
			tokens[i], errs[i] = resp.GetToken(), err
		})
	}
	close(start)
	all.Wait()

	for i := range duplicates {
		if errs[i] != nil || tokens[i] == "" || tokens[i] != tokens[0] {
			t.Fatalf("call %d = %q, %v; want %q", i, tokens[i], errs[i], tokens[0])
		}
	}
	effects, err := base.tokens(t.Context(), "effects")
	if err != nil || len(effects[key.Value]) != 1 || effects[key.Value][0] != tokens[0] {
		t.Errorf("effects = %v, %v; want one, %s", effects, err, tokens[0])
	}
	var executions, statements, calls int64
	for i, after := range costs(t, servers.addrs) {
		executions += after.GetExecutions() - before[i].GetExecutions()
		statements += after.GetStoreStatements() - before[i].GetStoreStatements()
		calls += after.GetCalls() - before[i].GetCalls()
		if after.GetConnections() > 2 {
			t.Errorf("server %d opened %d connections, want at most 2", i, after.GetConnections())
		}
	}
	if executions != 1 {
		t.Errorf("%d executions, want 1", executions)
	}
	if statements > 2*duplicates {
		t.Errorf("%d store statements for %d calls, want at most 2 each", statements, duplicates)
	}
	t.Logf("%d calls arrived as %d; %d store statements, %d execution", duplicates, calls, statements, executions)
}

// defaultClient has a channel to all servers and Belay as it comes.
func defaultClient(t *testing.T, addrs []string) chaosv1.ChaosServiceClient {
	t.Helper()
	belay, err := interceptors.NewClient()
	if err != nil {
		t.Fatal(err)
	}
	var state resolver.State
	for _, a := range addrs {
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: a}}})
	}
	servers := manual.NewBuilderWithScheme("dupes")
	servers.InitialState(state)
	conn, err := grpc.NewClient("dupes:///servers", append(belay.DialOptions(),
		grpc.WithResolvers(servers), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return chaosv1.NewChaosServiceClient(conn)
}

// costs asks each server, and so waits until it serves.
func costs(t *testing.T, addrs []string) []*chaosv1.CostResponse {
	t.Helper()
	var all []*chaosv1.CostResponse
	for _, a := range addrs {
		conn, err := grpc.NewClient(a, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		cost, err := chaosv1.NewChaosServiceClient(conn).Cost(t.Context(), &chaosv1.CostRequest{}, grpc.WaitForReady(true))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, cost)
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return all
}
