package interceptors_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// serverMove is one thing that the model's server does.
type serverMove uint8

const (
	takes serverMove = iota
	flushes
	answers
)

// serverRun is what one run of the handler is going to do.
type serverRun struct {
	moves []serverMove
	code  codes.Code
}

func (r serverRun) String() string {
	names := [...]string{"Recv", "Header", "Send"}
	var all []string
	for _, m := range r.moves {
		all = append(all, names[m])
	}
	return strings.Join(append(all, r.code.String()), " ")
}

// oracle says what an application sees of a stream, if retries keep their
// promise. It knows the rules from the design, and nothing of how they are kept.
type oracle struct {
	clientStreams, serverStreams bool
	maxAttempts, replayBytes     int
	script                       []serverRun

	// The application's side.
	sent    []string // kept, until settled
	bytes   int
	closed  bool
	settled bool
	ended   bool
	result  string // what RecvMsg says from the end on

	// The current run of the handler.
	run      int
	moves    []serverMove
	taken    []string
	inbox    []string
	unread   []string // answers on their way
	answered int
	header   bool
	over     bool
	code     codes.Code

	received [][]string // by run
}

func (o *oracle) begin() {
	o.run++
	s := o.script[o.run-1]
	o.moves, o.code = s.moves, s.code
	o.taken, o.unread, o.answered, o.header, o.over = nil, nil, 0, false, false
	o.inbox = append([]string(nil), o.sent...)
	o.received = append(o.received, nil)
	o.advance()
}

// advance lets the handler run until it waits for a message or has ended.
func (o *oracle) advance() {
	for !o.over && len(o.moves) > 0 {
		switch o.moves[0] {
		case takes:
			switch {
			case len(o.inbox) > 0:
				o.taken, o.inbox = append(o.taken, o.inbox[0]), o.inbox[1:]
			case o.closed:
				o.code, o.moves = codes.Internal, []serverMove{takes} // it wanted more than came
			default:
				o.received[o.run-1] = o.taken
				return
			}
		case flushes:
			o.header = true
		case answers:
			o.answer()
		}
		o.moves = o.moves[1:]
	}
	if !o.over && o.code == codes.OK && !o.serverStreams && o.answered == 0 {
		o.answer()
	}
	o.over = true
	o.received[o.run-1] = o.taken
}

func (o *oracle) answer() {
	o.header = true
	o.answered++
	last := ""
	if len(o.taken) > 0 {
		last = o.taken[len(o.taken)-1]
	}
	o.unread = append(o.unread, fmt.Sprintf("%d:%s", o.answered, last))
}

// fail is what a failed run means: another one, or the end.
func (o *oracle) fail() {
	if o.code == codes.Unavailable && !o.settled && o.run < o.maxAttempts {
		o.begin()
		return
	}
	o.end(o.code.String())
}

func (o *oracle) end(result string) { o.ended, o.settled, o.result = true, true, result }

func (o *oracle) send(text string) string {
	if o.ended {
		return "EOF"
	}
	if !o.settled {
		if size := proto.Size(request(text)); o.bytes+size > o.replayBytes {
			o.settled, o.sent = true, nil
		} else {
			o.sent, o.bytes = append(o.sent, text), o.bytes+size
		}
	}
	switch {
	case !o.over:
		o.inbox = append(o.inbox, text)
		o.advance()
		return "OK"
	case !o.clientStreams: // gRPC says so of a stream with one request
		return "OK"
	case o.settled:
		return "EOF"
	case o.header: // there may be something to read
		return "OK"
	case o.code == codes.OK:
		o.end("EOF")
		return "EOF"
	}
	if o.fail(); o.ended {
		return "EOF"
	}
	return "OK"
}

func (o *oracle) closeSend() string {
	if !o.ended {
		o.closed = true
		o.advance()
	}
	return "OK"
}

// clone returns a copy that shares nothing with o. An op that would wait for
// ever is not made, and then its way there has not happened either.
func (o *oracle) clone() *oracle {
	c := *o
	for _, texts := range []*[]string{&c.sent, &c.taken, &c.inbox, &c.unread} {
		*texts = slices.Clone(*texts)
	}
	c.received = slices.Clone(c.received)
	return &c
}

// recv returns "" where it would wait for ever.
func (o *oracle) recv() string {
	for !o.ended {
		switch {
		case o.serverStreams && len(o.unread) > 0:
			o.settled = true
			got := o.unread[0]
			o.unread = o.unread[1:]
			return got
		case !o.over:
			return ""
		case o.code != codes.OK:
			o.fail()
		case len(o.unread) > 0: // the one answer, and success behind it
			o.end("EOF")
			return o.unread[0]
		default:
			o.end("EOF")
		}
	}
	return o.result
}

func (o *oracle) head() string {
	for !o.ended {
		switch {
		case o.header:
			o.settled = true
			return "h"
		case !o.over:
			return ""
		case o.settled:
			return "none" // and RecvMsg says why
		case o.code == codes.OK:
			o.end("EOF")
		default:
			o.fail()
		}
	}
	if o.header {
		return "h"
	}
	return "none"
}

func (o *oracle) trailer() string {
	if !o.ended {
		return "none"
	}
	return strconv.Itoa(o.run)
}

// modelOp is one op of the application.
type modelOp uint8

const (
	appSends modelOp = iota
	appCloses
	appReceives
	appAsksHeader
	appAsksTrailer
)

