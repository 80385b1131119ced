package interceptors_test

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// What gRPC's contract for streams demands of one that retries, trap by trap.

// 1: a retry that RecvMsg drives sends again while the application is inside
// SendMsg.
func TestTrap01SendAndRecvAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const messages = 100
		r := start(t, setup{})
		r.srv.Script(probe.Bidi,
			probe.Step{Ops: []probe.Op{probe.Recv(7)}, Code: codes.Unavailable},
			probe.Step{Ops: []probe.Op{probe.Recv(31)}, Code: codes.Unavailable})
		talkTagged(t, r, "x", messages)
		seen := r.srv.Seen(probe.Bidi)
		wantEqual(t, "handler runs", len(seen), 3)
		for _, e := range seen {
			wantOneTagInOrder(t, e.Texts)
		}
		wantEqual(t, "messages of the last run", len(seen[2].Texts), messages)
	})
}

// 2: io.EOF from SendMsg is neither a transport error nor success; any other
// error is this side's and has ended the stream.
func TestTrap02SendErrors(t *testing.T) {
	bubbles(t, "the end", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Bidi, probe.Step{Code: codes.NotFound})
		stream := openStream(t.Context(), t, r.conn, probe.Bidi)
		synctest.Wait()
		wantEqual(t, "SendMsg", outcome(stream.SendMsg(request("a"))), "EOF")
		_, err := recv(stream)
		wantCode(t, err, codes.NotFound)
	})
	bubbles(t, "the end of a server stream", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ServerStream, probe.Step{Code: codes.NotFound})
		_, err := drain(ask(t.Context(), t, r.conn, 1)) // SendMsg is nil
		wantCode(t, err, codes.NotFound)
	})
	bubbles(t, "this side's", func(t *testing.T) {
		held := &permits{}
		r := start(t, setup{client: []interceptors.ClientOption{interceptors.WithOwnBreaker(held)}})
		finished := 0
		stream := openStream(t.Context(), t, r.conn, probe.Bidi, grpc.MaxCallSendMsgSize(100), grpc.OnFinish(func(error) { finished++ }))
		send(t, stream, "small")
		synctest.Wait() // its answer is here, and is not delivered behind the error
		err := stream.SendMsg(&probev1.Request{Payload: make([]byte, 1000)})
		wantCode(t, err, codes.ResourceExhausted)
		wantBare(t, err)
		_, again := recv(stream)
		wantCode(t, again, codes.ResourceExhausted)
		wantEqual(t, "attempts", r.counter.Count(), 1)
		wantEqual(t, "OnFinish", finished, 1)
		synctest.Wait()
		held.wantDone(t, 1)
	})
}

// 3: behind io.EOF from SendMsg there may be messages.
func TestTrap03MessagesBehindTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Bidi, probe.Step{Ops: []probe.Op{probe.Recv(1), probe.Send(2)}})
		stream := openStream(t.Context(), t, r.conn, probe.Bidi)
		send(t, stream, "a")
		synctest.Wait() // all has come, and nothing was read
		if err := stream.SendMsg(request("b")); err != nil && !errors.Is(err, io.EOF) {
			t.Errorf("SendMsg: %v", err)
		}
		got, err := drain(stream)
		wantOK(t, err)
		wantEqual(t, "messages", strings.Join(got, ","), "1:a,2:a")
		wantEqual(t, "attempts", r.counter.Count(), 1)
	})
}

// 4: one answer is the end of a client stream; nobody asks again.
func TestTrap04OneAnswerIsTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		recorded, held := &spans{}, &permits{}
		r := start(t, setup{client: []interceptors.ClientOption{
			interceptors.WithTracerProvider(recorded), interceptors.WithOwnBreaker(held),
		}})
		finished := 0
		stream := openStream(t.Context(), t, r.conn, probe.ClientStream, grpc.OnFinish(func(error) { finished++ }))
		send(t, stream, "a")
		wantOK(t, stream.CloseSend())
		_, err := recv(stream)
		wantOK(t, err)
		recorded.wantEndedOnce(t, "belay.probe.v1.ProbeService/ClientStream", 1)
		held.wantDone(t, 1)
		wantEqual(t, "OnFinish", finished, 1)
		if stream.Context().Err() == nil {
			t.Error("the stream's context was not released")
		}
	})
}

