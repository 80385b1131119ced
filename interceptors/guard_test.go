package interceptors_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	_ "google.golang.org/grpc/encoding/gzip" // what SetSendCompressor is asked for
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// A handler is told less than its caller has, by the reserve.
func TestServerDeadline(t *testing.T) {
	for _, c := range []struct {
		name   string
		config interceptors.DeadlineConfig
		caller time.Duration // 0: none
		told   time.Duration // 0: none
	}{
		{"5 % at most 5 ms", interceptors.DeadlineConfig{}, 2 * time.Second, 1995 * time.Millisecond},
		{"5 %", interceptors.DeadlineConfig{}, 40 * time.Millisecond, 38 * time.Millisecond},
		{"a reserve of one's own", interceptors.DeadlineConfig{Reserve: 50 * time.Millisecond}, time.Second, 950 * time.Millisecond},
		{"none from the caller", interceptors.DeadlineConfig{}, 0, 0},
		{"the default", interceptors.DeadlineConfig{Default: 3 * time.Second}, 0, 2995 * time.Millisecond},
		{"the default is no bound on callers", interceptors.DeadlineConfig{Default: time.Second}, 4 * time.Second, 3995 * time.Millisecond},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{server: []interceptors.ServerOption{interceptors.WithServerDeadline(c.config)}})
			ctx := t.Context()
			if c.caller > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, c.caller)
				defer cancel()
			}
			_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
			wantOK(t, err)
			e := r.srv.Seen(probe.Read)[0]
			wantEqual(t, "has a deadline", e.HasDeadline, c.told > 0)
			wantEqual(t, "told", e.Left, c.told)
		})
	}
}

// Retries that were spent behind a failure stay spent, though a later call of the
// same method ends for want of time.
func TestSpentThenOutOfTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		leaf := start(t, setup{})
		leaf.srv.Default(unavailable())
		mid := start(t, setup{plainClient: true})
		mid.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			_, spent := probe.Call(ctx, leaf.conn, probe.Read, req)
			wantStop(t, spent, interceptors.Exhausted, interceptors.Maybe)
			deadline, _ := ctx.Deadline()
			time.Sleep(time.Until(deadline) - time.Millisecond)
			_, late := probe.Call(ctx, leaf.conn, probe.Read, req)
			wantStop(t, late, interceptors.DeadlineTooShort, interceptors.No)
			return nil, status.Errorf(codes.Unavailable, "below: %v", spent)
		}})
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		var trailer metadata.MD
		_, err := probe.Call(ctx, mid.conn, probe.Read, request("x"), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "pushback", one(trailer, pushbackKey), "-1")
	})
}

// Too little time is refused before any work, and asking again is not invited.
func TestServerRefusesBeforeWork(t *testing.T) {
	for _, c := range []struct {
		name   string
		config interceptors.DeadlineConfig
		caller time.Duration
	}{
		{"less than 1 ms after the reserve", interceptors.DeadlineConfig{}, time.Millisecond},
		{"a floor of one's own", interceptors.DeadlineConfig{Floor: 500 * time.Millisecond}, 400 * time.Millisecond},
		{"a reserve that takes all", interceptors.DeadlineConfig{Reserve: time.Second}, 400 * time.Millisecond},
	} {
		for _, method := range []string{probe.Undeclared, probe.Keyed} {
			bubbles(t, c.name+" "+method, func(t *testing.T) {
				seen := new(events)
				r := start(t, setup{
					plainClient: true,
					server:      []interceptors.ServerOption{interceptors.WithServerDeadline(c.config), interceptors.WithObserver(seen)},
				})
				ctx, cancel := context.WithTimeout(t.Context(), c.caller)
				defer cancel()
				var trailer metadata.MD
				_, err := probe.Call(ctx, r.conn, method, request("x"), grpc.Trailer(&trailer))
				wantCode(t, err, codes.DeadlineExceeded)
				wantEqual(t, "hits", r.srv.Hits(method), 0)
				wantEqual(t, "pushback", one(trailer, pushbackKey), "-1")
				wantEqual(t, "executed", one(trailer, executedKey), "no")
				wantEqual(t, "shed events", seen.count(interceptors.EventShed), 1)
			})
		}
	}

	bubbles(t, "as a client with Belay sees it", func(t *testing.T) {
		r := start(t, setup{server: []interceptors.ServerOption{
			interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: 500 * time.Millisecond}),
		}})
		ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
		wantCode(t, err, codes.DeadlineExceeded)
		wantStop(t, err, interceptors.Pushback, interceptors.No)
		r.wantCounts(t, probe.Read, 1, 0)
	})
}

