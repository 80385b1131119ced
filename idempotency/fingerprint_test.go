package idempotency_test

import (
	"encoding/hex"
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"pgregory.net/rapid"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

func newFingerprinter(tb testing.TB, secrets ...idempotency.Secret) *idempotency.Fingerprinter {
	tb.Helper()
	f, err := idempotency.NewFingerprinter(secrets...)
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

func fingerprint(tb testing.TB, m proto.Message) idempotency.Fingerprint {
	tb.Helper()
	fp, _ := newFingerprinter(tb).Of(m)
	return fp
}

// Golden values: another process, another build and another version of the
// protobuf library must make the same, or a rollout refuses honest retries.
func TestFingerprintIsTheSameEverywhere(t *testing.T) {
	fixed := fullRequest(t)
	fixed.Any = unsortedAny(t, wrapperspb.String("packed"))
	for _, row := range []struct {
		name string
		m    proto.Message
		want string
	}{
		{"nil", nil, "0100374708fff7719dd5979ec875d56cd2286f6d3cf7ec317a3b25632aab28ec37bb"},
		{"empty", &emptypb.Empty{}, "010091b2d585c5b586513233c6260e7bd597121eb3db7bec479b4e27e52d596d401a"},
		{"string", wrapperspb.String("p1"), "01004f8ba015cacb77b6bef8ba5b100ca9086eb9741d753c920bc9c109578d5c003f"},
		{"flat", flatRequest(), "01006d7e2f6bcedda9fca4406ee653434dabd5ea78d9030e87e272243aa79f9e5375"},
		{"map", mapRequest(), "0100814317639104e98731dd394a525f9ce0c4e2a0a1d67ff94a9810b285ec56563e"},
		{"full", fixed, "01008bf82ee3219e94bc9fa7e18f47a8cf1e0be32c7310b462c97fb30a4e0ec0adb6"},
	} {
		if got := hex.EncodeToString([]byte(fingerprint(t, row.m))); got != row.want {
			t.Errorf("%s: %s: want %s", row.name, got, row.want)
		}
	}
}

// An honest retry: the same request, encoded and decoded again and again, with
// its maps in another order and what a retry may change changed.
func TestFingerprintOfAnHonestRetry(t *testing.T) {
	want := fingerprint(t, fullRequest(t))
	for range 200 {
		again := &probev1.Request{}
		if err := proto.Unmarshal(marshal(t, fullRequest(t)), again); err != nil {
			t.Fatal(err)
		}
		again.ClientTime = timestamppb.Now()
		again.Node.ClientTime = nil
		again.List[2].ClientTime = timestamppb.Now()
		again.Nodes[9].ClientTime = timestamppb.Now()
		if got := fingerprint(t, again); got != want {
			t.Fatalf("fingerprint %x: want %x", got, want)
		}
	}
}

func TestFingerprintTellsRequestsApart(t *testing.T) {
	seen := map[idempotency.Fingerprint]string{fingerprint(t, fullRequest(t)): "the request itself"}
	for name, change := range map[string]func(r *probev1.Request){
		"text":                func(r *probev1.Request) { r.Text += "x" },
		"number":              func(r *probev1.Request) { r.Number++ },
		"negative number":     func(r *probev1.Request) { r.Number = -r.GetNumber() },
		"payload":             func(r *probev1.Request) { r.Payload = nil },
		"ratio":               func(r *probev1.Request) { r.Ratio = math.Nextafter(r.GetRatio(), 1) },
		"ratio NaN":           func(r *probev1.Request) { r.Ratio = math.NaN() },
		"ratio -0":            func(r *probev1.Request) { r.Ratio = math.Copysign(0, -1) },
		"ratio 0":             func(r *probev1.Request) { r.Ratio = 0 },
		"color":               func(r *probev1.Request) { r.Color = 2 },
		"unknown color":       func(r *probev1.Request) { r.Color = 99 },
		"list order":          func(r *probev1.Request) { r.Numbers[0], r.Numbers[1] = r.GetNumbers()[1], r.GetNumbers()[0] },
		"list shorter":        func(r *probev1.Request) { r.Numbers = r.GetNumbers()[:3] },
		"names order":         func(r *probev1.Request) { r.Names[0], r.Names[1] = r.GetNames()[1], r.GetNames()[0] },
		"names without empty": func(r *probev1.Request) { r.Names = r.GetNames()[:2] },
		"map value":           func(r *probev1.Request) { r.Labels["label-03"] = "x" },
		"map entry gone":      func(r *probev1.Request) { delete(r.GetLabels(), "label-03") },
		"map key":             func(r *probev1.Request) { r.Labels["x"] = r.GetLabels()["label-03"]; delete(r.GetLabels(), "label-03") },
		"map values swapped": func(r *probev1.Request) {
			l := r.GetLabels()
			l["label-03"], l["label-04"] = l["label-04"], l["label-03"]
		},
		"node in a map":          func(r *probev1.Request) { r.Nodes[0].Amount++ },
		"node of a node":         func(r *probev1.Request) { r.Node.Children["z"].Name = "z" },
		"node gone":              func(r *probev1.Request) { r.Node = nil },
		"node empty":             func(r *probev1.Request) { r.Node = &probev1.Node{} },
		"in Any":                 func(r *probev1.Request) { r.Any = unsortedAny(t, &probev1.Node{Name: "other"}) },
		"Any of another type":    func(r *probev1.Request) { r.Any.TypeUrl = "type.googleapis.com/belay.probe.v1.Response" },
		"Any of no known type":   func(r *probev1.Request) { r.Any.TypeUrl = "type.googleapis.com/no.Such" },
		"oneof, the other":       func(r *probev1.Request) { r.Choice = &probev1.Request_ChoiceText{ChoiceText: "choice"} },
		"oneof, the other empty": func(r *probev1.Request) { r.Choice = &probev1.Request_ChoiceText{} },
		"explicit zero absent":   func(r *probev1.Request) { r.Limit = nil },
		"unknown field": func(r *probev1.Request) {
			r.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 999, protowire.VarintType), 1))
		},
	} {
		r := fullRequest(t)
		change(r)
		fp := fingerprint(t, r)
		if other, dup := seen[fp]; dup {
			t.Errorf("%q has the fingerprint of %q", name, other)
		}
		seen[fp] = name
	}
	if fingerprint(t, &emptypb.Empty{}) == fingerprint(t, &wrapperspb.StringValue{}) {
		t.Error("two empty messages of different types have one fingerprint")
	}
}