// 5: layers above may call CloseSend and RecvMsg more often than they must.
func TestTrap05CallsAfterTheEnd(t *testing.T) {
	for _, c := range []struct {
		name string
		step probe.Step
		want string
	}{{"success", probe.Step{}, "EOF"}, {"failure", probe.Step{Code: codes.NotFound}, "NotFound"}} {
		for _, method := range []string{probe.ServerStream, probe.ClientStream, probe.Bidi} {
			bubbles(t, c.name+method, func(t *testing.T) {
				r := start(t, setup{})
				r.srv.Script(method, c.step)
				stream := openStream(t.Context(), t, r.conn, method)
				_ = stream.SendMsg(request("a")) // RecvMsg has the last word
				for range 3 {
					wantOK(t, stream.CloseSend())
				}
				_, err := drain(stream)
				for range 3 {
					wantOK(t, stream.CloseSend())
					if _, again := recv(stream); outcome(again) != c.want || err != nil && !errors.Is(again, err) {
						t.Errorf("RecvMsg after the end: %v, want %s, the same as before: %v", again, c.want, err)
					}
					if got := outcome(stream.SendMsg(request("late"))); got == "OK" && method != probe.ServerStream {
						t.Errorf("SendMsg after the end: %s", got)
					}
				}
				wantEqual(t, "attempts", r.counter.Count(), 1)
			})
		}
	}
}

// 6: Header drives a retry, and what it returned commits.
func TestTrap06HeaderRetriesAndCommits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Bidi, unavailable(), unavailable(),
			probe.Step{Ops: []probe.Op{probe.Header("h", "three")}, Code: codes.Unavailable})
		stream := openStream(t.Context(), t, r.conn, probe.Bidi)
		send(t, stream, "a")
		md, err := stream.Header()
		wantOK(t, err)
		wantEqual(t, "header", one(md, "h"), "three")
		wantEqual(t, "attempts", r.counter.Count(), 3)
		_, err = recv(stream)
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "attempts", r.counter.Count(), 3)
	})
	bubbles(t, "nothing on failure", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Default(unavailable())
		stream := openStream(t.Context(), t, r.conn, probe.Bidi)
		md, err := stream.Header()
		if md != nil || err != nil {
			t.Errorf("Header: %v, %v; want nil, nil", md, err)
		}
		_, err = recv(stream)
		wantStopped(t, err, interceptors.Exhausted, interceptors.Maybe)
		wantEqual(t, "attempts", r.counter.Count(), 3)
	})
}

// 7: Trailer is the deciding attempt's, after its context was cancelled too.
func TestTrap07TrailerOfTheDecidingAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ServerStream,
			probe.Step{Code: codes.Unavailable, Trailer: metadata.Pairs("t", "one", "only-one", "1")},
			probe.Step{Trailer: metadata.Pairs("t", "two")})
		stream := ask(t.Context(), t, r.conn, 1)
		wantEqual(t, "trailer before the end", len(stream.Trailer()), 0)
		_, err := drain(stream)
		wantOK(t, err)
		wantEqual(t, "t", one(stream.Trailer(), "t"), "two")
		wantEqual(t, "only-one", one(stream.Trailer(), "only-one"), "")
	})
}

// 8: the inner stream's Context is never asked for, which would commit gRPC's
// own attempt. Ours has the caller's values, and asking for it commits nothing.
func TestTrap08ContextIsTheCallsOwn(t *testing.T) {
	type callersKey struct{}
	bubble(t, func(t *testing.T) {
		r := start(t, setup{inner: []grpc.DialOption{onInner(func(_ int, s grpc.ClientStream) (grpc.ClientStream, error) {
			return noContext{s}, nil
		})}})
		r.srv.Script(probe.Bidi, unavailable())
		stream := openStream(context.WithValue(t.Context(), callersKey{}, "mine"), t, r.conn, probe.Bidi)
		ctx := stream.Context()
		if ctx.Value(callersKey{}) != "mine" {
			t.Error("the stream's context lacks the caller's values")
		}
		send(t, stream, "a")
		wantOK(t, stream.CloseSend())
		_, err := drain(stream)
		wantOK(t, err)
		wantEqual(t, "attempts", r.counter.Count(), 2)
		if stream.Context() != ctx {
			t.Error("the stream's context is another one after a retry")
		}
		if ctx.Err() == nil {
			t.Error("the stream's context outlives the stream")
		}
	})
}

