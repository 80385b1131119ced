package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/metrics"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/chain/chainv1"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
)

// The scenarios of streams have two processes: the ledger, and an auditor that
// is its client and has the stack under test. A process of its own, so that its
// heap is the client's and nobody else's.
//
// What they count:
//
//   - lost: streams that came to nothing though they could have been repeated.
//     For server-stream, those that ended in an error before the first message;
//     for upload, all that ended in an error, since the only answer to an upload
//     is its last one. And, for both, streams that ended well with messages
//     missing.
//   - broken: streams that ended in an error after the application had seen a
//     message. It knows what it has and that it is not all; nobody below it can
//     go on for it.
//   - repeated: messages that an application (the auditor's of server-stream,
//     the ledger's of upload) was given once more in the same stream.
//   - heap: the most that the auditor's heap grew by, garbage included that was
//     not collected yet.

// streamStacks are those that are compared. A breaker has no say in what a
// retry does to a stream, so Belay comes once.
var streamStacks = []string{stackNone, stackMiddleware, stackBelay}

// The size of one stream.
const (
	watchEntries = 10
	watchPause   = 20 * time.Millisecond // before each entry, the first too

	// importChunk and what is around it fit into 32 KiB: gRPC's next larger buffer
	// is of 1 MiB, and the heap would be a count of these.
	importChunk  = 16 << 10
	importChunks = 10 << 20 / importChunk
	importPause  = time.Millisecond // before each chunk: 16 MiB a second, as from a disk or a network

	// importReplay is what the auditor lets Belay keep of an upload. A server
	// that does not read stops its client after a window (64 KiB, more where
	// gRPC has measured a long way), so a blip at the start has come back long
	// before so much is sent. Belay's default has room for three chunks of these.
	importReplay = 2 << 20
)

const (
	watchEvery     = 20 * time.Millisecond // a stream begins
	watchWaiting   = 8                     // at most wait for their first entry; the next begins later
	streamPatience = 10 * time.Second      // for one stream
	drillTime      = 8 * time.Second       // about; it is the order of cells that needs it
)

// The kinds of drills.
const (
	drillWatch  = "watch"
	drillImport = "import"
)

// drill is what the auditor is told to do.
type drill struct {
	Kind    string `json:"kind"`
	Streams int    `json:"streams"`
}

// streamDrill is a scenario of streams.
type streamDrill struct {
	drill  drill
	stacks []string
	fault  fault                               // of the ledger, from the beginning on
	script func(context.Context, *chain) error // nil: nothing more goes wrong
}

// streamEnd is how one stream was for the application.
type streamEnd struct {
	Lost     bool `json:"lost,omitempty"`
	Broken   bool `json:"broken,omitempty"`
	Repeated int  `json:"repeated,omitempty"`
}

// drilled ends a drill.
type drilled struct {
	HeapBytes uint64 `json:"heapBytes"`
}

// streamTotals sums up a drill.
type streamTotals struct {
	count, lost, broken, repeated int

	heapMiB float64
}

func (t *streamTotals) add(e streamEnd) {
	t.count++
	if e.Lost {
		t.lost++
	}
	if e.Broken {
		t.broken++
	}
	t.repeated += e.Repeated
}

// runDrill runs one scenario of streams with one stack.
func runDrill(ctx context.Context, s scenario, stackName string) (result, error) {
	var totals streamTotals // the auditor's reader writes it until finished is closed
	finished := make(chan struct{})
	keep := func(f fact) {
		switch {
		case f.Stream != nil:
			totals.add(*f.Stream)
		case f.Drilled != nil:
			totals.heapMiB = float64(f.Drilled.HeapBytes) / (1 << 20)
			close(finished)
		}
	}
	c := &chain{stack: stackName, keep: keep, processes: map[string]*process{}}
	defer c.stop()
	for _, role := range []string{roleLedger, roleAuditor} {
		if err := c.start(role); err != nil {
			return result{}, err
		}
	}
	if s.spare {
		if err := c.keepSpare(); err != nil {
			return result{}, err
		}
	}
	if err := c.apply(s.drill.fault); err != nil {
		return result{}, err
	}
	auditor := c.processes[roleAuditor]
	if err := auditor.give(order{Drill: &s.drill.drill}); err != nil {
		return result{}, err
	}
	if s.drill.script != nil {
		if err := s.drill.script(ctx, c); err != nil {
			return result{}, err
		}
	}
	select {
	case <-finished:
	case <-auditor.ended:
		return result{}, auditor.failed(errors.New("ended in the middle of a drill"))
	case <-ctx.Done():
		return result{}, ctx.Err()
	}
	if totals.count != s.drill.drill.Streams {
		return result{}, fmt.Errorf("%d streams have ended, of %d", totals.count, s.drill.drill.Streams)
	}
	return result{scenario: s.name, stack: stackName, streams: &totals}, nil
}

// auditor is the client of the streams.
type auditor struct {
	ledger chainv1.LedgerServiceClient
	report *reporter
}

// run does a drill and reports each stream, and then the heap.
func (a *auditor) run(d drill) {
	ctx := context.Background() // the process's end is the streams' end
	heap := watchHeap()
	switch d.Kind {
	case drillWatch:
		var wg sync.WaitGroup
		waiting := make(chan struct{}, watchWaiting)
		for range d.Streams {
			waiting <- struct{}{}
			answered := sync.OnceFunc(func() { <-waiting })
			wg.Go(func() {
				defer answered()
				a.ended(a.watch(ctx, answered))
			})
			_ = work(ctx, watchEvery) // ctx does not end
		}
		wg.Wait()
	case drillImport:
		// One after the other, so that each meets the blip that is every other's.
		for range d.Streams {
			a.ended(a.upload(ctx))
		}
	}
	a.report.send(fact{Drilled: &drilled{HeapBytes: heap.growth()}})
}

