package interceptors_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// clientOp is one thing that a client does to its call. It returns what it saw.
type clientOp struct {
	name string
	run  func(c *tableCall) string
}

// tableCall is the call of one row, run one way.
type tableCall struct {
	ctx     context.Context //nolint:containedctx // it lives for one row
	conn    *grpc.ClientConn
	method  string
	stream  grpc.ClientStream
	header  metadata.MD
	trailer metadata.MD
	last    error
}

var (
	opCall = clientOp{"call", func(c *tableCall) string {
		resp, err := probe.Call(c.ctx, c.conn, c.method, request("q"), grpc.Header(&c.header), grpc.Trailer(&c.trailer))
		c.last = err
		if err == nil {
			return resp.GetText()
		}
		return outcome(err)
	}}
	opClose = clientOp{"close", func(c *tableCall) string { return outcome(c.stream.CloseSend()) }}
	opRecv  = clientOp{"recv", func(c *tableCall) string {
		m, err := recv(c.stream)
		c.last = err
		if err == nil {
			return m
		}
		return outcome(err)
	}}
	// opRecvAll reads to the end; what came before it is written in front.
	opRecvAll = clientOp{"recvAll", func(c *tableCall) string {
		got, err := drain(c.stream)
		c.last = err
		if err == nil {
			return strings.Join(append(got, "EOF"), ",")
		}
		return strings.Join(append(got, outcome(err)), ",")
	}}
	opHeader = clientOp{"header", func(c *tableCall) string {
		md, err := c.stream.Header()
		if err != nil {
			return outcome(err)
		}
		if md == nil {
			return "none"
		}
		return "h=" + one(md, "h")
	}}
	opTrailer  = clientOp{"trailer", func(c *tableCall) string { return "t=" + one(c.stream.Trailer(), "t") }}
	opMetadata = clientOp{"metadata", func(c *tableCall) string { return "h=" + one(c.header, "h") + ",t=" + one(c.trailer, "t") }}
	opDetails  = clientOp{"details", func(c *tableCall) string { return strconv.Itoa(len(status.Convert(c.last).Details())) }}
)

func opSend(text string) clientOp {
	return clientOp{"send", func(c *tableCall) string {
		return outcome(c.stream.SendMsg(&probev1.Request{Text: text, Number: 2}))
	}}
}

// saw is what a client saw, op by op, and how often the handler ran.
type saw struct {
	client string
	hits   int
}

const nativeConfig = `{"methodConfig":[{"name":[{"service":"belay.probe.v1.ProbeService"}],"retryPolicy":{
	"maxAttempts":4,"initialBackoff":"0.01s","maxBackoff":"0.1s","backoffMultiplier":2,"retryableStatusCodes":["UNAVAILABLE"]}}]}`

