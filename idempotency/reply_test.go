package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/belayrpc/belay/idempotency"
	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
)

// details returns the details of a refusal by kind.
func details(t *testing.T, r *idempotency.Refusal) (info *errdetails.ErrorInfo, retry *errdetails.RetryInfo, bad *errdetails.BadRequest, pre *errdetails.PreconditionFailure) {
	t.Helper()
	for _, d := range r.Status().GetDetails() {
		m, err := d.UnmarshalNew()
		if err != nil {
			t.Fatal(err)
		}
		switch m := m.(type) {
		case *errdetails.ErrorInfo:
			info = m
		case *errdetails.RetryInfo:
			retry = m
		case *errdetails.BadRequest:
			bad = m
		case *errdetails.PreconditionFailure:
			pre = m
		default:
			t.Errorf("%v has a detail of type %T", r.Reason, m)
		}
	}
	return info, retry, bad, pre
}

// Every refusal, made the way it comes about, with its code, details and delay.
func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory(t)
		e, _ := newEngine(t, store, func(c *idempotency.Config) { c.MaxReply = 10 })
		do(bg, e, "used", answering(ok("done")))
		do(bg, e, "large", answering(ok("larger than ten bytes")))
		do(bg, e, "unknown", answering(failing(code.Code_INTERNAL, nil)))
		if err := store.Resolve(bg, idOf("cancelled"), idempotency.Resolution{State: idempotency.StateCancelled}); err != nil {
			t.Fatal(err)
		}
		late := idempotency.Key{Value: "late", FirstSent: time.Now().Add(-8 * time.Minute)}
		lateCall := e.Do(bg, idempotency.Call{Method: method, Key: late}, never(t))
		noScope, _ := newEngine(t, store, func(c *idempotency.Config) {
			c.Scope = func(context.Context) (string, error) { return "", nil }
		})
		limited, _ := newEngine(t, store, func(c *idempotency.Config) {
			c.Limit = func(context.Context, string, string) error { return errors.New("quota") }
		})
		const delay, stop, field, subject = 1, 2, 4, 8 // a set
		for _, row := range []struct {
			reason   idempotency.Reason
			refusal  *idempotency.Refusal
			executed idempotency.Executed
			has      int
		}{
			{idempotency.ReasonKeyMissing, idempotency.RefuseKeyMissing("request_id"), idempotency.ExecutedNo, stop | field},
			{idempotency.ReasonKeyConflict, idempotency.RefuseKeyConflict("request_id"), idempotency.ExecutedNo, stop | field},
			{idempotency.ReasonNoStore, idempotency.RefuseNoStore(), idempotency.ExecutedNo, stop},
			{idempotency.ReasonKeyInvalid, do(bg, e, "", never(t)).Refusal, idempotency.ExecutedNo, stop | field},
			{idempotency.ReasonKeyReused, doWith(bg, e, "used", "other", never(t)).Refusal, idempotency.ExecutedNo, stop | subject},
			{idempotency.ReasonResponseNotRetained, do(bg, e, "large", never(t)).Refusal, idempotency.ExecutedYes, stop | subject},
			{idempotency.ReasonOutcomeUnknown, do(bg, e, "unknown", never(t)).Refusal, idempotency.ExecutedMaybe, stop | subject},
			{idempotency.ReasonKeyCancelled, do(bg, e, "cancelled", never(t)).Refusal, idempotency.ExecutedNo, stop | subject},
			{idempotency.ReasonKeyExpired, lateCall.Refusal, idempotency.ExecutedMaybe, stop | subject},
			{idempotency.ReasonScopeMissing, do(bg, noScope, "k", never(t)).Refusal, idempotency.ExecutedNo, stop},
			{idempotency.ReasonScopeLimit, do(bg, limited, "k", never(t)).Refusal, idempotency.ExecutedNo, stop},
		} {
			r := row.refusal
			if r == nil || r.Reason != row.reason || r.Code != codeOf[row.reason] || r.Executed != row.executed {
				t.Errorf("%v: the refusal is %+v: want code %v, executed %v", row.reason, r, codeOf[row.reason], row.executed)
				continue
			}
			st := r.Status()
			info, retry, bad, pre := details(t, r)
			if st.GetCode() != int32(r.Code) || st.GetMessage() != r.Message || r.Message == "" {
				t.Errorf("%v: status %v", row.reason, st)
			}
			if info.GetReason() != string(row.reason) || info.GetDomain() != "belay" {
				t.Errorf("%v: ErrorInfo %v", row.reason, info)
			}
			if (retry != nil) != (row.has&delay != 0) || (r.RetryAfter < 0) != (row.has&stop != 0) {
				t.Errorf("%v: RetryInfo %v, retry after %v", row.reason, retry, r.RetryAfter)
			}
			if (bad != nil) != (row.has&field != 0) || (pre != nil) != (row.has&subject != 0) {
				t.Errorf("%v: BadRequest %v, PreconditionFailure %v", row.reason, bad, pre)
			}
		}
		if _, _, bad, _ := details(t, idempotency.RefuseKeyMissing("")); bad.GetFieldViolations()[0].GetField() != "metadata.idempotency-key" {
			t.Errorf("KEY_MISSING names %v: want the metadata", bad)
		}
		unknown := do(bg, e, "unknown", never(t)).Refusal
		if unknown.Metadata["newKeySafe"] != "false" || !strings.Contains(unknown.Message, "another key") {
			t.Errorf("OUTCOME_UNKNOWN says %q, %v: want a warning against another key", unknown.Message, unknown.Metadata)
		}
		if large := do(bg, e, "large", never(t)).Refusal; large.Metadata["originalCode"] != "OK" {
			t.Errorf("RESPONSE_NOT_RETAINED has metadata %v: want the original code", large.Metadata)
		}
		if lateCall.Refusal.Metadata["acceptWindow"] != "7m30s" {
			t.Errorf("KEY_EXPIRED has metadata %v: want the window, 7m30s", lateCall.Refusal.Metadata)
		}
		withDelay := &idempotency.Refusal{Code: code.Code_ABORTED, Reason: idempotency.ReasonInFlight, RetryAfter: 1500 * time.Millisecond}
		if _, retry, _, _ := details(t, withDelay); retry.GetRetryDelay().AsDuration() != 1500*time.Millisecond {
			t.Errorf("RetryInfo %v: want 1.5 s", retry)
		}
	})
}