// However many have a wish, one value leaves.
func TestOnePushbackValue(t *testing.T) {
	failing := func(wrap func(error) error) probe.Step {
		return probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			return nil, wrap(status.Error(codes.Unavailable, "busy"))
		}}
	}
	after := func(d time.Duration) func(error) error {
		return func(err error) error { return interceptors.RetryAfter(err, d) }
	}
	for _, c := range []struct {
		name string
		step probe.Step
		want string
		info bool
	}{
		{"no wish", unavailable(), "", false},
		{"RetryAfter", failing(after(200 * time.Millisecond)), "200", true},
		{"RetryAfter rounds up", failing(after(time.Microsecond)), "1", true},
		{"RetryAfter 0", failing(after(0)), "0", true},
		{"RetryAfter never", failing(after(-1)), "-1", false},
		{"RetryAfter for ever", failing(after(1<<63 - 1)), "2147483647", true},
		{"wrapped", failing(func(err error) error { return fmt.Errorf("handler: %w", interceptors.RetryAfter(err, time.Second)) }), "1000", true},
		{"joined", failing(func(err error) error {
			return errors.Join(errors.New("two"), interceptors.RetryAfter(err, time.Second))
		}), "1000", true},
		{"by hand", probe.Step{Code: codes.Unavailable, Pushback: "70"}, "70", false},
		{"on a verdict", probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			return nil, interceptors.RetryAfter(status.Error(codes.NotFound, "gone"), time.Second)
		}}, "", true},
		{"on CANCELLED", probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			return nil, interceptors.RetryAfter(status.Error(codes.Canceled, "no"), time.Second)
		}}, "", true},
		{"nil", probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			return &probev1.Response{}, interceptors.RetryAfter(nil, time.Second)
		}}, "", false},
		{"by hand, and RetryAfter", probe.Step{Do: func(ctx context.Context, _ *probev1.Request) (*probev1.Response, error) {
			_ = grpc.SetTrailer(ctx, metadata.Pairs(pushbackKey, "70"))
			return nil, interceptors.RetryAfter(status.Error(codes.Unavailable, "busy"), 200*time.Millisecond)
		}}, "70", true},
	} {
		bubbles(t, c.name, func(t *testing.T) {
			r := start(t, setup{plainClient: true})
			r.srv.Script(probe.Read, c.step)
			var header, trailer metadata.MD
			_, err := r.call(t, probe.Read, request("x"), grpc.Header(&header), grpc.Trailer(&trailer))
			wantEqual(t, "pushback", one(trailer, pushbackKey), c.want)
			if header[pushbackKey] != nil || err != nil && len(header) > 0 {
				t.Errorf("header %v beside an error: native clients would not retry", header)
			}
			info := false
			for _, d := range status.Convert(err).Details() {
				if _, ok := d.(*errdetails.RetryInfo); ok {
					info = true
				}
			}
			wantEqual(t, "RetryInfo", info, c.info)
		})
	}

	// gRPC has no way to take back what a handler has set. Beside a "70" by hand
	// our "never" makes two values, which every client reads as never (gRFC A6).
	bubbles(t, "by hand, and never", func(t *testing.T) {
		r := start(t, setup{})
		r.srv.Script(probe.Read, probe.Step{Do: func(ctx context.Context, _ *probev1.Request) (*probev1.Response, error) {
			_ = grpc.SetTrailer(ctx, metadata.Pairs(pushbackKey, "70"))
			return nil, interceptors.RetryAfter(status.Error(codes.Unavailable, "busy"), -1)
		}})
		_, err := r.call(t, probe.Read, request("x"))
		wantStop(t, err, interceptors.Pushback, interceptors.Maybe)
		r.wantCounts(t, probe.Read, 1, 1)
	})

	// The ledger's "never" beats a delay that the handler asked for.
	bubbles(t, "the ledger and RetryAfter", func(t *testing.T) {
		leaf, mid := start(t, setup{}), start(t, setup{})
		leaf.srv.Default(unavailable())
		mid.srv.Script(probe.Read, probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
			_, err := probe.Call(ctx, leaf.conn, probe.Read, req)
			return nil, interceptors.RetryAfter(err, time.Second)
		}})
		var trailer metadata.MD
		_, err := mid.call(t, probe.Read, request("x"), grpc.Trailer(&trailer))
		wantCode(t, err, codes.Unavailable)
		wantEqual(t, "pushback", one(trailer, pushbackKey), "-1")
	})
}