// One table of what a server does, run by run, and what a client does. Every row
// is run without retries, with gRPC's own and with Belay's.
func TestServerOpsByClientOps(t *testing.T) {
	hint := 20 * time.Millisecond
	header := metadata.Pairs("h", "one")
	trailer := metadata.Pairs("t", "one")
	u := probe.Step{Code: codes.Unavailable}
	uWithHeader := probe.Step{Header: header, Trailer: trailer, Code: codes.Unavailable}
	flushed := func(ops ...probe.Op) probe.Step {
		return probe.Step{Ops: append([]probe.Op{probe.Header("h", "one")}, ops...), Code: codes.Unavailable}
	}
	ops := func(code codes.Code, ops ...probe.Op) probe.Step { return probe.Step{Ops: ops, Code: code} }

	ask := []clientOp{opSend("q"), opClose, opRecvAll}
	askHeader := []clientOp{opSend("q"), opClose, opHeader, opRecvAll}
	up := []clientOp{opSend("a"), opSend("b"), opClose, opRecv}
	chat := []clientOp{opSend("a"), opSend("b"), opClose, opRecvAll}
	pingPong := []clientOp{opSend("a"), opRecv, opSend("b"), opRecv, opClose, opRecvAll}

	const (
		commit     = "native retry ends when a header arrives; Belay's when the application sees one"
		undeclared = "native retry repeats what is configured; Belay what is declared repeatable"
		hinted     = "a delay that the server asks for by RetryInfo is unknown to native retry"
		unread     = "the attempt has ended with something unread, so the message is kept in case that a failure follows"
	)
	for _, row := range []struct {
		name                 string
		method               string
		server               []probe.Step
		client               []clientOp
		bare, native, belays saw
		why                  string // Belay differs from native retry; empty: it does not
	}{
		// Unary.
		{
			name: "unary, fails once", method: probe.Idempotent, server: []probe.Step{u}, client: []clientOp{opCall},
			bare: saw{"Unavailable", 1}, native: saw{"q", 2}, belays: saw{"q", 2},
		},
		{
			name: "unary, fails always", method: probe.Idempotent, server: []probe.Step{u, u, u, u, u}, client: []clientOp{opCall},
			bare: saw{"Unavailable", 1}, native: saw{"Unavailable", 4}, belays: saw{"Unavailable", 4},
		},
		{
			name: "unary, fails with a header", method: probe.Idempotent, server: []probe.Step{uWithHeader}, client: []clientOp{opCall, opMetadata},
			bare: saw{"Unavailable;h=one,t=one", 1}, native: saw{"Unavailable;h=one,t=one", 1}, belays: saw{"q;h=,t=", 2}, why: commit,
		},
		{
			name: "unary, undeclared", method: probe.Undeclared, server: []probe.Step{u}, client: []clientOp{opCall},
			bare: saw{"Unavailable", 1}, native: saw{"q", 2}, belays: saw{"Unavailable", 1}, why: undeclared,
		},
		{
			name: "unary, says wait in a detail", method: probe.Idempotent,
			server: []probe.Step{{Code: codes.ResourceExhausted, RetryInfo: &hint}}, client: []clientOp{opCall, opDetails},
			bare: saw{"ResourceExhausted;1", 1}, native: saw{"ResourceExhausted;1", 1}, belays: saw{"q;0", 2}, why: hinted,
		},
		{
			name: "unary, a verdict", method: probe.Idempotent, server: []probe.Step{{Code: codes.NotFound}}, client: []clientOp{opCall},
			bare: saw{"NotFound", 1}, native: saw{"NotFound", 1}, belays: saw{"NotFound", 1},
		},

		// Server streaming.
		{
			name: "server stream, succeeds", method: probe.ServerStream, client: ask,
			bare: saw{"OK;OK;1:q,2:q,EOF", 1}, native: saw{"OK;OK;1:q,2:q,EOF", 1}, belays: saw{"OK;OK;1:q,2:q,EOF", 1},
		},
		{
			name: "server stream, succeeds with nothing", method: probe.ServerStream, server: []probe.Step{ops(codes.OK, probe.Recv(1))}, client: askHeader,
			bare: saw{"OK;OK;none;EOF", 1}, native: saw{"OK;OK;none;EOF", 1}, belays: saw{"OK;OK;none;EOF", 1},
		},
		{
			name: "server stream, fails once", method: probe.ServerStream, server: []probe.Step{u}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;1:q,2:q,EOF", 2}, belays: saw{"OK;OK;1:q,2:q,EOF", 2},
		},
		{
			name: "server stream, fails three times", method: probe.ServerStream, server: []probe.Step{u, u, u}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;1:q,2:q,EOF", 4}, belays: saw{"OK;OK;1:q,2:q,EOF", 4},
		},
		{
			name: "server stream, fails always", method: probe.ServerStream, server: []probe.Step{u, u, u, u, u}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;Unavailable", 4}, belays: saw{"OK;OK;Unavailable", 4},
		},
		{
			name: "server stream, fails once, and the header is asked for first", method: probe.ServerStream, server: []probe.Step{u}, client: askHeader,
			bare: saw{"OK;OK;none;Unavailable", 1}, native: saw{"OK;OK;h=;1:q,2:q,EOF", 2}, belays: saw{"OK;OK;h=;1:q,2:q,EOF", 2},
		},
		{
			name: "server stream, fails after its header", method: probe.ServerStream, server: []probe.Step{flushed()}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;Unavailable", 1}, belays: saw{"OK;OK;1:q,2:q,EOF", 2}, why: commit,
		},
		{
			name: "server stream, fails after its header, which was read", method: probe.ServerStream, server: []probe.Step{flushed()}, client: askHeader,
			bare: saw{"OK;OK;h=one;Unavailable", 1}, native: saw{"OK;OK;h=one;Unavailable", 1}, belays: saw{"OK;OK;h=one;Unavailable", 1},
		},
		{
			name: "server stream, fails after a message", method: probe.ServerStream, server: []probe.Step{ops(codes.Unavailable, probe.Send(1))}, client: ask,
			bare: saw{"OK;OK;1:,Unavailable", 1}, native: saw{"OK;OK;1:,Unavailable", 1}, belays: saw{"OK;OK;1:,Unavailable", 1},
		},
		{
			name: "server stream, the trailer is the deciding attempt's", method: probe.ServerStream,
			server: []probe.Step{{Trailer: trailer, Code: codes.Unavailable}, {Code: codes.NotFound}}, client: append(ask[:3:3], opTrailer),
			bare: saw{"OK;OK;Unavailable;t=one", 1}, native: saw{"OK;OK;NotFound;t=", 2}, belays: saw{"OK;OK;NotFound;t=", 2},
		},
		{
			name: "server stream, says never", method: probe.ServerStream, server: []probe.Step{{Code: codes.Unavailable, Pushback: "-1"}}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;Unavailable", 1}, belays: saw{"OK;OK;Unavailable", 1},
		},
		{
			name: "server stream, says never, and after a header", method: probe.ServerStream,
			server: []probe.Step{{Header: header, Code: codes.Unavailable, Pushback: "-1"}}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;Unavailable", 1}, belays: saw{"OK;OK;Unavailable", 1},
		},
		{
			name: "server stream, says when", method: probe.ServerStream, server: []probe.Step{{Code: codes.Unavailable, Pushback: "20"}}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;1:q,2:q,EOF", 2}, belays: saw{"OK;OK;1:q,2:q,EOF", 2},
		},
		{
			name: "server stream, says when in a detail", method: probe.ServerStream,
			server: []probe.Step{{Code: codes.ResourceExhausted, RetryInfo: &hint}}, client: ask,
			bare: saw{"OK;OK;ResourceExhausted", 1}, native: saw{"OK;OK;ResourceExhausted", 1}, belays: saw{"OK;OK;1:q,2:q,EOF", 2}, why: hinted,
		},
		{
			name: "server stream, a verdict", method: probe.ServerStream, server: []probe.Step{{Code: codes.PermissionDenied}}, client: ask,
			bare: saw{"OK;OK;PermissionDenied", 1}, native: saw{"OK;OK;PermissionDenied", 1}, belays: saw{"OK;OK;PermissionDenied", 1},
		},
		{
			name: "server stream, undeclared", method: probe.ServerStreamUndeclared, server: []probe.Step{u}, client: ask,
			bare: saw{"OK;OK;Unavailable", 1}, native: saw{"OK;OK;1:q,2:q,EOF", 2}, belays: saw{"OK;OK;Unavailable", 1}, why: undeclared,
		},

		// Client streaming.
		{
			name: "client stream, succeeds", method: probe.ClientStream, client: up,
			bare: saw{"OK;OK;OK;1:b", 1}, native: saw{"OK;OK;OK;1:b", 1}, belays: saw{"OK;OK;OK;1:b", 1},
		},
		{
			name: "client stream, fails at once", method: probe.ClientStream, server: []probe.Step{u}, client: up,
			bare: saw{"EOF;EOF;OK;Unavailable", 1}, native: saw{"OK;OK;OK;1:b", 2}, belays: saw{"OK;OK;OK;1:b", 2},
		},
		{
			name: "client stream, fails after one of two", method: probe.ClientStream, server: []probe.Step{ops(codes.Unavailable, probe.Recv(1))}, client: up,
			bare: saw{"OK;EOF;OK;Unavailable", 1}, native: saw{"OK;OK;OK;1:b", 2}, belays: saw{"OK;OK;OK;1:b", 2},
		},
		{
			name: "client stream, fails after all", method: probe.ClientStream, server: []probe.Step{ops(codes.Unavailable, probe.RecvAll())}, client: up,
			bare: saw{"OK;OK;OK;Unavailable", 1}, native: saw{"OK;OK;OK;1:b", 2}, belays: saw{"OK;OK;OK;1:b", 2},
		},
		{
			name: "client stream, fails at once, twice", method: probe.ClientStream, server: []probe.Step{u, u}, client: up,
			bare: saw{"EOF;EOF;OK;Unavailable", 1}, native: saw{"OK;OK;OK;1:b", 3}, belays: saw{"OK;OK;OK;1:b", 3},
		},
		{
			name: "client stream, a verdict at once", method: probe.ClientStream, server: []probe.Step{{Code: codes.InvalidArgument}}, client: up,
			bare: saw{"EOF;EOF;OK;InvalidArgument", 1}, native: saw{"EOF;EOF;OK;InvalidArgument", 1}, belays: saw{"EOF;EOF;OK;InvalidArgument", 1},
		},
		{
			name: "client stream, answers after one of two", method: probe.ClientStream, server: []probe.Step{ops(codes.OK, probe.Recv(1))}, client: up,
			bare: saw{"OK;EOF;OK;1:a", 1}, native: saw{"OK;EOF;OK;1:a", 1}, belays: saw{"OK;OK;OK;1:a", 1}, why: unread,
		},
		{
			name: "client stream, fails after its header and one of two", method: probe.ClientStream, server: []probe.Step{flushed(probe.Recv(1))}, client: up,
			bare: saw{"OK;EOF;OK;Unavailable", 1}, native: saw{"OK;EOF;OK;Unavailable", 1}, belays: saw{"OK;OK;OK;1:b", 2}, why: commit,
		},
		{
			name: "client stream, the answer is lost", method: probe.ClientStream, server: []probe.Step{{LoseReply: true}}, client: up,
			bare: saw{"OK;OK;OK;Unavailable", 1}, native: saw{"OK;OK;OK;Unavailable", 1}, belays: saw{"OK;OK;OK;1:b", 2},
			why: "the answer came and its status says that it does not count: native retry ends when a header arrives",
		},
		{
			name: "client stream, the header is asked for while it fails", method: probe.ClientStream, server: []probe.Step{ops(codes.Unavailable, probe.RecvAll())},
			client: []clientOp{opSend("a"), opClose, opHeader, opRecv},
			bare:   saw{"OK;OK;none;Unavailable", 1}, native: saw{"OK;OK;h=;1:a", 2}, belays: saw{"OK;OK;h=;1:a", 2},
		},
		{
			name: "client stream, says never", method: probe.ClientStream, server: []probe.Step{{Code: codes.Unavailable, Pushback: "-1"}}, client: up,
			bare: saw{"EOF;EOF;OK;Unavailable", 1}, native: saw{"EOF;EOF;OK;Unavailable", 1}, belays: saw{"EOF;EOF;OK;Unavailable", 1},
		},

		// Bidi.
		{
			name: "bidi, succeeds", method: probe.Bidi, client: pingPong,
			bare: saw{"OK;1:a;OK;2:b;OK;EOF", 1}, native: saw{"OK;1:a;OK;2:b;OK;EOF", 1}, belays: saw{"OK;1:a;OK;2:b;OK;EOF", 1},
		},
		{
			name: "bidi, fails at once", method: probe.Bidi, server: []probe.Step{u}, client: chat,
			bare: saw{"EOF;EOF;OK;Unavailable", 1}, native: saw{"OK;OK;OK;1:a,2:b,EOF", 2}, belays: saw{"OK;OK;OK;1:a,2:b,EOF", 2},
		},
		{
			name: "bidi, fails at once, and is read before it is written", method: probe.Bidi, server: []probe.Step{u, ops(codes.OK, probe.Send(1), probe.Echo())},
			client: []clientOp{opRecv, opSend("a"), opRecv, opClose, opRecv},
			bare:   saw{"Unavailable;EOF;Unavailable;OK;Unavailable", 1}, native: saw{"1:;OK;2:a;OK;EOF", 2}, belays: saw{"1:;OK;2:a;OK;EOF", 2},
		},
		{
			name: "bidi, fails after a message was read", method: probe.Bidi, server: []probe.Step{ops(codes.Unavailable, probe.Recv(1))}, client: chat,
			bare: saw{"OK;EOF;OK;Unavailable", 1}, native: saw{"OK;OK;OK;1:a,2:b,EOF", 2}, belays: saw{"OK;OK;OK;1:a,2:b,EOF", 2},
		},
		{
			name: "bidi, fails after a message was answered", method: probe.Bidi, server: []probe.Step{ops(codes.Unavailable, probe.Recv(1), probe.Send(1))}, client: pingPong,
			bare: saw{"OK;1:a;EOF;Unavailable;OK;Unavailable", 1}, native: saw{"OK;1:a;EOF;Unavailable;OK;Unavailable", 1}, belays: saw{"OK;1:a;EOF;Unavailable;OK;Unavailable", 1},
		},
		{
			name: "bidi, answers what nobody reads and fails", method: probe.Bidi, server: []probe.Step{ops(codes.Unavailable, probe.Recv(1), probe.Send(1))}, client: chat,
			bare: saw{"OK;EOF;OK;1:a,Unavailable", 1}, native: saw{"OK;EOF;OK;1:a,Unavailable", 1}, belays: saw{"OK;OK;OK;1:a,Unavailable", 1}, why: unread,
		},
		{
			name: "bidi, fails after its header", method: probe.Bidi, server: []probe.Step{flushed(probe.Recv(1))}, client: chat,
			bare: saw{"OK;EOF;OK;Unavailable", 1}, native: saw{"OK;EOF;OK;Unavailable", 1}, belays: saw{"OK;OK;OK;1:a,2:b,EOF", 2}, why: commit,
		},
		{
			name: "bidi, fails after its header, which was read", method: probe.Bidi, server: []probe.Step{flushed(probe.Recv(1))},
			client: []clientOp{opSend("a"), opHeader, opSend("b"), opClose, opRecvAll},
			bare:   saw{"OK;h=one;EOF;OK;Unavailable", 1}, native: saw{"OK;h=one;EOF;OK;Unavailable", 1}, belays: saw{"OK;h=one;EOF;OK;Unavailable", 1},
		},
		{
			name: "bidi, ends with success before all was sent", method: probe.Bidi, server: []probe.Step{ops(codes.OK, probe.Recv(1))}, client: chat,
			bare: saw{"OK;EOF;OK;EOF", 1}, native: saw{"OK;EOF;OK;EOF", 1}, belays: saw{"OK;EOF;OK;EOF", 1},
		},
		{
			name: "bidi, fails three times at different points", method: probe.Bidi,
			server: []probe.Step{u, ops(codes.Unavailable, probe.Recv(1)), ops(codes.Unavailable, probe.Recv(2))}, client: chat,
			bare: saw{"EOF;EOF;OK;Unavailable", 1}, native: saw{"OK;OK;OK;1:a,2:b,EOF", 4}, belays: saw{"OK;OK;OK;1:a,2:b,EOF", 4},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			if (row.native != row.belays) != (row.why != "") {
				t.Errorf("native %v, Belay %v, and the reason is %q: a difference is on purpose, and only then", row.native, row.belays, row.why)
			}
			for _, way := range []struct {
				name string
				want saw
				dial func(*testing.T) []grpc.DialOption
			}{
				{"bare", row.bare, func(*testing.T) []grpc.DialOption { return []grpc.DialOption{grpc.WithDisableRetry()} }},
				{"native", row.native, func(*testing.T) []grpc.DialOption {
					return []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeConfig)}
				}},
				{"belay", row.belays, func(t *testing.T) []grpc.DialOption {
					return newClient(t, interceptors.WithPolicy(policy.Policy{Backoff: fixed(10 * time.Millisecond)})).DialOptions()
				}},
			} {
				bubbles(t, way.name, func(t *testing.T) {
					if got := runRow(t, row.method, row.server, row.client, way.dial(t)); got != way.want {
						t.Errorf("the client does %s and saw %q with %d runs of the handler, want %q with %d",
							opNames(row.client), got.client, got.hits, way.want.client, way.want.hits)
					}
				})
			}
		})
	}
}

// runRow runs one row one way. Between two ops everything comes to rest, so that
// what an op sees does not depend on who is faster.
func runRow(t *testing.T, method string, server []probe.Step, client []clientOp, dial []grpc.DialOption) saw {
	t.Helper()
	conn, srv := probe.Start(t, probe.DialOptions(dial...))
	srv.Script(method, server...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := &tableCall{ctx: ctx, conn: conn, method: method}
	if client[0].name != "call" {
		c.stream = openStream(ctx, t, conn, method)
	}
	var seen []string
	for _, op := range client {
		synctest.Wait()
		seen = append(seen, op.run(c))
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Error("the row ran into its deadline")
	}
	return saw{strings.Join(seen, ";"), srv.Hits(method)}
}

func opNames(ops []clientOp) string {
	var names []string
	for _, op := range ops {
		names = append(names, op.name)
	}
	return strings.Join(names, " ")
}