// A key says when it was first sent: too late is refused unless its record is
// there, the future is refused, silence is accepted.
func TestFirstSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t)) // window: 10 min − 30 s − 2 × 1 min
		call := func(value string, age time.Duration) idempotency.Reply {
			key := idempotency.Key{Value: value, FirstSent: time.Now().Add(-age)}
			return e.Do(bg, idempotency.Call{Method: method, Key: key}, answering(ok("done")))
		}
		const window = 450 * time.Second
		wantOK(t, call("at-the-end-of-the-window", window), "done", idempotency.MarkExecuted)
		wantRefusal(t, call("after-the-window", window+1), idempotency.ReasonKeyExpired)
		wantOK(t, call("at-the-end-of-the-window", window+time.Minute), "done", idempotency.MarkReplayed)
		wantOK(t, call("ahead-of-us", -time.Minute), "done", idempotency.MarkExecuted)
		wantRefusal(t, call("from-the-future", -time.Minute-1), idempotency.ReasonKeyInvalid)
		wantRefusal(t, call("from-the-far-past", 290*365*24*time.Hour), idempotency.ReasonKeyExpired)

		longer := idempotency.Call{ // the method's own promise widens the window
			Method: method, Key: idempotency.Key{Value: "promised", FirstSent: time.Now().Add(-time.Hour)}, Retention: 2 * time.Hour,
		}
		wantOK(t, e.Do(bg, longer, answering(ok("done"))), "done", idempotency.MarkExecuted)
		time.Sleep(time.Hour)
		wantOK(t, e.Do(bg, longer, never(t)), "done", idempotency.MarkReplayed)
	})
}

