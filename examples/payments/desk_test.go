//go:build unix

package main

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/examples/payments/paymentsv1"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors"
)

// office is the service in this process, and its desk.
type office struct {
	*desk

	payments paymentsv1.PaymentsServiceClient
}

func newOffice(t *testing.T, dsn string) *office {
	t.Helper()
	db, store, err := openDatabase(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	belay, err := interceptors.NewServer(interceptors.WithIdempotency(store, idempotency.Config{Scope: idempotency.SingleTenant}))
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(belay.ServerOptions()...)
	paymentsv1.RegisterPaymentsServiceServer(s, &service{db: db, store: store})
	if err := belay.Check(s); err != nil {
		t.Fatal(err)
	}
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(listener)
	}()
	t.Cleanup(func() { s.Stop(); <-served })
	conn, payments, err := dial(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &office{&desk{db: db, store: store, postgres: isPostgres(dsn)}, payments}
}

func (o *office) charge(t *testing.T, key idempotency.Key, cents int64) (*paymentsv1.ChargeResponse, string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var trailer metadata.MD
	receipt, err := o.payments.Charge(ctx, &paymentsv1.ChargeRequest{Account: "alice", AmountCents: cents, Order: "o"},
		interceptors.WithKey(key), grpc.Trailer(&trailer))
	mark := ""
	if v := trailer[interceptors.MetadataStatus]; len(v) == 1 {
		mark = v[0]
	}
	return receipt, mark, err
}

const lostCents = 100

// lose leaves a charge of lostCents of which nobody knows how it ended.
func (o *office) lose(t *testing.T, key idempotency.Key) idempotency.ID {
	t.Helper()
	prints, err := idempotency.NewFingerprinter()
	if err != nil {
		t.Fatal(err)
	}
	fingerprint, _ := prints.Of(&paymentsv1.ChargeRequest{Account: "alice", AmountCents: lostCents, Order: "o"})
	id := idempotency.IDOf("single-tenant", paymentsv1.PaymentsService_Charge_FullMethodName, key.Value)
	execution, record, err := o.store.Begin(t.Context(), idempotency.Claim{
		ID: id, Owner: idempotency.Owner{1}, Fingerprint: fingerprint, Lease: time.Second, Retention: time.Hour,
		Method: paymentsv1.PaymentsService_Charge_FullMethodName,
	})
	if err != nil || execution == nil {
		t.Fatalf("Begin = %v, %v, %v", execution, record, err)
	}
	if err := execution.Abandon(t.Context()); err != nil {
		t.Fatal(err)
	}
	return id
}

func eachOffice(t *testing.T, test func(t *testing.T, o *office)) {
	t.Helper()
	for name, dsn := range databases {
		t.Run(name, func(t *testing.T) { test(t, newOffice(t, dsn(t))) })
	}
}

func TestCharge_DeclinedForGood(t *testing.T) {
	eachOffice(t, func(t *testing.T, o *office) {
		t.Helper()
		key := idempotency.NewKey()
		_, mark, err := o.charge(t, key, 200_000)
		if status.Code(err) != codes.FailedPrecondition || !declined(err) || mark != "executed" {
			t.Fatalf("charge = %v (%s), want FAILED_PRECONDITION INSUFFICIENT_FUNDS (executed)", err, mark)
		}
		if _, err := o.db.ExecContext(t.Context(), `UPDATE accounts SET balance_cents = 300000`); err != nil {
			t.Fatal(err)
		}
		_, mark, err = o.charge(t, key, 200_000)
		if !declined(err) || mark != "replayed" {
			t.Fatalf("the same call with money = %v (%s), want the same verdict (replayed)", err, mark)
		}
		if _, mark, err = o.charge(t, idempotency.NewKey(), 200_000); err != nil || mark != "executed" {
			t.Fatalf("a new call with money = %v (%s), want OK (executed)", err, mark)
		}
	})
}

func TestCharge_Replayed(t *testing.T) {
	eachOffice(t, func(t *testing.T, o *office) {
		t.Helper()
		key := idempotency.NewKey()
		one, _, err := o.charge(t, key, 500)
		if err != nil {
			t.Fatal(err)
		}
		two, mark, err := o.charge(t, key, 500)
		if err != nil || mark != "replayed" || one.GetChargeId() != two.GetChargeId() || two.GetBalanceCents() != 99_500 {
			t.Fatalf("again = %v (%s), %v; want %v (replayed)", two, mark, err, one)
		}
		found, err := o.find(t.Context(), key.Value)
		if err != nil || found.State != idempotency.StateDone || found.Epoch != 1 || time.Since(found.Claimed) > patience || found.Completed.IsZero() {
			t.Fatalf("find = %v, %v; want DONE just now", found, err)
		}
		balance, err := o.payments.GetBalance(t.Context(), &paymentsv1.GetBalanceRequest{Account: "alice"})
		if err != nil || balance.GetBalanceCents() != 99_500 {
			t.Fatalf("GetBalance = %v, %v; want 99500", balance, err)
		}
		_, err = o.payments.GetBalance(t.Context(), &paymentsv1.GetBalanceRequest{Account: "nobody"})
		if status.Code(err) != codes.NotFound {
			t.Fatalf("GetBalance of nobody = %v, want NOT_FOUND", err)
		}
	})
}

// A record that runs for ever is open, whenever it is said to expire.
func TestDesk_OpenWithRetention(t *testing.T) {
	eachOffice(t, func(t *testing.T, o *office) {
		t.Helper()
		if _, _, err := o.charge(t, idempotency.NewKey(), 7); err != nil {
			t.Fatal(err)
		}
		if open, err := o.open(t.Context()); err != nil || len(open) != 0 {
			t.Fatalf("open = %v, %v; want none: the charge is done", open, err)
		}
		if _, err := o.db.ExecContext(t.Context(), `UPDATE belay_idempotency SET state = 1, outcome = NULL, lease_until = created_at`); err != nil {
			t.Fatal(err)
		}
		open, err := o.open(t.Context())
		if err != nil || len(open) != 1 || !open[0].Over {
			t.Fatalf("open = %v, %v; want the one whose lease is over", open, err)
		}
	})
}

func TestDesk_OpenAndResolve(t *testing.T) {
	eachOffice(t, func(t *testing.T, o *office) {
		t.Helper()
		if _, err := o.find(t.Context(), "never"); err == nil || !strings.Contains(err.Error(), "no record") {
			t.Fatalf("find of a key that never came = %v", err)
		}
		free, cancelled, charged := idempotency.NewKey(), idempotency.NewKey(), idempotency.NewKey()
		ids := []idempotency.ID{o.lose(t, free), o.lose(t, cancelled), o.lose(t, charged)}
		open, err := o.open(t.Context())
		if err != nil || len(open) != 3 || open[0].State != idempotency.StateUnknown || open[0].Claimed.After(open[2].Claimed) {
			t.Fatalf("open = %v, %v; want three UNKNOWN, the oldest first", open, err)
		}
		if _, _, err := o.charge(t, free, lostCents); status.Code(err) != codes.FailedPrecondition || declined(err) {
			t.Fatalf("a call with an unknown end = %v, want FAILED_PRECONDITION, and not the service's own", err)
		}
		receipt, _, err := o.charge(t, idempotency.NewKey(), 7)
		if err != nil {
			t.Fatal(err)
		}
		for i, verdict := range []string{"free", "cancelled", "charged=" + receipt.GetChargeId()} {
			if err := o.resolve(t.Context(), ids[i].String(), verdict); err != nil {
				t.Fatalf("resolve %s: %v", verdict, err)
			}
		}
		if _, mark, err := o.charge(t, free, lostCents); err != nil || mark != "executed" {
			t.Errorf("after free: %v (%s), want OK (executed)", err, mark)
		}
		if _, _, err := o.charge(t, cancelled, lostCents); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("after cancelled: %v, want FAILED_PRECONDITION", err)
		}
		if got, mark, err := o.charge(t, charged, lostCents); err != nil || mark != "replayed" || got.GetChargeId() != receipt.GetChargeId() {
			t.Errorf("after charged: %v (%s), %v; want %v (replayed)", got, mark, err, receipt)
		}
		for id, want := range map[string]string{"x": "hexadecimal", ids[0].String(): "cannot be resolved"} {
			if err := o.resolve(t.Context(), id, "free"); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("resolve(%s) = %v, want …%s…", id, err, want)
			}
		}
		for verdict, want := range map[string]string{"maybe": "must be free, cancelled or charged=ID", "charged=x": "not in the books"} {
			if err := o.resolve(t.Context(), ids[0].String(), verdict); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("resolve(%s) = %v, want …%s…", verdict, err, want)
			}
		}
	})
}

