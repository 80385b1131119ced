//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
)

// holdCommand makes the test's own binary a parent that starts a chain, prints
// where it listens and then waits to be killed.
const holdCommand = "hold"

func TestMain(m *testing.M) {
	if _, ok := serviceRole(os.Args); ok {
		main() // the chain starts this binary again, whichever it is
		return
	}
	if len(os.Args) == 2 && os.Args[1] == holdCommand {
		hold()
		return
	}
	goleak.VerifyTestMain(m)
}

func hold() {
	c, err := startChain(stackBelay, false, func(fact) {})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, role := range roles {
		_, _ = fmt.Fprintln(os.Stdout, c.processes[role].addr)
	}
	select {}
}

// The demo in small: real processes, one scenario, two stacks.
func TestReplyLost(t *testing.T) {
	var out, progress bytes.Buffer
	err := run(t.Context(), []string{"-scenario", "reply-lost", "-stack", "middleware,belay", "-duration", "3s", "-trace", "1"}, &out, &progress)
	if err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	noChildren(t)

	middleware := parseLine(t, out.String(), "reply-lost", stackMiddleware)
	if middleware["duplicates"] == 0 {
		t.Errorf("with retries that know no keys, 5 %% of 300 lost replies doubled nothing:\n%s", out.String())
	}
	belay := parseLine(t, out.String(), "reply-lost", stackBelay)
	// The ledger is asked once, since replies come from the record. That not all
	// need succeed is for machines too busy for a deadline of a second.
	if belay["calls"] != 300 || belay["duplicates"] != 0 || belay["success"] < 0.98 || belay["leaf_per_call"] > 1 {
		t.Errorf("belay: %v, want 300 calls, none doubled, all successful, one leaf call each:\n%s", belay, out.String())
	}
	for _, want := range []string{"attempt 2 · after", "key replayed", "• backoff", "that hold: 0"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output has no %q:\n%s", want, out.String())
		}
	}
}

// At each hop a retry: that is what the middle layers of a chain do to its end.
func TestLedgerDown(t *testing.T) {
	var out, progress bytes.Buffer
	err := run(t.Context(), []string{
		"-scenario", "ledger-down", "-stack", "middleware,belay-nobreaker", "-duration", "3s", "-rate", "60",
	}, &out, &progress)
	if err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	noChildren(t)

	// 27 where all of them fit into the user's deadline, which on a machine that
	// is busy with other tests they may not.
	if r := parseLine(t, out.String(), "ledger-down", stackMiddleware); r["leaf_per_call_steady"] <= 9 {
		t.Errorf("three hops of three attempts: %v leaf calls a call, want more than two hops make", r["leaf_per_call_steady"])
	}
	if r := parseLine(t, out.String(), "ledger-down", stackNoBreaker); r["leaf_per_call_steady"] > 1.02 {
		t.Errorf("belay: %v leaf calls a call, want at most 1.02", r["leaf_per_call_steady"])
	}
}

// The address and the port survive a kill -9 of the ledger.
func TestRestart(t *testing.T) {
	c, err := startChain(stackBelay, false, func(fact) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.keepSpare(); err != nil {
		t.Fatal(err)
	}
	addr := c.kill(roleLedger)
	if err := c.replaceLedger(addr); err != nil {
		t.Error(err)
	}
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Errorf("the ledger is not at its address again: %v", err)
	} else {
		_ = conn.Close()
	}
	c.stop()
	noChildren(t)
}

func TestCtrlC(t *testing.T) {
	for _, scenarios := range []string{"healthy,restart", "server-stream,upload"} {
		t.Run(scenarios, func(t *testing.T) { interrupted(t, scenarios) })
	}
}

// interrupted runs scenarios and stops when they are under way.
func interrupted(t *testing.T, scenarios string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read, write := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, []string{"-scenario", scenarios, "-duration", "1h"}, io.Discard, write)
		ended <- err
		_ = write.Close()
	}()
	lines := bufio.NewScanner(read)
	for range 2 { // what will be done, and that it is under way
		if !lines.Scan() {
			t.Fatal("no progress is shown")
		}
	}
	cancel()
	_, _ = io.Copy(io.Discard, read)
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("run returned %v, want context.Canceled", err)
	}
	noChildren(t)
}

// A parent that dies without a word takes its services with it.
func TestParentKilled(t *testing.T) {
	parent := exec.CommandContext(t.Context(), os.Args[0], holdCommand)
	stdout, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	var conns []net.Conn
	for range roles {
		if !lines.Scan() {
			t.Fatal("the chain did not start")
		}
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", lines.Text())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		conns = append(conns, conn)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // it was killed, and says so

	for i, conn := range conns {
		if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		// The server says hello, and then its process is gone.
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("service %s outlived its parent", roles[i])
		}
	}
}

// Every process sends its spans to a collector where one is named.
func TestExportsOTLP(t *testing.T) {
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	collector := &collector{services: make(chan string, 1024)}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	collectorv1.RegisterTraceServiceServer(server, collector)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+listener.Addr().String())

	var progress bytes.Buffer
	if err := run(t.Context(), []string{"-scenario", "healthy", "-stack", "belay", "-duration", "3s"}, io.Discard, &progress); err != nil {
		t.Errorf("%v\n%s", err, progress.String())
	}
	server.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	close(collector.services)
	seen := map[string]bool{}
	for name := range collector.services {
		seen[name] = true
	}
	for _, role := range append([]string{roleUser}, roles...) {
		if !seen[role] {
			t.Errorf("no spans of %s have arrived, only those of %v", role, seen)
		}
	}
}

type collector struct {
	collectorv1.UnimplementedTraceServiceServer

	services chan string
}

// Export implements [collectorv1.TraceServiceServer].
func (c *collector) Export(_ context.Context, req *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	for _, spans := range req.GetResourceSpans() {
		for _, a := range spans.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				c.services <- a.GetValue().GetStringValue()
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

// noChildren fails when this process has a child, running or dead.
func noChildren(t *testing.T) {
	t.Helper()
	if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); !errors.Is(err, syscall.ECHILD) {
		t.Errorf("a process is left behind: wait says %d, %v", pid, err)
	}
}

var pair = regexp.MustCompile(`(\w+)=([\d.]+)( |$)`)

// parseLine reads the numbers of one RESULT line.
func parseLine(t *testing.T, out, scenario, stack string) map[string]float64 {
	t.Helper()
	for line := range strings.Lines(out) {
		rest, ok := strings.CutPrefix(line, fmt.Sprintf("RESULT demo scenario=%s stack=%s ", scenario, stack))
		if !ok {
			continue
		}
		values := map[string]float64{}
		for _, m := range pair.FindAllStringSubmatch(strings.TrimSpace(rest), -1) {
			v, err := strconv.ParseFloat(m[2], 64)
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			values[m[1]] = v
		}
		return values
	}
	t.Fatalf("no RESULT line of %s with %s:\n%s", scenario, stack, out)
	return nil
}