func TestMetadataIsReplayed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t), func(c *idempotency.Config) { c.ReplayMetadata = []string{"etag", "x-many"} })
		res := ok("done")
		res.Header = idempotency.Metadata{"etag": {"v1"}, "x-secret": {"s"}}
		res.Trailer = idempotency.Metadata{"x-many": {"a", "", "b"}, "set-cookie": {"c"}}
		if first := do(bg, e, "k", answering(res)); first.Header != nil || first.Trailer != nil {
			t.Errorf("its own caller is to set %v, %v: want none, the handler has", first.Header, first.Trailer)
		}
		again := do(bg, e, "k", never(t))
		if diff := cmp.Diff(idempotency.Metadata{"etag": {"v1"}}, again.Header); diff != "" {
			t.Errorf("header (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(idempotency.Metadata{"x-many": {"a", "", "b"}}, again.Trailer); diff != "" {
			t.Errorf("trailer (-want +got):\n%s", diff)
		}
	})
}

func TestEmptyResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t))
		var typedNil *emptypb.Empty
		for name, row := range map[string]struct{ give, want proto.Message }{
			"empty":    {&emptypb.Empty{}, &emptypb.Empty{}},
			"nil":      {nil, nil},
			"typednil": {typedNil, nil},
		} {
			call := idempotency.Call{Method: method, Key: idempotency.Key{Value: name}}
			for range 2 {
				r := e.Do(bg, call, answering(idempotency.Result{Response: row.give}))
				if r.Refusal != nil || r.Executed != idempotency.ExecutedYes {
					t.Fatalf("%s: %v", name, r.Refusal)
				}
				if r.Mark == idempotency.MarkReplayed && ((r.Response == nil) != (row.want == nil) || row.want != nil && !proto.Equal(r.Response, row.want)) {
					t.Errorf("%s: replayed as %v: want %v", name, r.Response, row.want)
				}
			}
		}
	})
}

// A reply that cannot be stored is no reason to run again.
func TestReplyThatCannotBeStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, rec := newEngine(t, newMemory(t), func(c *idempotency.Config) { c.MaxReply = 100 })
		large := strings.Repeat("x", 200)
		running := make(chan struct{})
		own, joined := make(chan idempotency.Reply, 1), make(chan idempotency.Reply, 1)
		go func() {
			own <- do(bg, e, "large", func(context.Context) idempotency.Result {
				close(running)
				time.Sleep(time.Second)
				return ok(large)
			})
		}()
		<-running
		go func() { joined <- do(bg, e, "large", never(t)) }()
		wantOK(t, <-own, large, idempotency.MarkExecuted)
		wantOK(t, <-joined, large, idempotency.MarkJoined) // it is still here
		wantRefusal(t, do(bg, e, "large", never(t)), idempotency.ReasonResponseNotRetained)

		res := failing(code.Code_NOT_FOUND, nil)
		res.Status.Message = large
		do(bg, e, "error", answering(res))
		r := do(bg, e, "error", never(t))
		wantRefusal(t, r, idempotency.ReasonResponseNotRetained)
		if r.Refusal.Metadata["originalCode"] != "NOT_FOUND" {
			t.Errorf("metadata %v: want the original code", r.Refusal.Metadata)
		}

		wantOK(t, do(bg, e, "utf8", answering(ok("\xff"))), "\xff", idempotency.MarkExecuted)
		wantRefusal(t, do(bg, e, "utf8", never(t)), idempotency.ReasonResponseNotRetained)
		if rec.count(idempotency.EventUnrecorded) != 1 {
			t.Errorf("events %v: want one unrecorded, for the response that cannot be encoded", rec.kinds())
		}
	})
}

type brokenSealer struct{ keyID string }

func (s brokenSealer) Seal([]byte, idempotency.ID) (string, []byte, error) {
	if s.keyID == "" {
		return "", nil, nil
	}
	return s.keyID, nil, errors.New("the HSM is down")
}