// A client waits as long as RetryAfter says, and no retry is made after "never".
func TestRetryAfterAsClientsObeyIt(t *testing.T) {
	for name, native := range map[string]bool{"Belay": false, "native": true} {
		for _, c := range []struct {
			after    time.Duration
			attempts int
		}{{300 * time.Millisecond, 2}, {-1, 1}} {
			bubbles(t, fmt.Sprintf("%s %v", name, c.after), func(t *testing.T) {
				s := setup{}
				if native {
					s = setup{plainClient: true, dial: []grpc.DialOption{grpc.WithDefaultServiceConfig(nativeRetry)}}
				}
				r := start(t, s)
				r.srv.Script(probe.Read, probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
					return nil, interceptors.RetryAfter(status.Error(codes.Unavailable, "busy"), c.after)
				}})
				_, _ = r.call(t, probe.Read, request("x"))
				seen := r.srv.Seen(probe.Read)
				if len(seen) != c.attempts {
					t.Fatalf("%d hits, want %d", len(seen), c.attempts)
				}
				if c.attempts == 2 {
					wantBetween(t, "wait", seen[1].When.Sub(seen[0].When), c.after, c.after+10*time.Millisecond)
				}
			})
		}
	}
}

// The handler's own stream is gRPC's, as far as gRPC asks.
func TestSetSendCompressorKeepsWorking(t *testing.T) {
	for _, method := range []string{probe.Read, probe.Keyed} {
		bubbles(t, method, func(t *testing.T) {
			got := make(chan string, 1)
			r := start(t, setup{dial: []grpc.DialOption{grpc.WithStatsHandler(&headerSpy{got})}})
			r.srv.Script(method, probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
				if err := grpc.SetSendCompressor(ctx, "gzip"); err != nil {
					return nil, err
				}
				return &probev1.Response{Text: req.GetText()}, nil
			}})
			resp, err := r.call(t, method, request("x"))
			wantOK(t, err)
			wantEqual(t, "text", resp.GetText(), "x")
			wantEqual(t, "compression", <-got, "gzip")
		})
	}
}

// headerSpy tells how the response was compressed.
type headerSpy struct{ compression chan<- string }

func (s *headerSpy) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (s *headerSpy) HandleRPC(_ context.Context, st stats.RPCStats) {
	if in, ok := st.(*stats.InHeader); ok {
		s.compression <- in.Compression
	}
}

func (s *headerSpy) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (s *headerSpy) HandleConn(context.Context, stats.ConnStats)                       {}

// At the edge of a system nobody outside is believed or told names.
func TestTrustBoundary(t *testing.T) {
	bubbles(t, "server ignores attempts", func(t *testing.T) {
		// A caller who says that every failed call is a retry empties the bank of a
		// server that believes it.
		hits := func(t *testing.T, opts ...interceptors.ServerOption) string {
			r := start(t, setup{plainClient: true, server: opts})
			r.srv.Default(unavailable())
			var trailer metadata.MD
			for range 10 {
				ctx := metadata.AppendToOutgoingContext(t.Context(), attemptsKey, "3")
				_, err := probe.Call(ctx, r.conn, probe.Read, request("x"), grpc.Trailer(&trailer))
				wantCode(t, err, codes.Unavailable)
			}
			return one(trailer, pushbackKey)
		}
		wantEqual(t, "believed", hits(t), "-1")
		wantEqual(t, "at the boundary", hits(t, interceptors.WithTrustBoundary()), "")
	})

	bubbles(t, "server names nobody", func(t *testing.T) {
		leaf := start(t, setup{})
		leaf.srv.Default(unavailable())
		for _, boundary := range []bool{false, true} {
			var opts []interceptors.ServerOption
			want := probe.Read
			if boundary {
				opts, want = []interceptors.ServerOption{interceptors.WithTrustBoundary()}, ""
			}
			edge := start(t, setup{plainClient: true, server: opts})
			edge.srv.Default(probe.Step{Do: func(ctx context.Context, req *probev1.Request) (*probev1.Response, error) {
				_, err := probe.Call(ctx, leaf.conn, probe.Read, req)
				return nil, status.Errorf(codes.Unavailable, "edge: %v", status.Code(err))
			}})
			_, err := edge.call(t, probe.Read, request("x"))
			info := infoOf(err)
			wantEqual(t, "reason", info.GetReason(), "RETRIES_SPENT")
			wantEqual(t, "who", info.GetMetadata()["who"], want)
		}
	})

	bubbles(t, "client sends nothing of another hop", func(t *testing.T) {
		for _, boundary := range []bool{false, true} {
			var opts []interceptors.ClientOption
			if boundary {
				opts = append(opts, interceptors.WithTrustBoundary())
			}
			r := start(t, setup{client: opts})
			ctx := metadata.AppendToOutgoingContext(t.Context(),
				"belay-executed", "no", "belay-reason", "IN_FLIGHT", pushbackKey, "7", attemptsKey, "2", "app", "stays")
			_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
			wantOK(t, err)
			md := r.srv.Seen(probe.Read)[0].Metadata
			wantEqual(t, "app", one(md, "app"), "stays")
			for _, k := range []string{"belay-executed", "belay-reason", pushbackKey, attemptsKey} {
				if got := md.Get(k); len(got) > 0 == boundary {
					t.Errorf("boundary %v: %s arrives as %q", boundary, k, got)
				}
			}
		}
	})
}