type noContext struct{ grpc.ClientStream }

func (noContext) Context() context.Context { panic("the inner stream's Context was asked for") }

// 9: streams that are abandoned after CloseSend end at the server too.
func TestTrap09AbandonedAfterCloseSend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Default(probe.Step{Hang: true})
		ctx, cancel := context.WithCancel(t.Context())
		for range 50 {
			openClosed(ctx, t, r)
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		for _, e := range r.srv.Seen() {
			if !e.Ended {
				t.Fatal("a handler is stuck")
			}
		}
		wantEqual(t, "handlers", len(r.srv.Seen()), 50)
		for _, a := range r.counter.Attempts() {
			if !a.Ended {
				t.Fatal("an attempt is stuck")
			}
		}
	})
}

// 10: the interceptor has long returned while the stream lives.
func TestTrap10TheStreamOutlivesItsInterceptor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		var ops []probe.Op
		for range 24 {
			ops = append(ops, probe.Sleep(time.Hour), probe.Send(1))
		}
		r.srv.Script(probe.ServerStream, probe.Step{Ops: ops})
		begun := time.Now()
		got, err := drain(ask(t.Context(), t, r.conn, 0))
		wantOK(t, err)
		wantEqual(t, "messages", len(got), 24)
		wantEqual(t, "lived", time.Since(begun), 24*time.Hour)
	})
}

// 11: the time of an attempt bounds the wait for its first response, and an
// upload does not wait while it moves.
func TestTrap11AttemptTimeoutIsForTheFirstResponse(t *testing.T) {
	limit := policy.Policy{AttemptTimeout: time.Second, Backoff: fixed(10 * time.Millisecond)}
	bubbles(t, "a long stream", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(limit)})
		r.srv.Script(probe.ServerStream, probe.Step{Ops: []probe.Op{
			probe.Sleep(900 * time.Millisecond), probe.Send(1), probe.Sleep(time.Hour), probe.Send(1), probe.Sleep(time.Hour),
		}})
		got, err := drain(ask(t.Context(), t, r.conn, 0))
		wantOK(t, err)
		wantEqual(t, "messages", len(got), 2)
		wantEqual(t, "attempts", r.counter.Count(), 1)
	})
	bubbles(t, "its header is a response", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(limit)})
		r.srv.Script(probe.ServerStream, probe.Step{Ops: []probe.Op{probe.Header("h", "1"), probe.Sleep(time.Hour), probe.Send(1)}})
		stream := ask(t.Context(), t, r.conn, 0)
		_, err := stream.Header()
		wantOK(t, err)
		_, err = drain(stream)
		wantOK(t, err)
	})
	bubbles(t, "no first response", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(limit)})
		r.srv.Script(probe.ServerStream, probe.Step{Hang: true})
		begun := time.Now()
		got, err := drain(ask(t.Context(), t, r.conn, 1))
		wantOK(t, err)
		wantEqual(t, "messages", len(got), 1)
		wantEqual(t, "took", time.Since(begun), 1010*time.Millisecond)
		synctest.Wait()
		if e := r.srv.Seen()[0]; e.CtxErr == nil || e.Took != time.Second {
			t.Errorf("the first handler ended with %v after %v, want its context's end after 1s", e.CtxErr, e.Took)
		}
	})
	bubbles(t, "never a first response", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(limit)})
		r.srv.Default(probe.Step{Hang: true})
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantCode(t, err, codes.DeadlineExceeded)
		wantStopped(t, err, interceptors.Exhausted, interceptors.Maybe)
		for _, a := range callErrorOf(t, err).Attempts() {
			wantEqual(t, "attempt's code", a.Code, codes.DeadlineExceeded)
		}
	})
	bubbles(t, "a long upload", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(limit)})
		r.srv.Script(probe.ClientStream, probe.Step{Ops: []probe.Op{probe.RecvAll(), probe.Sleep(900 * time.Millisecond)}})
		stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
		for range 20 {
			send(t, stream, "part")
			time.Sleep(900 * time.Millisecond)
		}
		wantOK(t, stream.CloseSend())
		_, err := recv(stream)
		wantOK(t, err)
		wantEqual(t, "attempts", r.counter.Count(), 1)
	})
	bubbles(t, "an upload that nobody takes", func(t *testing.T) {
		r := start(t, setup{client: withPolicy(limit)})
		r.srv.Default(probe.Step{Hang: true})
		stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
		begun := time.Now()
		var err error
		for err == nil { // until flow control stops it
			err = stream.SendMsg(&probev1.Request{Payload: make([]byte, 16<<10)})
		}
		wantEqual(t, "SendMsg", outcome(err), "EOF")
		wantEqual(t, "took", time.Since(begun), time.Second)
		_, err = recv(stream)
		wantCode(t, err, codes.DeadlineExceeded)
	})
}