func TestFingerprintFoldsWhatIsEqual(t *testing.T) {
	equal := func(name string, a, b proto.Message) {
		t.Helper()
		if fingerprint(t, a) != fingerprint(t, b) {
			t.Errorf("%s: the fingerprints differ", name)
		}
	}
	quietNaN := math.Float64frombits(0xfff8000000000042)
	equal("NaNs", &probev1.Request{Ratio: math.NaN()}, &probev1.Request{Ratio: quietNaN})
	equal("typed nil and empty", (*probev1.Request)(nil), &probev1.Request{})
	equal("nil and empty list", &probev1.Request{Names: []string{}}, &probev1.Request{})
	equal("nil and empty map", &probev1.Request{Labels: map[string]string{}}, &probev1.Request{})
}

// without returns the descriptor of a message without some of its fields: the
// same message in the binary of a version that does not know them yet.
func without(t *testing.T, m proto.Message, fields ...protoreflect.Name) protoreflect.MessageDescriptor {
	t.Helper()
	md := m.ProtoReflect().Descriptor()
	file := protodesc.ToFileDescriptorProto(md.ParentFile())
	for _, msg := range file.GetMessageType() {
		if msg.GetName() != string(md.Name()) {
			continue
		}
		var kept []*descriptorpb.FieldDescriptorProto
		for _, f := range msg.GetField() {
			drop := false
			for _, name := range fields {
				drop = drop || f.GetName() == string(name)
			}
			if !drop {
				kept = append(kept, f)
			}
		}
		msg.Field = kept
	}
	fd, err := protodesc.NewFile(file, registryWithImports(t, md.ParentFile()))
	if err != nil {
		t.Fatal(err)
	}
	return fd.Messages().ByName(md.Name())
}