// Retries at two layers are one too many, and are told of.
func TestTwoAttemptValuesAreReported(t *testing.T) {
	bubble(t, func(t *testing.T) {
		seen := new(events)
		r := start(t, setup{plainClient: true, server: []interceptors.ServerOption{interceptors.WithObserver(seen)}})
		for range 3 {
			ctx := metadata.AppendToOutgoingContext(t.Context(), attemptsKey, "1", attemptsKey, "2")
			_, err := probe.Call(ctx, r.conn, probe.Read, request("x"))
			wantOK(t, err)
		}
		wantEqual(t, "events", seen.count(interceptors.EventForeign), 3)
		wantEqual(t, "log lines", r.log.count("two layers"), 1)
	})

	// Nonsense from a peer is no retry and no crash.
	bubbles(t, "nonsense", func(t *testing.T) {
		r := start(t, setup{plainClient: true})
		r.srv.Default(unavailable())
		for _, value := range []string{"", "-1", "0", "many", "99999999999999999999", "1e3", " 2"} {
			for range 4 {
				var trailer metadata.MD
				ctx := metadata.AppendToOutgoingContext(t.Context(), attemptsKey, value)
				_, err := probe.Call(ctx, r.conn, probe.Read, request("x"), grpc.Trailer(&trailer))
				wantCode(t, err, codes.Unavailable)
				wantEqual(t, "pushback after "+value, one(trailer, pushbackKey), "")
			}
		}
	})
}

// What speaks about the server passes both halves and both sides untouched.
func TestExemptMethods(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, setup{
			client: []interceptors.ClientOption{
				interceptors.WithBreaker(threshold(1, time.Minute)),
				interceptors.WithPolicy(policy.Policy{Timeout: time.Millisecond, MinAttempt: time.Millisecond}),
			},
			server: []interceptors.ServerOption{interceptors.WithServerDeadline(interceptors.DeadlineConfig{Floor: time.Hour})},
			probe: []probe.Option{probe.Registered(func(s *grpc.Server) {
				healthpb.RegisterHealthServer(s, health.NewServer())
			})},
		})
		check := healthpb.NewHealthClient(r.conn)
		for range 3 {
			// An unknown service is NOT_FOUND; were it counted or refused, it would be another code.
			_, err := check.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "nobody"})
			wantCode(t, err, codes.NotFound)
			wantBare(t, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := check.Check(ctx, &healthpb.HealthCheckRequest{})
		wantOK(t, err)
		if e := r.client.Explain(r.conn, "grpc.health.v1.Health/Check"); !e.Exempt {
			t.Error("Explain does not call health exempt")
		}
	})
}