func (a *auditor) ended(e streamEnd) { a.report.send(fact{Stream: &e}) }

// watch reads one stream to its end and calls answered for each entry.
func (a *auditor) watch(ctx context.Context, answered func()) streamEnd {
	ctx, cancel := context.WithTimeout(ctx, streamPatience)
	defer cancel()
	var seen counted
	stream, err := a.ledger.Watch(ctx, &chainv1.WatchRequest{Entries: watchEntries})
	for err == nil {
		var entry *chainv1.WatchResponse
		if entry, err = stream.Recv(); err == nil {
			answered()
			seen.add(entry.GetNumber())
		}
	}
	end := streamEnd{Repeated: seen.repeated}
	if errors.Is(err, io.EOF) {
		end.Lost = seen.different() < watchEntries
		return end
	}
	end.Lost = seen.different() == 0
	end.Broken = !end.Lost
	return end
}

// upload sends one file.
func (a *auditor) upload(ctx context.Context) streamEnd {
	ctx, cancel := context.WithTimeout(ctx, streamPatience)
	defer cancel()
	// Where the stack is not Belay's, gRPC ignores the option.
	stream, err := a.ledger.Import(ctx, interceptors.Override(policy.Policy{ReplayBytes: importReplay}))
	if err != nil {
		return streamEnd{Lost: true}
	}
	data := make([]byte, importChunk)
	due := time.Now()
	for i := range int32(importChunks) {
		due = due.Add(importPause)
		if err := work(ctx, time.Until(due)); err != nil {
			return streamEnd{Lost: true}
		}
		if err := stream.Send(&chainv1.ImportRequest{Number: i + 1, Data: data}); err != nil {
			break // CloseAndRecv says why
		}
	}
	reply, err := stream.CloseAndRecv()
	return streamEnd{
		Lost:     err != nil || reply.GetChunks() != importChunks,
		Repeated: int(reply.GetRepeated()),
	}
}

// Watch implements [chainv1.LedgerServiceServer].
func (s *ledger) Watch(req *chainv1.WatchRequest, stream grpc.ServerStreamingServer[chainv1.WatchResponse]) error {
	for i := range req.GetEntries() {
		if err := work(stream.Context(), watchPause); err != nil {
			return err
		}
		if err := stream.Send(&chainv1.WatchResponse{Number: i + 1}); err != nil {
			return err
		}
	}
	return nil
}

// Import implements [chainv1.LedgerServiceServer].
func (s *ledger) Import(stream grpc.ClientStreamingServer[chainv1.ImportRequest, chainv1.ImportResponse]) error {
	if s.imports.Add(1)%2 == 1 && s.faults.get().Blip {
		return status.Error(codes.Unavailable, "the ledger has a blip")
	}
	var seen counted
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&chainv1.ImportResponse{Chunks: int32(seen.different()), Repeated: int32(seen.repeated)}) //nolint:gosec // of hundreds of chunks
		}
		if err != nil {
			return err
		}
		seen.add(chunk.GetNumber())
	}
}

// counted is which numbered messages of a stream have come.
type counted struct {
	numbers  map[int32]bool
	repeated int
}

func (c *counted) add(number int32) {
	if c.numbers[number] {
		c.repeated++
		return
	}
	if c.numbers == nil {
		c.numbers = map[int32]bool{}
	}
	c.numbers[number] = true
}

func (c *counted) different() int { return len(c.numbers) }

// heapWatch looks at the heap all the time: its size at the end says nothing of
// a buffer that was let go.
type heapWatch struct {
	base uint64
	stop chan struct{}
	most chan uint64 // one value, after stop
}

func watchHeap() *heapWatch {
	runtime.GC()
	w := &heapWatch{base: heapBytes(), stop: make(chan struct{}), most: make(chan uint64, 1)}
	go func() {
		ticker := time.NewTicker(5 * time.Millisecond)
		defer ticker.Stop()
		most := w.base
		for {
			select {
			case <-ticker.C:
				most = max(most, heapBytes())
			case <-w.stop:
				w.most <- max(most, heapBytes())
				return
			}
		}
	}()
	return w
}

// growth ends the watch.
func (w *heapWatch) growth() uint64 {
	close(w.stop)
	return <-w.most - w.base
}

// heapBytes does not stop the world, as runtime.ReadMemStats does.
func heapBytes() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// writeStreams writes what people read.
func writeStreams(out *bytes.Buffer, results []result) {
	fmt.Fprintf(out, "\n%-18s%8s%8s%8s%10s%10s\n", "Streams", "streams", "lost", "broken", "repeated", "heap MiB")
	story := ""
	for _, r := range results {
		if story != r.scenario {
			story = r.scenario
			fmt.Fprintf(out, "\n%s: %s\n", r.scenario, storyOf(r.scenario))
		}
		s := r.streams
		fmt.Fprintf(out, "  %-16s%8d%8d%8d%10d%10.1f\n", r.stack, s.count, s.lost, s.broken, s.repeated, s.heapMiB)
	}
	fmt.Fprint(out, `
lost       ended in an error though the application had seen nothing yet, or ended well with messages missing
broken     ended in an error after the application had seen messages: it knows, and only it can go on
repeated   messages that an application was given once more
heap       the most that the client's heap grew by
`)
}

// writeStreamLines writes what scripts read.
func writeStreamLines(out *bytes.Buffer, results []result) {
	for _, r := range results {
		s := r.streams
		fmt.Fprintf(out, "RESULT demo scenario=%s stack=%s lost=%d repeated=%d heap_mib=%.1f broken=%d streams=%d\n",
			r.scenario, r.stack, s.lost, s.repeated, s.heapMiB, s.broken, s.count)
	}
}
