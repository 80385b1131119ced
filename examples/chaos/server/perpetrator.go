package main

import (
	"context"
	"database/sql/driver"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"

	"github.com/belayrpc/belay/examples/chaos/chaosv1"
	"github.com/belayrpc/belay/examples/chaos/order"
	"github.com/belayrpc/belay/examples/internal/sqltap"
)

// perpetrator carries orders out, and counts what the store sends.
type perpetrator struct {
	report *os.File

	statements, connections, calls, executions atomic.Int64
}

// tell writes one line to the parent. A line is one write of less than PIPE_BUF
// bytes, so it is whole, and it is there when the process is gone.
func (p *perpetrator) tell(words ...any) {
	_, _ = fmt.Fprintln(p.report, words...) // without a parent there is nobody to tell
}

// task is an order on its way through a call. It is carried out once.
type task struct {
	order.Order

	done atomic.Bool
}

type taskKey struct{}

// at carries the call's order out if this is its point.
func (p *perpetrator) at(ctx context.Context, point order.Point) {
	t, ok := ctx.Value(taskKey{}).(*task)
	if !ok || t.Point != point || !t.done.CompareAndSwap(false, true) {
		return
	}
	p.tell(t.Deed, t.Point, t.For)
	switch t.Deed {
	case order.Kill:
		die()
	case order.Stop:
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) // the parent wakes us
	case order.Hold:
		time.Sleep(t.For)
	}
}

// wants reports whether at would do something.
func wants(ctx context.Context, point order.Point) bool {
	t, ok := ctx.Value(taskKey{}).(*task)
	return ok && t.Point == point && !t.done.Load()
}

// deaf reports whether the call's handler is to go on when it is told to stop.
func deaf(ctx context.Context) bool {
	t, ok := ctx.Value(taskKey{}).(*task)
	return ok && t.Deed != order.Kill
}

// die is kill -9. It does not return, also where the signal takes a moment.
func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// TagRPC implements [stats.Handler]: it finds the order of a call.
func (p *perpetrator) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if info.FullMethodName == chaosv1.ChaosService_Effect_FullMethodName {
		p.calls.Add(1)
	}
	values := metadata.ValueFromIncomingContext(ctx, order.Metadata)
	if len(values) != 1 {
		return ctx
	}
	o, err := order.Parse(values[0])
	if err != nil {
		p.tell("error", err)
		return ctx
	}
	return context.WithValue(ctx, taskKey{}, &task{Order: o})
}

// HandleRPC implements [stats.Handler].
func (p *perpetrator) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if _, ok := s.(*stats.End); ok && wants(ctx, order.AfterReply) {
		time.Sleep(2 * time.Millisecond) // the transport writes on a goroutine of its own
		p.at(ctx, order.AfterReply)
	}
}

// TagConn implements [stats.Handler].
func (p *perpetrator) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements [stats.Handler].
func (p *perpetrator) HandleConn(context.Context, stats.ConnStats) {}

// intercept stands before every other interceptor.
func (p *perpetrator) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	p.at(ctx, order.BeforeReply)
	return resp, err
}

// hook stands between database/sql and the driver.
func (p *perpetrator) hook(ctx context.Context, op sqltap.Op) func(error) {
	step := stepOf(op)
	switch {
	case op.Kind == sqltap.Connect:
		p.connections.Add(1)
	case strings.Contains(op.Query, recordsTable):
		p.statements.Add(1)
	}
	if step == nil {
		return nil
	}
	if step.before != "" {
		p.at(ctx, step.before)
	}
	if step.sent != "" && wants(ctx, step.sent) {
		return p.killAfterSending(ctx, step.sent, op.Conn)
	}
	return func(err error) {
		if err == nil && step.after != "" {
			p.at(ctx, step.after)
		}
	}
}

// killAfterSending kills the process when the statement is on its way to
// PostgreSQL. SQLite is in this very process, where a statement is not sent but
// worked on: there the end comes somewhere in the middle of it. Either way nobody
// here learns how it ended.
func (p *perpetrator) killAfterSending(ctx context.Context, point order.Point, c driver.Conn) func(error) {
	kill := func() { p.at(ctx, point) }
	w := wireOf(c)
	if w == nil {
		time.AfterFunc(rand.N(2*time.Millisecond), kill) //nolint:gosec // bad luck is not a secret
		return func(error) { select {} }
	}
	w.sent.Store(&kill)
	return func(error) { w.sent.Store(nil) } // the connection was broken: nothing has left
}

// step is the points around one statement.
type step struct {
	before, sent, after order.Point
}

var (
	claimStep  = &step{order.BeforeClaim, order.AfterClaimSent, order.AfterClaimAck}
	finishStep = &step{before: order.BeforeFinish, after: order.AfterFinish}
	commitStep = &step{sent: order.AfterCommit, after: order.AfterCommitAck}
)

// recordsTable is where the store keeps its records.
const recordsTable = `"belay_idempotency"`

// stepOf tells the store's statements apart by what only they say.
func stepOf(op sqltap.Op) *step {
	switch {
	case op.Kind == sqltap.Commit, op.Kind == sqltap.Exec && op.Query == "COMMIT":
		return commitStep
	case op.Kind != sqltap.Exec || !strings.Contains(op.Query, recordsTable):
		return nil
	case strings.Contains(op.Query, "leased_at, lease_until, expires_at)"), strings.Contains(op.Query, "SET state = 1, owner"):
		return claimStep
	case strings.Contains(op.Query, "outcome = "), strings.Contains(op.Query, "outcome, created_at"):
		return finishStep
	default:
		return nil
	}
}
