package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/belayrpc/belay/examples/chain/chainv1"
)

// users are many people, each of whom makes one call and takes what comes: no
// retries, no keys, one deadline. They come at random moments at a steady rate
// and do not wait for each other, so a chain that gets slow does not get fewer
// of them.
type users struct {
	load   load
	edge   chainv1.EdgeServiceClient
	tally  *tally
	tracer *userTracer // nil: no call is traced
}

// remarkEvery: one user in so many leaves a remark too.
const remarkEvery = 10

// arrive lets so many users come and returns when the last has an answer. With
// onset zero they only warm the chain up. It stops early when ctx ends.
func (u *users) arrive(ctx context.Context, count int, onset time.Time) {
	var wg sync.WaitGroup
	defer wg.Wait()
	clock := time.Now()
	for i := range count {
		// Exponential gaps make a Poisson process: arrivals without memory.
		clock = clock.Add(time.Duration(rand.ExpFloat64() / u.load.rate * float64(time.Second))) //nolint:gosec // chance, not secrecy
		intended := clock
		if err := work(ctx, time.Until(intended)); err != nil {
			return
		}
		second := int32(-1)
		if !onset.IsZero() {
			second = int32(intended.Sub(onset) / time.Second) //nolint:gosec // of a run of seconds
		}
		intent := u.intend(second, i)
		wg.Go(func() { u.checkout(ctx, intent, intended, i%u.load.traceEvery == 0) })
		if i%remarkEvery == 0 {
			wg.Go(func() { u.remark(ctx, intent, intended) })
		}
	}
}

// intend returns a new intent of a user who decides now.
func (u *users) intend(second int32, i int) *chainv1.Intent {
	now := time.Now()
	return &chainv1.Intent{
		Id:        fmt.Sprintf("%d/%d", second, i),
		DecidedAt: timestamppb.New(now),
		GivesUpAt: timestamppb.New(now.Add(patience)),
		Second:    second,
	}
}

func (u *users) checkout(ctx context.Context, intent *chainv1.Intent, intended time.Time, traced bool) {
	ctx, cancel := context.WithDeadline(ctx, intent.GetGivesUpAt().AsTime())
	defer cancel()
	end := func(error) {}
	if traced && u.tracer != nil {
		ctx, end = u.tracer.start(ctx, "checkout")
	}
	_, err := u.edge.Checkout(ctx, &chainv1.CheckoutRequest{Intent: intent})
	end(err)
	u.tally.checkedOut(answer{second: intent.GetSecond(), ok: err == nil, took: time.Since(intended)})
}

func (u *users) remark(ctx context.Context, intent *chainv1.Intent, intended time.Time) {
	ctx, cancel := context.WithDeadline(ctx, intent.GetGivesUpAt().AsTime())
	defer cancel()
	_, err := u.edge.Remark(ctx, &chainv1.RemarkRequest{Intent: intent})
	u.tally.remarked(answer{second: intent.GetSecond(), ok: err == nil, took: time.Since(intended)})
}

// dialEdge opens the users' channel: gRPC as it comes, whatever the stack.
func dialEdge(addr string) (*grpc.ClientConn, error) {
	return grpc.NewClient(addr, append(dialOptions(), grpc.WithDisableRetry())...)
}

// userTracer makes the spans at the root of the traces.
type userTracer struct {
	provider *sdktrace.TracerProvider
}

func newUserTracer(ctx context.Context, t *tally) (*userTracer, error) {
	provider, err := newTracerProvider(ctx, roleUser, sdktrace.AlwaysSample(),
		&pipeExporter{roleUser, func(s *span) { t.keep(fact{Span: s}) }})
	if err != nil {
		return nil, err
	}
	return &userTracer{provider: provider}, nil
}

// roleUser is who the first span of a trace belongs to.
const roleUser = "user"

// start begins the user's span and puts it on the wire. A browser would do so;
// Belay does it by itself, at every hop after this one.
func (t *userTracer) start(ctx context.Context, name string) (context.Context, func(error)) {
	ctx, s := t.provider.Tracer("chain").Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient)) //nolint:spancheck // the returned function ends it
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return metadata.NewOutgoingContext(ctx, metadata.New(carrier)), func(err error) { //nolint:spancheck // as above
		if err != nil {
			s.RecordError(err)
		}
		s.End()
	}
}

// close sends what is left. A collector that does not answer costs the demo two
// seconds and none of its results; the SDK says so on standard error.
func (t *userTracer) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushLimit)
	defer cancel()
	_ = t.provider.Shutdown(ctx)
}