func (s brokenSealer) Open(string, []byte, idempotency.ID) ([]byte, error) {
	return nil, errors.New("the HSM is down")
}

func TestSealedReplies(t *testing.T) {
	secret := func(id string) idempotency.Secret {
		return idempotency.Secret{ID: id, Key: []byte(strings.Repeat(id, 16)[:16])}
	}
	sealer := func(t *testing.T, secrets ...idempotency.Secret) func(*idempotency.Config) {
		t.Helper()
		s, err := idempotency.NewSealer(secrets...)
		if err != nil {
			t.Fatal(err)
		}
		return func(c *idempotency.Config) { c.Sealer = s }
	}
	synctest.Test(t, func(t *testing.T) {
		store := newFaulty()
		stored := make(map[idempotency.ID][]byte)
		store.finish = func(ctx context.Context, o *idempotency.Outcome, step finishStep) (*idempotency.Record, error) {
			stored[idempotency.ID{byte(len(stored))}] = bytes.Clone(o.Data)
			return step(ctx, o)
		}
		e, _ := newEngine(t, store, sealer(t, secret("a")))
		wantOK(t, do(bg, e, "ok", answering(ok("4242 4242"))), "4242 4242", idempotency.MarkExecuted)
		failed := failing(code.Code_NOT_FOUND, nil)
		do(bg, e, "failed", answering(failed))
		wantOK(t, do(bg, e, "ok", never(t)), "4242 4242", idempotency.MarkReplayed)
		if again := do(bg, e, "failed", never(t)); again.Status.GetMessage() != failed.Status.GetMessage() {
			t.Errorf("the sealed error is replayed as %v", again.Status)
		}
		for _, data := range stored {
			if bytes.Contains(data, []byte("4242")) || bytes.Contains(data, []byte("own")) {
				t.Errorf("the stored record holds the plain text: %q", data)
			}
		}
		rotated, _ := newEngine(t, store, sealer(t, secret("b"), secret("a")))
		wantOK(t, do(bg, rotated, "ok", never(t)), "4242 4242", idempotency.MarkReplayed)
		gone, _ := newEngine(t, store, sealer(t, secret("b")))
		wantRefusal(t, do(bg, gone, "ok", never(t)), idempotency.ReasonRecordCorrupt)
		none, _ := newEngine(t, store)
		wantRefusal(t, do(bg, none, "ok", never(t)), idempotency.ReasonRecordCorrupt)

		for i, broken := range []brokenSealer{{}, {"k"}} {
			e, _ := newEngine(t, store, func(c *idempotency.Config) { c.Sealer = broken })
			key := []string{"empty-id", "error"}[i]
			wantOK(t, do(bg, e, key, answering(ok("done"))), "done", idempotency.MarkExecuted)
			wantRefusal(t, do(bg, e, key, never(t)), idempotency.ReasonResponseNotRetained) // and in no case in the clear
		}
	})

	s, err := idempotency.NewSealer(secret("a"))
	if err != nil {
		t.Fatal(err)
	}
	id, other := idempotency.IDOf("s", "m", "1"), idempotency.IDOf("s", "m", "2")
	keyID, sealed, err := s.Seal([]byte("plain"), id)
	if err != nil {
		t.Fatal(err)
	}
	if plain, err := s.Open(keyID, sealed, id); err != nil || string(plain) != "plain" {
		t.Errorf("Open returned %q, %v", plain, err)
	}
	if _, err := s.Open(keyID, sealed, other); err == nil {
		t.Error("a reply opens in another call's record")
	}
	if _, err := s.Open(keyID, sealed[:5], id); err == nil {
		t.Error("a cut reply opens")
	}
	for name, secrets := range map[string][]idempotency.Secret{"none": nil, "17 bytes": {{ID: "a", Key: make([]byte, 17)}}} {
		if _, err := idempotency.NewSealer(secrets...); err == nil {
			t.Errorf("NewSealer with %s: no error", name)
		}
	}
}