// 12: applications use their messages again. What is kept is bounded in bytes
// and in number.
func TestTrap12MessagesAreUsedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.ClientStream, probe.Step{Ops: []probe.Op{probe.RecvAll()}, Code: codes.Unavailable})
		stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
		m := &probev1.Request{}
		for _, text := range []string{"a", "b", "c"} {
			m.Text = text
			wantOK(t, stream.SendMsg(m))
		}
		m.Text = "changed"
		wantOK(t, stream.CloseSend())
		_, err := recv(stream)
		wantOK(t, err)
		for _, e := range r.srv.Seen() {
			wantEqual(t, "messages", strings.Join(e.Texts, ","), "a,b,c")
		}
		wantEqual(t, "attempts", r.counter.Count(), 2)
	})
	for _, c := range []struct {
		name     string
		message  *probev1.Request
		messages int
		attempts int
	}{
		{"many, empty", &probev1.Request{}, 1024, 2},
		{"too many, empty", &probev1.Request{}, 1025, 1},
		// With its tag and length a payload of n bytes weighs n+4.
		{"as many bytes as may be kept", &probev1.Request{Payload: make([]byte, 32<<10-4)}, 2, 2},
		{"one byte more", &probev1.Request{Payload: make([]byte, 32<<10-3)}, 2, 1},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(probe.ClientStream, probe.Step{Ops: []probe.Op{probe.RecvAll()}, Code: codes.Unavailable})
			stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
			for range c.messages {
				wantOK(t, stream.SendMsg(c.message))
			}
			wantOK(t, stream.CloseSend())
			_, err := recv(stream)
			if (err == nil) != (c.attempts == 2) {
				t.Errorf("ended with %v", err)
			}
			if err != nil {
				wantBare(t, err) // a single attempt, on which nothing was withheld
			}
			wantEqual(t, "attempts", r.counter.Count(), c.attempts)
		})
	}
}

// 13: a prepared message cannot be copied. It goes through, and the stream goes
// on without retries.
func TestTrap13PreparedMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		bare := r.network.Dial(t)
		prepared := &grpc.PreparedMsg{}
		wantOK(t, prepared.Encode(openStream(t.Context(), t, bare, probe.Bidi), request("prepared")))

		stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
		wantCode(t, new(grpc.PreparedMsg).Encode(stream, request("x")), codes.Internal)
		wantOK(t, stream.SendMsg(prepared))
		wantOK(t, stream.CloseSend())
		got, err := recv(stream)
		wantOK(t, err)
		wantEqual(t, "answer", got, "1:prepared")

		r.srv.Script(probe.ClientStream, probe.Step{Ops: []probe.Op{probe.RecvAll()}, Code: codes.Unavailable})
		r.counter.Reset()
		stream = openStream(t.Context(), t, r.conn, probe.ClientStream)
		wantOK(t, stream.SendMsg(prepared))
		wantOK(t, stream.CloseSend())
		_, err = recv(stream)
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "attempts", r.counter.Count(), 1)
	})
}