// A rollout: the old binary carries a field as unknown that the new one knows,
// and both must see one and the same request.
func TestFingerprintAcrossVersions(t *testing.T) {
	old := without(t, &probev1.Request{}, "text", "number", "labels", "names", "node", "numbers", "limit")
	for i := range 50 {
		wire := marshal(t, &probev1.Request{
			RequestId: "id", Text: "text", Number: int64(-i), Labels: mapRequest().GetLabels(), Names: []string{"b", "a", "b"},
			Node: &probev1.Node{Name: "n", Amount: 3}, Numbers: []int32{5, 4, 300}, Limit: new(int64(0)), Secret: "s",
		})
		known := &probev1.Request{}
		unknown := dynamicpb.NewMessage(old)
		for _, m := range []proto.Message{known, unknown} {
			if err := proto.Unmarshal(wire, m); err != nil {
				t.Fatal(err)
			}
		}
		if fingerprint(t, known) != fingerprint(t, unknown) {
			t.Fatalf("attempt %d: the binary that knows the fields and the one that does not disagree", i)
		}
	}
}

// The option must be read from descriptors that were built at run time too.
func TestFingerprintOfDynamicMessage(t *testing.T) {
	md := without(t, &probev1.Request{})
	want := fingerprint(t, fullRequest(t))
	m := dynamicpb.NewMessage(md)
	if err := proto.Unmarshal(marshal(t, fullRequest(t)), m); err != nil {
		t.Fatal(err)
	}
	if got := fingerprint(t, m); got != want {
		t.Errorf("the dynamic message's fingerprint is %x: want %x", got, want)
	}
}

func TestFingerprintTakesHostileMessages(t *testing.T) {
	deep := &probev1.Node{}
	for range 2000 {
		deep = &probev1.Node{Children: map[string]*probev1.Node{"": deep}}
	}
	nested := &anypb.Any{}
	for range 200 {
		nested = unsortedAny(t, nested)
	}
	for name, m := range map[string]proto.Message{
		"deep":              &probev1.Request{Node: deep},
		"Any in Any":        &probev1.Request{Any: nested},
		"Any of rubbish":    &probev1.Request{Any: &anypb.Any{TypeUrl: "x/belay.probe.v1.Node", Value: []byte{0xff, 0xff}}},
		"Any without type":  &probev1.Request{Any: &anypb.Any{Value: []byte("value")}},
		"invalid UTF-8":     &probev1.Request{Text: "\xff", Labels: map[string]string{"\xfe": "\xfd"}},
		"nil in map, list":  &probev1.Request{Nodes: map[int64]*probev1.Node{1: nil}, List: []*probev1.Node{nil}},
		"typed nil in one":  &probev1.Request{Choice: (*probev1.Request_ChoiceNode)(nil)},
		"nil in one":        &probev1.Request{Choice: &probev1.Request_ChoiceNode{}},
		"typed nil message": (*probev1.Request)(nil),
	} {
		if a, b := fingerprint(t, m), fingerprint(t, m); a != b || len(a) != 34 {
			t.Errorf("%s: fingerprints %x and %x: want two equal ones of 34 bytes", name, a, b)
		}
	}
}

