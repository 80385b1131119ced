package idempotency_test

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/idempotency"
)

func TestNewKeyIsNew(t *testing.T) {
	seen := make(map[string]bool)
	uuid := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	before := time.Now().Truncate(time.Millisecond)
	for range 10_000 {
		k := idempotency.NewKey()
		if !uuid.MatchString(k.Value) || seen[k.Value] {
			t.Fatalf("key %q: want a version 4 UUID that was not there before", k.Value)
		}
		if k.FirstSent.Before(before) || k.FirstSent.After(time.Now()) || k.FirstSent.Nanosecond()%1e6 != 0 {
			t.Fatalf("first sent %v: want now, in milliseconds", k.FirstSent)
		}
		seen[k.Value] = true
	}
}

func TestKeyValidate(t *testing.T) {
	for _, row := range []struct{ value, wrong string }{
		{"k1", ""},
		{"!", ""},
		{"~", ""},
		{strings.Repeat("k", 255), ""},
		{"", "empty"},
		{strings.Repeat("k", 256), "256 bytes"},
		{" ", "0x20"},
		{"a b", "0x20 at index 1"},
		{"tab\t", "0x09"},
		{"\x00", "0x00"},
		{"del\x7f", "0x7f"},
		{"kéy", "0xc3"},
		{"\xff", "0xff"},
	} {
		err := idempotency.Key{Value: row.value}.Validate()
		if row.wrong == "" && err != nil {
			t.Errorf("%q: %v", row.value, err)
		}
		if row.wrong != "" && (err == nil || !strings.Contains(err.Error(), row.wrong)) {
			t.Errorf("%q: error %v: want one that says %q", row.value, err, row.wrong)
		}
	}
}

func TestKeyIsSavedAndRead(t *testing.T) {
	for _, k := range []idempotency.Key{
		idempotency.NewKey(),
		{Value: "k1"},
		{Value: "k1", FirstSent: time.Date(2026, 3, 4, 5, 6, 7, 89e6, time.UTC)},
	} {
		saved, err := json.Marshal(map[string]idempotency.Key{"key": k})
		if err != nil {
			t.Fatal(err)
		}
		var read map[string]idempotency.Key
		if err := json.Unmarshal(saved, &read); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(k, read["key"]); diff != "" {
			t.Errorf("read from %s (-want +got):\n%s", saved, diff)
		}
	}
	kept := idempotency.Key{Value: "kept"}
	for _, text := range []string{"", " ", "a b", "a 2026-03-04", "a 2026-03-04T05:06:07Z x", "a ", "é", "a 0001-01-01T00:00:00Z"} {
		if err := kept.UnmarshalText([]byte(text)); err == nil || kept.Value != "kept" {
			t.Errorf("%q: error %v, key %q: want an error, and the key as it was", text, err, kept.Value)
		}
	}
	if _, err := (idempotency.Key{}).MarshalText(); err == nil {
		t.Error("the zero key is saved without an error")
	}
}

func TestDeriveKey(t *testing.T) {
	sent := time.Date(2026, 1, 2, 3, 4, 5, 6, time.FixedZone("", 3600))
	k := idempotency.DeriveKey("orders", sent, "o-1", "charge")
	if k != idempotency.DeriveKey("orders", sent, "o-1", "charge") || k.Validate() != nil {
		t.Errorf("the derived key %v is invalid, or not the same twice", k)
	}
	if k.Value != "thgTDDq4vt_QPgGdXs49QtZr6qF_U1cUHl51MU1wRfc" {
		t.Errorf("the derived key is %q: saved operations would not be found again", k.Value)
	}
	for _, other := range []idempotency.Key{
		idempotency.DeriveKey("orders", sent, "o-1", "charg", "e"),
		idempotency.DeriveKey("orders", sent, "o-1charge"),
		idempotency.DeriveKey("orderso-1", sent, "charge"),
		idempotency.DeriveKey("orders", sent, "o-1", "charge", ""),
	} {
		if other.Value == k.Value {
			t.Error("two intents have one key")
		}
	}
	if !k.FirstSent.Equal(sent.Truncate(time.Millisecond)) {
		t.Errorf("first sent %v: want %v", k.FirstSent, sent)
	}
}

func TestIDOf(t *testing.T) {
	id := idempotency.IDOf("scope", "/pkg.Service/Method", "key")
	if want := "0399b8be5e15e9921f3b92a8da7319b14c46f7e6a86bc8ac0136067c22f7319a"; id.String() != want {
		t.Errorf("ID %s: want %s: stored records would not be found again", id, want)
	}
	parsed, err := idempotency.ParseID(id.String())
	if err != nil || parsed != id {
		t.Errorf("ParseID returned %v, %v: want the ID", parsed, err)
	}
	for _, s := range []string{"", "6c", strings.Repeat("g", 64), id.String() + "00"} {
		if _, err := idempotency.ParseID(s); err == nil {
			t.Errorf("ParseID(%q) returned no error", s)
		}
	}
}

func TestIDOfTellsPartsApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.StringMatching(`[ab]{0,3}`)
		draw := func() [3]string { return [3]string{part.Draw(t, "scope"), part.Draw(t, "method"), part.Draw(t, "key")} }
		a, b := draw(), draw()
		if (idempotency.IDOf(a[0], a[1], a[2]) == idempotency.IDOf(b[0], b[1], b[2])) != (a == b) {
			t.Fatalf("%q and %q", a, b)
		}
	})
}

func TestKeyFromMetadata(t *testing.T) {
	sent := "2026-03-04T05:06:07.089Z"
	for _, row := range []struct {
		name         string
		values, sent []string
		want         idempotency.Key
		has, refused bool
	}{
		{"none", nil, nil, idempotency.Key{}, false, false},
		{"none, but a time", nil, []string{sent}, idempotency.Key{}, false, false},
		{"one", []string{"k1"}, nil, idempotency.Key{Value: "k1"}, true, false},
		{"one and a time", []string{"k1"}, []string{sent}, idempotency.Key{Value: "k1", FirstSent: time.Date(2026, 3, 4, 5, 6, 7, 89e6, time.UTC)}, true, false},
		{"another zone", []string{"k1"}, []string{"2026-03-04T06:06:07.0895+01:00"}, idempotency.Key{Value: "k1", FirstSent: time.Date(2026, 3, 4, 5, 6, 7, 89e6, time.UTC)}, true, false},
		{"two", []string{"k1", "k1"}, nil, idempotency.Key{}, false, true},
		{"empty", []string{""}, nil, idempotency.Key{}, false, true},
		{"blank", []string{"  "}, nil, idempotency.Key{}, false, true},
		{"non-ASCII", []string{"é"}, nil, idempotency.Key{}, false, true},
		{"huge", []string{strings.Repeat("k", 1<<20)}, nil, idempotency.Key{}, false, true},
		{"two times", []string{"k1"}, []string{sent, sent}, idempotency.Key{}, false, true},
		{"empty time", []string{"k1"}, []string{""}, idempotency.Key{}, false, true},
		{"no time", []string{"k1"}, []string{"now"}, idempotency.Key{}, false, true},
		{"huge time", []string{"k1"}, []string{strings.Repeat("2", 1<<20)}, idempotency.Key{}, false, true},
		{"Unix time", []string{"k1"}, []string{"1772600767"}, idempotency.Key{}, false, true},
	} {
		k, has, refusal := idempotency.KeyFromMetadata(row.values, row.sent)
		if k != row.want || has != row.has || (refusal != nil) != row.refused {
			t.Errorf("%s: %v, %v, %v: want %v, %v, refused %v", row.name, k, has, refusal, row.want, row.has, row.refused)
		}
		if refusal != nil && (refusal.Reason != idempotency.ReasonKeyInvalid || len(refusal.Message) > 300) {
			t.Errorf("%s: refused with %v, %d bytes: want KEY_INVALID and no copy of what was sent", row.name, refusal.Reason, len(refusal.Message))
		}
	}
}

func FuzzKeyText(f *testing.F) {
	f.Add("k1")
	f.Add("k1 2026-03-04T05:06:07.089Z")
	f.Add("a b c")
	f.Fuzz(func(t *testing.T, text string) {
		var k idempotency.Key
		if k.UnmarshalText([]byte(text)) != nil {
			return
		}
		if err := k.Validate(); err != nil {
			t.Fatalf("%q was read as an invalid key: %v", text, err)
		}
		saved, err := k.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var again idempotency.Key
		if err := again.UnmarshalText(saved); err != nil || again != k {
			t.Errorf("%q was read as %v and saved as %q, which reads as %v, %v", text, k, saved, again, err)
		}
	})
}

func TestScopeFromTLS(t *testing.T) {
	spiffe, err := url.Parse("spiffe://bank/orders")
	if err != nil {
		t.Fatal(err)
	}
	subject := pkix.Name{CommonName: "orders", Organization: []string{"bank"}}
	verified := func(c *x509.Certificate) *tls.ConnectionState {
		return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{c}, VerifiedChains: [][]*x509.Certificate{{c}}}
	}
	for _, row := range []struct {
		name  string
		state *tls.ConnectionState
		want  string
	}{
		{"SPIFFE", verified(&x509.Certificate{URIs: []*url.URL{spiffe}, Subject: subject}), "uri:spiffe://bank/orders"},
		{"subject", verified(&x509.Certificate{Subject: subject}), "subject:CN=orders,O=bank"},
		{"nameless", verified(&x509.Certificate{}), ""},
		{"not verified", &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{URIs: []*url.URL{spiffe}}}}, ""},
		{"empty chain", &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{}}}, ""},
		{"no TLS", nil, ""},
	} {
		scope, err := idempotency.ScopeFromTLS(idempotency.ContextWithTLS(bg, row.state))
		if scope != row.want || (err == nil) != (row.want != "") {
			t.Errorf("%s: scope %q, error %v: want %q", row.name, scope, err, row.want)
		}
	}
}