// A panic goes through Belay to the recovery interceptor that stands between.
func TestPanickingHandler(t *testing.T) {
	recovery := func(caught *any) grpc.ServerOption {
		return grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (_ any, err error) {
			defer func() {
				if *caught = recover(); *caught != nil {
					err = status.Error(codes.Internal, "recovered")
				}
			}()
			return next(ctx, req)
		})
	}
	bubbles(t, "ordinary", func(t *testing.T) {
		var caught any
		r := start(t, setup{between: []grpc.ServerOption{recovery(&caught)}})
		r.srv.Script(probe.Read, probe.Step{Panic: true})
		_, err := r.call(t, probe.Read, request("x"))
		wantCode(t, err, codes.Internal)
		wantEqual(t, "recovered", caught, any("probe: scripted panic in "+probe.Read))
		_, err = r.call(t, probe.Read, request("x"))
		wantOK(t, err)
	})
	bubbles(t, "keyed", func(t *testing.T) {
		var caught any
		r := start(t, setup{between: []grpc.ServerOption{recovery(&caught)}})
		r.srv.Script(probe.Keyed, probe.Step{Panic: true})
		same := key("k1")
		_, err := r.call(t, probe.Keyed, request("x"), same)
		wantCode(t, err, codes.Internal)
		p, ok := caught.(*idempotency.PanicError)
		if !ok || p.Value != any("probe: scripted panic in "+probe.Keyed) || len(p.Stack) == 0 {
			t.Errorf("recovered %v, want the handler's panic with its stack", caught)
		}
		// Nobody knows what it had done.
		_, err = r.call(t, probe.Keyed, request("x"), same)
		wantReason(t, err, codes.FailedPrecondition, idempotency.ReasonOutcomeUnknown)
		wantEqual(t, "exec", r.srv.Hits(probe.Keyed), 1)
	})
}

// Each half works without the other.
func TestHalvesAlone(t *testing.T) {
	bubbles(t, "guard", func(t *testing.T) {
		server := newServer(t)
		r := start(t, setup{plainServer: true, between: []grpc.ServerOption{grpc.ChainUnaryInterceptor(server.UnaryGuard())}})
		r.srv.Script(probe.Read, probe.Step{Do: func(context.Context, *probev1.Request) (*probev1.Response, error) {
			return nil, interceptors.RetryAfter(status.Error(codes.Unavailable, "busy"), -1)
		}})
		_, err := r.call(t, probe.Read, request("x"))
		wantStop(t, err, interceptors.Pushback, interceptors.Maybe)
		wantEqual(t, "told", r.srv.Seen(probe.Read)[0].Left, 1995*time.Millisecond)
	})
	bubbles(t, "dedupe", func(t *testing.T) {
		server := newServer(t, memory(idempotency.Config{}))
		r := start(t, setup{plainServer: true, between: []grpc.ServerOption{grpc.ChainUnaryInterceptor(server.UnaryDedupe())}})
		r.srv.Script(probe.Keyed, probe.Step{LoseReply: true})
		same := key("k1")
		var trailer metadata.MD
		_, err := r.call(t, probe.Keyed, request("x"), same, grpc.Trailer(&trailer))
		wantOK(t, err)
		wantEqual(t, "status", one(trailer, statusKey), "replayed")
		wantEqual(t, "effects", r.srv.Effects(probe.Keyed), 1)

		_, err = r.call(t, probe.Keyed, request("y"), same, grpc.Trailer(&trailer))
		wantReason(t, err, codes.FailedPrecondition, idempotency.ReasonKeyReused)
		wantEqual(t, "executed", one(trailer, executedKey), "no")
		wantEqual(t, "reason", one(trailer, reasonKey), "KEY_REUSED")
		wantEqual(t, "pushback on a verdict", one(trailer, pushbackKey), "")
	})
	bubbles(t, "dedupe names its delay", func(t *testing.T) {
		server := newServer(t, stored(&brokenStore{}, idempotency.Config{}))
		r := start(t, setup{plainServer: true, plainClient: true, between: []grpc.ServerOption{grpc.ChainUnaryInterceptor(server.UnaryDedupe())}})
		ctx := metadata.AppendToOutgoingContext(t.Context(), keyKey, "k1")
		var trailer metadata.MD
		_, err := probe.Call(ctx, r.conn, probe.Keyed, request("x"), grpc.Trailer(&trailer))
		wantReason(t, err, codes.Unavailable, idempotency.ReasonStoreUnavailable)
		wantEqual(t, "executed", one(trailer, executedKey), "no")
		if v := one(trailer, pushbackKey); v == "" || v == "-1" {
			t.Errorf("pushback %q, want a delay", v)
		}
	})
}