func TestFingerprintSecrets(t *testing.T) {
	older := idempotency.Secret{ID: "2025", Key: []byte("an older secret of the server")}
	newer := idempotency.Secret{ID: "2026", Key: []byte("a newer secret of the server")}
	r := fullRequest(t)
	before, none := newFingerprinter(t, older).Of(r)
	if len(none) != 0 {
		t.Errorf("one secret made %d alternates: want 0", len(none))
	}
	after, alternates := newFingerprinter(t, newer, older).Of(r)
	if after == before || len(alternates) != 1 || alternates[0] != before {
		t.Errorf("after the rotation: %x, alternates %x: want a new one, and %x", after, alternates, before)
	}
	if plain := fingerprint(t, r); plain == before || plain == after {
		t.Error("a secret makes no difference")
	}
	for name, secrets := range map[string][]idempotency.Secret{
		"no id":      {{Key: older.Key}},
		"blank id":   {{ID: "a b", Key: older.Key}},
		"long id":    {{ID: "123456789012345678901234567890123", Key: older.Key}},
		"short key":  {{ID: "a", Key: []byte("short")}},
		"same twice": {older, {ID: older.ID, Key: newer.Key}},
	} {
		if _, err := idempotency.NewFingerprinter(secrets...); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestRollingFingerprint(t *testing.T) {
	for _, secrets := range [][]idempotency.Secret{nil, {{ID: "s", Key: []byte("0123456789abcdef")}}} {
		f := newFingerprinter(t, secrets...)
		sum := func(requests ...proto.Message) idempotency.Fingerprint {
			r := f.Rolling()
			for _, m := range requests {
				r.Add(m)
			}
			fp, _ := r.Sum()
			return fp
		}
		a, b := wrapperspb.String("a"), wrapperspb.String("b")
		if of, _ := f.Of(a); of != sum(a) {
			t.Error("a stream of one request differs from the request")
		}
		if first, again := sum(a, b), sum(a, b); first != again {
			t.Error("equal streams differ")
		}
		all := map[idempotency.Fingerprint]bool{
			sum(): true, sum(a): true, sum(b): true, sum(a, b): true, sum(b, a): true, sum(a, a): true,
			sum(wrapperspb.String("ab")): true, sum(a, b, &wrapperspb.StringValue{}): true,
		}
		if len(all) != 8 {
			t.Errorf("8 different streams have %d fingerprints", len(all))
		}

		r := f.Rolling()
		r.Add(a)
		first, _ := r.Sum()
		r.Add(b)
		if second, _ := r.Sum(); first != sum(a) || second != sum(a, b) {
			t.Error("Sum in the middle changed the sum at the end")
		}
	}
}

// Any request, sent again: equal. Any two that proto.Equal tells apart after
// the excluded fields are cleared: different.
func TestFingerprintProperties(t *testing.T) {
	f := newFingerprinter(t)
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawRequest(t), drawRequest(t)
		again := &probev1.Request{}
		wire, err := proto.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		if err := proto.Unmarshal(wire, again); err != nil {
			t.Fatal(err)
		}
		again.ClientTime = timestamppb.New(time.Unix(rapid.Int64Range(0, 1000).Draw(t, "time"), 0))
		fa, _ := f.Of(a)
		fb, _ := f.Of(b)
		if fAgain, _ := f.Of(again); fa != fAgain {
			t.Fatalf("the same request again has another fingerprint: %v", a)
		}
		if (fa == fb) != proto.Equal(a, b) {
			t.Fatalf("fingerprints equal: %v, requests equal: %v; %v and %v", fa == fb, proto.Equal(a, b), a, b)
		}
	})
}

func drawRequest(t *rapid.T) *probev1.Request {
	short := rapid.StringMatching(`[ab]{0,2}`)
	node := func() *probev1.Node {
		return &probev1.Node{Name: short.Draw(t, "name"), Amount: rapid.Int64Range(-1, 1).Draw(t, "amount")}
	}
	r := &probev1.Request{
		Text:    short.Draw(t, "text"),
		Number:  rapid.Int64Range(-1, 1).Draw(t, "number"),
		Numbers: rapid.SliceOfN(rapid.Int32Range(-1, 1), 0, 3).Draw(t, "numbers"),
		Names:   rapid.SliceOfN(short, 0, 3).Draw(t, "names"),
		Labels:  rapid.MapOfN(short, short, 0, 3).Draw(t, "labels"),
		Ratio:   rapid.SampledFrom([]float64{0, 1, -1}).Draw(t, "ratio"),
	}
	if rapid.Bool().Draw(t, "has node") {
		r.Node = node()
	}
	for range rapid.IntRange(0, 2).Draw(t, "nodes") {
		r.List = append(r.List, node())
	}
	if rapid.Bool().Draw(t, "has limit") {
		r.Limit = new(rapid.Int64Range(0, 1).Draw(t, "limit"))
	}
	return r
}

// FuzzFingerprint takes wire bytes as they come: it never panics, and what is
// decoded and encoded again is the same request.
func FuzzFingerprint(f *testing.F) {
	f.Add(marshal(f, flatRequest()))
	f.Add(marshal(f, fullRequest(f)))
	f.Add(protowire.AppendTag(nil, 100, protowire.StartGroupType))
	f.Add([]byte{0x6a, 0x00, 0x9a, 0x06, 0x04, 0x0a, 0x00, 0x12, 0x00})
	f.Fuzz(func(t *testing.T, wire []byte) {
		a := &probev1.Request{}
		if proto.Unmarshal(wire, a) != nil {
			return
		}
		b := &probev1.Request{}
		if err := proto.Unmarshal(marshal(t, a), b); err != nil {
			t.Fatal(err)
		}
		if fingerprint(t, a) != fingerprint(t, b) {
			t.Errorf("the request has another fingerprint after a round trip: %v", a)
		}
	})
}