// Whatever the server does and in whatever order the application uses its
// stream, it sees what the oracle says, and so does every run of the handler.
func TestStreamAgainstModel(t *testing.T) {
	methods := []string{probe.ServerStream, probe.ClientStream, probe.Bidi}
	rapid.Check(t, func(rt *rapid.T) {
		method := rapid.SampledFrom(methods).Draw(rt, "method")
		replayBytes := rapid.SampledFrom([]int{policy.DefaultReplayBytes, 12}).Draw(rt, "ReplayBytes")
		maxAttempts := rapid.IntRange(1, 3).Draw(rt, "MaxAttempts")
		ends := []codes.Code{codes.OK, codes.Unavailable, codes.Unavailable, codes.Unavailable, codes.NotFound}
		var script []serverRun
		for range maxAttempts {
			moves := []serverMove{takes, takes, takes, flushes, answers}
			if method == probe.ClientStream {
				moves = moves[:4] // it answers once, at its end
			}
			script = append(script, serverRun{
				rapid.SliceOfN(rapid.SampledFrom(moves), 0, 5).Draw(rt, "moves"), rapid.SampledFrom(ends).Draw(rt, "code"),
			})
		}
		ops := rapid.SliceOfN(rapid.SampledFrom([]modelOp{
			appSends, appSends, appSends, appCloses, appReceives, appReceives, appAsksHeader, appAsksTrailer,
		}), 1, 14).Draw(rt, "ops")

		problem := ""
		synctest.Test(t, func(t *testing.T) { problem = runModel(t, method, maxAttempts, replayBytes, script, ops) })
		if problem != "" {
			rt.Fatalf("%s, server %v:\n%s", method, script, problem)
		}
	})
}

// runModel runs one stream beside the oracle and says where they differ.
func runModel(t *testing.T, method string, maxAttempts, replayBytes int, script []serverRun, ops []modelOp) string {
	t.Helper()
	c := newClient(t, interceptors.WithBudget(plenty()), interceptors.WithoutBreaker(), interceptors.WithPolicy(policy.Policy{
		MaxAttempts: maxAttempts, ReplayBytes: replayBytes, Backoff: fixed(time.Millisecond),
	}))
	conn, srv := probe.Start(t, probe.DialOptions(c.DialOptions()...))
	srv.Script(method, stepsOf(script)...)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	desc := descOf(method)
	stream := openStream(ctx, t, conn, method)
	o := &oracle{
		clientStreams: desc.ClientStreams, serverStreams: desc.ServerStreams,
		maxAttempts: maxAttempts, replayBytes: replayBytes, script: script,
	}
	if o.clientStreams {
		o.begin()
	} else {
		// The handler of a server stream begins with its request.
		ops = append([]modelOp{appSends}, ops...)
		o.sent = []string{"m0"}
		o.bytes = proto.Size(request("m0"))
		o.closed = true
		if o.bytes > replayBytes {
			o.settled, o.sent = true, nil
		}
		o.begin()
	}

	var log []string
	sends, closed := 0, false
	for i, op := range ops {
		synctest.Wait()
		name, got, want := "", "", ""
		before := o.clone()
		switch op {
		case appSends:
			if closed || !desc.ClientStreams && sends > 0 {
				continue // against gRPC's contract
			}
			text := fmt.Sprintf("m%d", sends)
			sends++
			if name, want = "send", "OK"; desc.ClientStreams {
				want = o.send(text)
			}
			got = outcome(stream.SendMsg(request(text)))
		case appCloses:
			closed = true
			name, want = "close", o.closeSend()
			got = outcome(stream.CloseSend())
		case appReceives:
			if name, want = "recv", o.recv(); want == "" {
				o = before
				continue
			}
			resp := new(probev1.Response)
			if err := stream.RecvMsg(resp); err != nil {
				got = outcome(err)
			} else {
				got = fmt.Sprintf("%d:%s", resp.GetIndex(), resp.GetText())
			}
		case appAsksHeader:
			if name, want = "header", o.head(); want == "" {
				o = before
				continue
			}
			md, err := stream.Header()
			switch {
			case err != nil:
				got = err.Error()
			case md == nil:
				got = "none"
			default:
				got = "h"
			}
		case appAsksTrailer:
			name, want, got = "trailer", o.trailer(), "none"
			if v := one(stream.Trailer(), "run"); v != "" {
				got = v
			}
		}
		log = append(log, name+"="+got)
		if got != want {
			return fmt.Sprintf("op %d: %s, want %s=%s", i, strings.Join(log, " "), name, want)
		}
	}
	synctest.Wait()
	var received [][]string
	for _, e := range srv.Seen(method) {
		received = append(received, e.Texts)
	}
	if diff := cmp.Diff(o.received, received); diff != "" {
		return fmt.Sprintf("after %s, what the handler received, by run (-want +got):\n%s", strings.Join(log, " "), diff)
	}
	return ""
}

func stepsOf(script []serverRun) []probe.Step {
	var steps []probe.Step
	for i, run := range script {
		step := probe.Step{Code: run.code, Trailer: metadata.Pairs("run", strconv.Itoa(i+1))}
		step.Ops = []probe.Op{} // not the usual ones
		headed := false         // gRPC takes a second header for an error
		for _, m := range run.moves {
			switch m {
			case takes:
				step.Ops = append(step.Ops, probe.Recv(1))
			case flushes:
				if !headed {
					step.Ops = append(step.Ops, probe.Header())
				}
				headed = true
			case answers:
				headed = true
				step.Ops = append(step.Ops, probe.Send(1))
			}
		}
		steps = append(steps, step)
	}
	return steps
}