// storedAs returns a store in which the record of a key has been tampered with.
func storedAs(t *testing.T, key string, tamper func([]byte) []byte) *faultyStore {
	t.Helper()
	store := newFaulty()
	store.finish = func(ctx context.Context, o *idempotency.Outcome, step finishStep) (*idempotency.Record, error) {
		return step(ctx, &idempotency.Outcome{Data: tamper(bytes.Clone(o.Data))})
	}
	e, _ := newEngine(t, store)
	do(bg, e, key, answering(ok("the response")))
	return store
}

func recordBytes(t *testing.T) []byte {
	t.Helper()
	var data []byte
	storedAs(t, "k", func(b []byte) []byte { data = b; return b })
	return data
}

// Whatever happens to a stored record, the call is refused and never runs.
func TestCorruptRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		data := recordBytes(t)
		check := func(what string, tamper func([]byte) []byte) {
			t.Helper()
			e, _ := newEngine(t, storedAs(t, "k", tamper))
			wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonRecordCorrupt)
			if t.Failed() {
				t.Fatalf("%s", what)
			}
		}
		for n := range data {
			check("cut", func(b []byte) []byte { return b[:n] })
		}
		for n := range data {
			check("a flipped bit", func(b []byte) []byte { b[n] ^= 0x10; return b })
		}
		check("more after the end", func(b []byte) []byte { return append(b, 0x08, 0x01) })
	})
}

func TestRecordIsWhatTheProtoSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		rec := &belayv1.Outcome{}
		if err := proto.Unmarshal(recordBytes(t), rec); err != nil {
			t.Fatal(err)
		}
		response := &wrapperspb.StringValue{}
		if err := proto.Unmarshal(rec.GetResponse(), response); err != nil {
			t.Fatal(err)
		}
		if rec.GetFormat() != 1 || rec.GetCode() != 0 || !rec.GetHasResponse() || rec.GetResponseType() != "google.protobuf.StringValue" ||
			response.GetValue() != "the response" || rec.GetEpoch() != 1 || !rec.GetCompleted().AsTime().Equal(start) ||
			rec.GetTombstone() || rec.GetSealKeyId() != "" || rec.GetChecksum() == 0 || len(rec.ProtoReflect().GetUnknown()) != 0 {
			t.Errorf("the record is %v", rec)
		}
	})
}

func TestReplayOfAnotherType(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t))
		do(bg, e, "k", answering(ok("done")))
		r := e.Do(bg, idempotency.Call{
			Method: method, Key: idempotency.Key{Value: "k"}, Request: wrapperspb.String("payload"),
			NewResponse: func() proto.Message { return &emptypb.Empty{} },
		}, never(t))
		wantRefusal(t, r, idempotency.ReasonRecordCorrupt)
		byName := e.Do(bg, idempotency.Call{Method: method, Key: idempotency.Key{Value: "k"}, Request: wrapperspb.String("payload")}, never(t))
		wantOK(t, byName, "done", idempotency.MarkReplayed)
	})
}

func TestScopesDoNotMeet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type tenant struct{}
		store := newMemory(t)
		e, _ := newEngine(t, store, func(c *idempotency.Config) {
			c.Scope = func(ctx context.Context) (string, error) {
				scope, _ := ctx.Value(tenant{}).(string)
				if scope == "" {
					return "", errors.New("nobody")
				}
				return scope, nil
			}
		})
		a, b := context.WithValue(bg, tenant{}, "a"), context.WithValue(bg, tenant{}, "b")
		wantOK(t, do(a, e, "k", answering(ok("for a"))), "for a", idempotency.MarkExecuted)
		wantOK(t, do(b, e, "k", answering(ok("for b"))), "for b", idempotency.MarkExecuted)
		wantOK(t, do(a, e, "k", never(t)), "for a", idempotency.MarkReplayed)
		wantRefusal(t, do(bg, e, "k", never(t)), idempotency.ReasonScopeMissing)
		other := e.Do(a, idempotency.Call{Method: "/test.Service/Other", Key: idempotency.Key{Value: "k"}}, answering(ok("another method")))
		wantOK(t, other, "another method", idempotency.MarkExecuted)
	})
}

func TestLimitIsAskedOncePerFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked []string
		e, _ := newEngine(t, newMemory(t), func(c *idempotency.Config) {
			c.Limit = func(_ context.Context, scope, method string) error {
				asked = append(asked, scope+method)
				return nil
			}
		})
		go do(bg, e, "k", func(context.Context) idempotency.Result {
			time.Sleep(time.Second)
			return ok("done")
		})
		synctest.Wait()
		wantOK(t, do(bg, e, "k", never(t)), "done", idempotency.MarkJoined)
		if want := []string{"single-tenant" + method}; !slices.Equal(asked, want) {
			t.Errorf("the limit was asked for %q: want %q", asked, want)
		}
	})
}

func TestFingerprintSecretsRotate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory(t)
		with := func(ids ...string) *idempotency.Engine {
			e, _ := newEngine(t, store, func(c *idempotency.Config) {
				for _, id := range ids {
					c.FingerprintSecrets = append(c.FingerprintSecrets, idempotency.Secret{ID: id, Key: []byte("0123456789abcdef" + id)})
				}
			})
			return e
		}
		wantOK(t, do(bg, with("a"), "k", answering(ok("done"))), "done", idempotency.MarkExecuted)
		wantOK(t, do(bg, with("b", "a"), "k", never(t)), "done", idempotency.MarkReplayed)
		wantRefusal(t, doWith(bg, with("b", "a"), "k", "other", never(t)), idempotency.ReasonKeyReused)
		// The secret is gone: nobody can say whether it is the same request.
		wantRefusal(t, do(bg, with("b"), "k", never(t)), idempotency.ReasonRecordCorrupt)
		wantRefusal(t, do(bg, with(), "k", never(t)), idempotency.ReasonRecordCorrupt)
	})
}

func TestRollingRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, _ := newEngine(t, newMemory(t))
		stream := func(parts ...string) idempotency.Call {
			r := e.Rolling()
			for _, p := range parts {
				r.Add(wrapperspb.String(p))
			}
			return idempotency.Call{Method: method, Key: idempotency.Key{Value: "k"}, Rolling: r}
		}
		wantOK(t, e.Do(bg, stream("a", "b"), answering(ok("done"))), "done", idempotency.MarkExecuted)
		wantOK(t, e.Do(bg, stream("a", "b"), never(t)), "done", idempotency.MarkReplayed)
		wantRefusal(t, e.Do(bg, stream("a", "b", "c"), never(t)), idempotency.ReasonKeyReused)
	})
}

func TestVerdictsAreTransparent(t *testing.T) {
	cause := errors.New("cause")
	for verdict, mark := range map[idempotency.Verdict]func(error) error{
		idempotency.VerdictFinal: idempotency.Final, idempotency.VerdictNoEffect: idempotency.NoEffect, idempotency.VerdictUnknown: idempotency.UnknownEffect,
	} {
		err := mark(cause)
		if !errors.Is(err, cause) || err.Error() != "cause" || idempotency.VerdictOf(err) != verdict || idempotency.Unmark(err) != cause { //nolint:errorlint // the very value
			t.Errorf("verdict %v: %v, unmarked %v", verdict, err, idempotency.Unmark(err))
		}
		if mark(nil) != nil {
			t.Errorf("verdict %v of nil is not nil", verdict)
		}
		wrapped := errors.Join(errors.New("context"), err)
		if idempotency.VerdictOf(wrapped) != verdict {
			t.Errorf("verdict %v is not found in a chain", verdict)
		}
	}
	if v := idempotency.VerdictOf(idempotency.NoEffect(idempotency.Final(cause))); v != idempotency.VerdictNoEffect {
		t.Errorf("the outermost of two verdicts is %v: want NoEffect", v)
	}
	if idempotency.VerdictOf(cause) != idempotency.VerdictNone || idempotency.VerdictOf(nil) != idempotency.VerdictNone {
		t.Error("an error without a mark has a verdict")
	}
}