// mergingCodec decodes into what it finds, as codecs other than gRPC's for
// protobuf may.
type mergingCodec struct{}

func (mergingCodec) Name() string { return "proto" }
func (mergingCodec) Marshal(v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, errors.New("not a protobuf message")
	}
	return proto.Marshal(m)
}

func (mergingCodec) Unmarshal(data []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return errors.New("not a protobuf message")
	}
	return proto.UnmarshalOptions{Merge: true}.Unmarshal(data, m)
}

// 14: nothing of an attempt that failed half-way is left in the message.
func TestTrap14NothingIsLeftInTheMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{inner: []grpc.DialOption{onInner(func(n int, s grpc.ClientStream) (grpc.ClientStream, error) {
			if n == 1 {
				return halfFilled{s}, nil
			}
			return s, nil
		})}})
		r.srv.Script(probe.ClientStream, probe.Step{Ops: []probe.Op{probe.RecvAll()}, Code: codes.Unavailable})
		stream := openStream(t.Context(), t, r.conn, probe.ClientStream, grpc.ForceCodec(mergingCodec{}))
		send(t, stream, "a")
		wantOK(t, stream.CloseSend())
		resp := &probev1.Response{}
		wantOK(t, stream.RecvMsg(resp))
		wantEqual(t, "text", resp.GetText(), "a")
		wantEqual(t, "labels of the dead attempt", len(resp.GetLabels()), 0)
	})
}

type halfFilled struct{ grpc.ClientStream }

func (h halfFilled) RecvMsg(m any) error {
	if resp, ok := m.(*probev1.Response); ok {
		resp.Labels = map[string]string{"left": "over"}
	}
	return h.ClientStream.RecvMsg(m)
}

// 15: no message is delivered twice: "12123" is what others make of this.
func TestTrap15NoRetryAfterAMessage(t *testing.T) {
	for _, method := range []string{probe.ServerStream, probe.Bidi} {
		bubbles(t, method, func(t *testing.T) {
			r := start(t, setup{})
			r.srv.Script(method, probe.Step{Ops: []probe.Op{probe.Send(2)}, Code: codes.Unavailable}, probe.Step{Ops: []probe.Op{probe.Send(3)}})
			stream := openStream(t.Context(), t, r.conn, method)
			send(t, stream, "q")
			wantOK(t, stream.CloseSend())
			got, err := drain(stream)
			wantCode(t, err, codes.Unavailable)
			wantBare(t, err)
			wantEqual(t, "messages", strings.Join(got, ","), "1:,2:")
			wantEqual(t, "attempts", r.counter.Count(), 1)
		})
	}
}

// 16: metadata starts from the caller's for every attempt, and credentials are
// asked anew.
func TestTrap16MetadataDoesNotPileUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		creds := &countingCreds{}
		r := start(t, setup{dial: []grpc.DialOption{grpc.WithPerRPCCredentials(creds)}})
		r.srv.Script(probe.Bidi, unavailable(), unavailable())
		ctx := metadata.AppendToOutgoingContext(t.Context(), "mine", "1")
		_, err := drain(openClosed(ctx, t, r, key("k")))
		wantOK(t, err)
		seen := r.srv.Seen()
		wantEqual(t, "attempts", len(seen), 3)
		for i, e := range seen {
			wantEqual(t, "mine", one(e.Metadata, "mine"), "1")
			wantEqual(t, "key", one(e.Metadata, keyKey), "k")
			wantEqual(t, "previous attempts", e.PreviousAttempts(), i)
			wantEqual(t, "credential", one(e.Metadata, "token"), strconv.Itoa(i+1))
		}
	})
}

type countingCreds struct {
	mu sync.Mutex // guards n
	n  int
}

func (c *countingCreds) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	return map[string]string{"token": strconv.Itoa(c.n)}, nil
}

func (*countingCreds) RequireTransportSecurity() bool { return false }

