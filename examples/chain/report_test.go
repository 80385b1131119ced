package main

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestTally(t *testing.T) {
	tally := newTally()
	leaf := func(second int32, late bool) { tally.keep(fact{Leaf: &leafCall{Second: second, Late: late}}) }
	leaf(-1, true) // warming up is not counted
	leaf(0, false)
	leaf(0, false)
	leaf(0, false)
	leaf(1, true)
	tally.keep(fact{Invoked: &leafCall{Second: 0}})
	for range 3 {
		tally.keep(fact{Effect: &effect{Kind: effectCharge, Intent: "a"}})
	}
	for range 2 {
		tally.keep(fact{Effect: &effect{Kind: effectAppend, Intent: "a"}})
	}
	tally.checkedOut(answer{second: -1, ok: false, took: time.Hour})
	tally.checkedOut(answer{second: 0, ok: true, took: time.Millisecond})
	tally.checkedOut(answer{second: 1, ok: false, took: 3 * time.Millisecond})

	r := tally.result(false)
	if r.calls != 2 || r.success != 0.5 || r.leafPerCall != 2 || r.leafPerCallSteady != 1 ||
		r.duplicates != 3 || r.remarkDuplicates != 1 || r.late != 1 ||
		r.p50 != time.Millisecond || r.p99 != 3*time.Millisecond || !slices.Equal(r.bySecond, []float64{3, 1}) {
		t.Errorf("counted %+v", r)
	}
	if r := tally.result(true); r.leafPerCall != 0.5 {
		t.Errorf("counted at the caller: %v leaf calls a call, want 0.5", r.leafPerCall)
	}
}