func TestPages(t *testing.T) {
	o := newOffice(t, databases["sqlite"](t))
	key := idempotency.NewKey()
	id := o.lose(t, key)
	server := httptest.NewServer(o.pages())
	defer server.Close()

	for path, want := range map[string]string{"/": id.String(), "/?key=" + key.Value: "UNKNOWN", "/?key=no": "there is no record"} {
		if code, body := get(t, server.URL+path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("GET %s = %d, want 200 with %q in\n%s", path, code, want, body)
		}
	}
	form := url.Values{"id": {id.String()}, "verdict": {"free"}}
	if code := post(t, server.URL+"/resolve", form, "https://elsewhere.example"); code != http.StatusForbidden {
		t.Errorf("POST from another site = %d, want 403", code)
	}
	if code := post(t, server.URL+"/resolve", form, ""); code != http.StatusOK {
		t.Errorf("POST = %d, want 200 after the redirect", code)
	}
	if code := post(t, server.URL+"/resolve", form, ""); code != http.StatusConflict {
		t.Errorf("POST again = %d, want 409", code)
	}
	if _, mark, err := o.charge(t, key, lostCents); err != nil || mark != "executed" {
		t.Errorf("the call, resolved as free = %v (%s), want OK (executed)", err, mark)
	}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url) //nolint:noctx // the server is in this process
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var body strings.Builder
	if err := resp.Write(&body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, body.String()
}

func post(t *testing.T, target string, form url.Values, origin string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, target, strings.NewReader(form.Encode()))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	if origin != "" {
		req.Header.Set("Origin", origin)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}