// 17: one key for all attempts of a stream, a new one for the next.
func TestTrap17OneKeyForAllAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{plainServer: true})
		var outcomes, keys []string
		for range 2 {
			r.srv.Script(probe.ClientStreamKeyed, unavailable(), unavailable())
			stream := openStream(t.Context(), t, r.conn, probe.ClientStreamKeyed)
			_ = stream.SendMsg(request("a")) // RecvMsg has the last word
			wantOK(t, stream.CloseSend())
			_, err := recv(stream)
			outcomes = append(outcomes, outcome(err))
		}
		for _, e := range r.srv.Seen() {
			keys = append(keys, one(e.Metadata, keyKey))
		}
		// The server does not keep the promise of the declaration. So the second
		// call is not repeated, but has its key.
		wantEqual(t, "outcomes", strings.Join(outcomes, " "), "OK Unavailable")
		if len(keys) != 4 || keys[0] == "" || keys[0] != keys[1] || keys[1] != keys[2] || keys[2] == keys[3] || keys[3] == "" {
			t.Errorf("keys %q, want one for the three attempts of the first call and another for the second", keys)
		}
	})
	bubbles(t, "a key in the context is refused", func(t *testing.T) {
		r := start(t, setup{})
		synctest.Wait() // the server serves
		ctx := metadata.AppendToOutgoingContext(t.Context(), keyKey, "leaked")
		_, err := r.conn.NewStream(ctx, descOf(probe.ClientStreamKeyed), probe.ClientStreamKeyed)
		wantCode(t, err, codes.InvalidArgument)
		r.wantCounts(t, probe.ClientStreamKeyed, 0, 0)
	})
}

// 18: the caller's options reach every attempt unchanged.
func TestTrap18OptionsReachEveryAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var seen []string
		r := start(t, setup{inner: []grpc.DialOption{grpc.WithChainStreamInterceptor(
			func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				mu.Lock()
				defer mu.Unlock()
				for _, o := range opts {
					switch o := o.(type) {
					case grpc.CompressorCallOption:
						seen = append(seen, o.CompressorType)
					case grpc.MaxRecvMsgSizeCallOption:
						seen = append(seen, strconv.Itoa(o.MaxRecvMsgSize))
					}
				}
				return streamer(ctx, desc, cc, method, opts...)
			})}})
		r.srv.Script(probe.Bidi, unavailable())
		_, err := drain(openClosed(t.Context(), t, r, grpc.UseCompressor(gzip.Name), grpc.MaxCallRecvMsgSize(1000)))
		wantOK(t, err)
		wantEqual(t, "options", strings.Join(seen, " "), "gzip 1000 gzip 1000")
	})
	bubbles(t, "a limit of this side is final on the way in, too", func(t *testing.T) {
		r := start(t, setup{})
		stream := openStream(t.Context(), t, r.conn, probe.Bidi, grpc.MaxCallRecvMsgSize(10))
		send(t, stream, "more than ten bytes of text")
		_, err := recv(stream)
		wantCode(t, err, codes.ResourceExhausted)
		wantEqual(t, "attempts", r.counter.Count(), 1)
	})
}

// 19: retries at two layers multiply.
func TestTrap19NativeRetriesBelow(t *testing.T) {
	bubbles(t, "DialOptions switches them off", func(t *testing.T) {
		r := start(t, setup{dial: []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeConfig)}})
		r.srv.Default(unavailable())
		_, err := drain(openClosed(t.Context(), t, r))
		wantCode(t, err, codes.Unavailable)
		r.wantCounts(t, probe.Bidi, 3, 3)
	})
	bubbles(t, "a chain of one's own is warned once", func(t *testing.T) {
		log := &logLines{}
		c := newClient(t, interceptors.WithPolicy(casePolicy()), interceptors.WithLogger(slogTo(log)))
		conn, srv := probe.Start(t, probe.DialOptions(
			grpc.WithDefaultServiceConfig(nativeConfig), grpc.WithChainStreamInterceptor(c.Stream())))
		srv.Default(unavailable())
		for range 3 {
			_, err := drain(ask(t.Context(), t, conn, 1))
			wantCode(t, err, codes.Unavailable)
		}
		wantEqual(t, "warnings", log.count("retries multiply"), 1)
	})
}