func TestQuantile(t *testing.T) {
	values := make([]time.Duration, 100)
	for i := range values {
		values[i] = time.Duration(i + 1)
	}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 50, 0.99: 99, 1: 100} {
		if got := quantile(values, q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
	if got := quantile(nil, 0.5); got != 0 {
		t.Errorf("quantile of nothing is %d", got)
	}
}

func TestBars(t *testing.T) {
	results := []result{
		{scenario: "reply-lost", stack: stackBelay, calls: fewest, success: 0.9995, duplicates: 2},
		{scenario: "reply-lost", stack: stackMiddleware, calls: fewest, duplicates: 99},           // not Belay's
		{scenario: "slow-leaf", stack: stackBelay, calls: fewest - 1, late: 5},                    // too few
		{scenario: "upload", stack: stackMiddleware, streams: &streamTotals{count: 8, lost: 8}},   // not Belay's
		{scenario: "server-stream", stack: stackBelay, streams: &streamTotals{count: 9, lost: 1}}, // repeated holds
		{scenario: "upload", stack: stackBelay, streams: &streamTotals{count: 8, repeated: 3, heapMiB: 16}},
		{scenario: "blips-10", stack: stackNoBreaker, calls: fewest, success: 0.998, late: 12}, // leaf holds
	}
	names, judged := missed(results)
	want := []string{
		"blips-10 · belay-nobreaker: success is 0.998, must be at least 0.999",
		"reply-lost · belay: duplicates is 2, must be at most 0",
		"server-stream · belay: lost is 1, must be at most 0",
		"upload · belay: repeated is 3, must be at most 0",
	}
	if !slices.Equal(names, want) || judged != 9 {
		t.Errorf("missed %q of %d, want %q of 9", names, judged, want)
	}
}

func TestSparkline(t *testing.T) {
	if got := sparkline([]float64{0, 0.5, 1, 1.11, 3, 27}); got != "·▁▂▂▄█" {
		t.Errorf("got %q", got)
	}
}

func TestFlags(t *testing.T) {
	o, err := parse([]string{"-scenario", "restart,blips-10", "-stack", "belay", "-rate", "20"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if len(o.scenarios) != 2 || o.scenarios[0].name != "blips-10" || !slices.Equal(o.stacks, []string{stackBelay}) || o.load.rate != 20 {
		t.Errorf("understood %+v", o)
	}
	for _, tt := range []struct {
		args string
		want string
	}{
		{"-rate 0", "-rate 0: must be between 1 and 5000"},
		{"-rate NaN", "-rate NaN: must be between 1 and 5000"},
		{"-duration 1s", "-duration 1s: must be between 3s"},
		{"-trace 0", "-trace 0: must be at least 1"},
		{"-parallel 0", "-parallel 0: must be between 1 and 64"},
		{"-stack all,belay", `-stack "all": must be all, or some of none,middleware,belay,belay-nobreaker`},
		{"-scenario flood", `-scenario "flood": must be all, or some of healthy,`},
		{"belay", `argument "belay": only flags`},
	} {
		if _, err := parse(strings.Fields(tt.args), io.Discard); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q in it", tt.args, err, tt.want)
		}
	}
}

func TestUnknownNames(t *testing.T) {
	if _, err := newStack("hope"); err == nil || !strings.Contains(err.Error(), `stack "hope": must be one of`) {
		t.Errorf("stack: %v", err)
	}
	in := strings.NewReader(`{"stack":"none","listen":"127.0.0.1:0"}`)
	if err := serve("bank", in, io.Discard); err == nil || !strings.Contains(err.Error(), `role "bank": must be one of`) {
		t.Errorf("role: %v", err)
	}
	if err := serve(roleLedger, strings.NewReader("{"), io.Discard); err == nil || !strings.Contains(err.Error(), "reading the configuration") {
		t.Errorf("configuration: %v", err)
	}
}

// traceOf is a call with a retry whose reply was in the record.
func traceOf() []*span {
	base := time.Unix(1_000_000, 0)
	at := func(ms int) time.Time { return base.Add(time.Duration(ms) * time.Millisecond) }
	return []*span{
		{
			ID: "3", Parent: "2", Service: roleOrders, Name: "belay.chain.v1.PaymentsService/Charge", Start: at(1), End: at(4), Failed: true,
			Attrs: map[string]string{attrAttempt: "1", attrCode: "UNAVAILABLE"},
		},
		{
			ID: "5", Parent: "2", Service: roleOrders, Name: "belay.chain.v1.PaymentsService/Charge", Start: at(8), End: at(9),
			Attrs: map[string]string{attrAttempt: "2", attrCode: "OK", attrKey: "replayed", attrDelay: "0.004"},
		},
		{ID: "4", Parent: "3", Service: rolePayments, Name: "belay.chain.v1.PaymentsService/Charge", Kind: "server", Start: at(2), End: at(3)},
		{ID: "1", Service: roleUser, Name: "checkout", Start: at(0), End: at(10)},
		{
			ID: "2", Parent: "1", Service: roleOrders, Name: "belay belay.chain.v1.PaymentsService/Charge", Start: at(1), End: at(9),
			Events: []spanEvent{{Name: "backoff", At: at(4), Attrs: map[string]string{attrDelay: "0.004"}}},
		},
	}
}

func TestWaterfall(t *testing.T) {
	var out bytes.Buffer
	writeWaterfall(&out, traceOf())
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " ")) // the alignment is checked below
	}
	want := []string{
		"user checkout │" + strings.Repeat("█", barWidth) + "│ 10.00 ms",
		"orders belay PaymentsService/Charge │ " + strings.Repeat("█", 40) + " │ 8.00 ms",
		"attempt 1 · UNAVAILABLE │ " + strings.Repeat("▒", 16) + " │ 3.00 ms",
		"payments PaymentsService/Charge (server) │ " + strings.Repeat("█", 6) + " │ 1.00 ms",
		"• backoff 4.0 ms │ ◆ │",
		"attempt 2 · after 4.0 ms · key replayed │ " + strings.Repeat("█", 6) + " │ 1.00 ms",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for line := range strings.Lines(out.String()) {
		runes := []rune(line)
		if i := slices.Index(runes, '│'); i != 9+nameWidth+1 {
			t.Errorf("the bar begins in column %d, want %d: %s", i, 9+nameWidth+1, line)
		}
	}
}

func TestTellingTrace(t *testing.T) {
	whole := func(id string, attrs map[string]string, extra int) []*span {
		spans := []*span{{Trace: id, Service: roleUser, Attrs: attrs}}
		for _, role := range roles {
			spans = append(spans, &span{Trace: id, Service: role})
		}
		for range extra {
			spans = append(spans, &span{Trace: id, Service: roleEdge})
		}
		return spans
	}
	retry := map[string]string{attrAttempt: "2"}
	replay := map[string]string{attrAttempt: "2", attrKey: "replayed"}
	traces := map[string][]*span{
		"no retry":      whole("no retry", nil, 0),
		"part":          whole("part", replay, 0)[:3],
		"retry":         whole("retry", retry, 0),
		"long replay":   whole("long replay", replay, 3),
		"short replay":  whole("short replay", replay, 1),
		"longer replay": whole("longer replay", replay, 2),
	}
	for _, want := range []string{"short replay", "longer replay", "long replay", "retry"} {
		got := tellingTrace(traces)
		if got == nil || got[0].Trace != want {
			t.Fatalf("chose %v, want %q", got, want)
		}
		delete(traces, want)
	}
	if got := tellingTrace(traces); got != nil {
		t.Errorf("chose %v, want none", got)
	}
}