// 20: while the channel is broken attempts fail in microseconds, and would all be
// gone before it can heal.
func TestTrap20FailFastDoesNotBurnAttempts(t *testing.T) {
	quick := grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1, MaxDelay: 50 * time.Millisecond}})
	bubbles(t, "heals", func(t *testing.T) {
		r := start(t, setup{inner: []grpc.DialOption{quick}})
		r.network.Down()
		time.AfterFunc(600*time.Millisecond, r.network.Up)
		_, err := drain(ask(t.Context(), t, r.conn, 1))
		wantOK(t, err)
		wantEqual(t, "hits", r.srv.Hits(probe.ServerStream), 1)
		if n := r.counter.Count(); n > 3 {
			t.Errorf("%d attempts, want at most 3", n)
		}
	})
	bubbles(t, "does not heal", func(t *testing.T) {
		r := start(t, setup{inner: []grpc.DialOption{quick}})
		r.network.Down()
		begun := time.Now()
		_, err := r.conn.NewStream(t.Context(), descOf(probe.ServerStream), probe.ServerStream)
		wantCode(t, err, codes.Unavailable)
		if !strings.Contains(err.Error(), "connection refused") {
			t.Errorf("%v does not say why", err)
		}
		wantEqual(t, "executed", callErrorOf(t, err).Executed(), interceptors.No)
		wantBetween(t, "took", time.Since(begun), 0, 1500*time.Millisecond)
	})
}

// 21: interceptors below run for each attempt, those above once.
func TestTrap21InterceptorsAboveAndBelow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		above := &probe.Counter{}
		r := start(t, setup{dial: []grpc.DialOption{grpc.WithChainStreamInterceptor(above.Stream())}})
		r.srv.Script(probe.Bidi, unavailable(), unavailable())
		_, err := drain(openClosed(t.Context(), t, r))
		wantOK(t, err)
		wantEqual(t, "above", above.Count(), 1)
		wantEqual(t, "below", r.counter.Count(), 3)
		if a := above.Attempts()[0]; !a.Ended || a.Err != nil {
			t.Errorf("above: ended %t with %v, want success", a.Ended, a.Err)
		}
	})
}

// 22: balancers know no list of backends to avoid: the same one may be asked
// again, and on a channel with one it must be.
func TestTrap22TheSameBackendIsAskedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Bidi, unavailable())
		_, err := drain(openClosed(t.Context(), t, r))
		wantOK(t, err)
		r.wantCounts(t, probe.Bidi, 2, 2)
	})
}

// 23: a client stream that cannot be repeated is not refused for it.
func TestTrap23WhatCannotBeRepeatedGoesThrough(t *testing.T) {
	for _, c := range []struct {
		name    string
		policy  policy.Policy
		payload int
	}{
		{"nothing may be kept", policy.Policy{ReplayBytes: 1}, 100},
		{"one message is too large", policy.Policy{}, 1 << 20},
		{"one attempt", policy.Policy{MaxAttempts: 1}, 100},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{client: withPolicy(c.policy)})
			stream := openStream(t.Context(), t, r.conn, probe.ClientStream)
			for range 10 {
				wantOK(t, stream.SendMsg(&probev1.Request{Text: "x", Payload: make([]byte, c.payload)}))
			}
			wantOK(t, stream.CloseSend())
			_, err := recv(stream)
			wantOK(t, err)
			wantEqual(t, "messages", r.srv.Seen()[0].Received, 10)
		})
	}
}

// 24: a header on a failure stops native clients, so our server speaks in
// trailers.
func TestTrap24ServerSpeaksInTrailers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{
			plainClient: true,
			dial:        []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeConfig)},
			between: []grpc.ServerOption{grpc.ChainStreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
				if err := next(srv, ss); err != nil {
					return interceptors.RetryAfter(err, 300*time.Millisecond)
				}
				return nil
			})},
		})
		r.srv.Script(probe.ServerStream, unavailable())
		begun := time.Now()
		stream := ask(t.Context(), t, r.conn, 1)
		_, err := drain(stream)
		wantOK(t, err)
		wantEqual(t, "hits", r.srv.Hits(probe.ServerStream), 2)
		wantEqual(t, "the native client waited", time.Since(begun), 300*time.Millisecond)
	})
}
