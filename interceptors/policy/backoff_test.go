package policy_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/belayrpc/belay/interceptors/policy"
)

const (
	ms = time.Millisecond

	// lastDraw is the greatest number below 1.
	lastDraw = 1 - 1.0/(1<<53)
)

// The exponent overflows and the cap turns negative; a draw over an empty range
// panics. The grid of the case, for every jitter.
func TestB07_delayStaysWithinItsCap(t *testing.T) {
	jitters := []policy.Backoff{
		{Jitter: policy.JitterNone},
		{Jitter: policy.JitterProportional, Spread: 0.2},
		{Jitter: policy.JitterFull},
		{Jitter: policy.JitterEqual},
		{Jitter: policy.JitterDecorrelated},
	}
	for _, b := range jitters {
		for _, b.Base = range []time.Duration{0, 1, ms, 100 * ms} {
			for _, b.Multiplier = range []float64{1, 2, 10} {
				b.Max = time.Second
				t.Run(fmt.Sprintf("%v/%v/%v", b.Jitter, b.Base, b.Multiplier), func(t *testing.T) {
					delaysWithin(t, b, time.Second)
				})
			}
		}
	}
}

func delaysWithin(t *testing.T, b policy.Backoff, limit time.Duration) {
	t.Helper()
	var prev time.Duration
	for n := range 201 {
		for _, u := range []float64{0, 0.5, lastDraw} {
			if d := b.Delay(n, prev, u); d < 0 || d > limit {
				t.Fatalf("Delay(%d, %v, %v) = %v, want within [0, %v]", n, prev, u, d, limit)
			}
		}
		d := b.Next(n, prev)
		if d < 0 || d > limit {
			t.Fatalf("Next(%d, %v) = %v, want within [0, %v]", n, prev, d, limit)
		}
		if b.Jitter == policy.JitterNone && d < prev {
			t.Fatalf("without jitter, retry %d waits %v after %v: the sequence decreases", n, d, prev)
		}
		prev = d
	}
}

func TestB07_exactWithoutJitter(t *testing.T) {
	b := policy.Backoff{Base: 100 * ms, Max: time.Second, Multiplier: 2, Jitter: policy.JitterNone}
	for n := range 201 {
		want := time.Second
		if n < 4 {
			want = 100 * ms << n
		}
		if got := b.Delay(n, 0, 0.5); got != want {
			t.Errorf("Delay(%d) = %v, want %v", n, got, want)
		}
	}
}

// The mean of 1000 draws is within the bounds of the case by 11 standard
// deviations: that is no matter of luck.
func TestB07_meanOfFullJitter(t *testing.T) {
	b := policy.Backoff{Base: 100 * ms, Max: time.Second, Multiplier: 2, Jitter: policy.JitterFull}
	const draws = 1000
	var sum time.Duration
	for range draws {
		sum += b.Next(64, 0)
	}
	if mean := sum / draws; mean < 400*ms || mean > 600*ms {
		t.Errorf("mean of %d delays = %v, want 400ms..600ms", draws, mean)
	}
}

// What each jitter makes of the curve, at both ends and the middle of the draw.
func TestBackoff_Delay(t *testing.T) {
	curve := func(j policy.Jitter) policy.Backoff {
		return policy.Backoff{Base: 100 * ms, Max: time.Second, Multiplier: 2, Jitter: j}
	}
	spread := func(s float64) policy.Backoff {
		b := curve(policy.JitterProportional)
		b.Spread = s
		return b
	}
	for _, test := range []struct {
		name                string
		b                   policy.Backoff
		n                   int
		prev                time.Duration
		least, middle, most time.Duration // for u = 0, 1/2 and 1
	}{
		{"nothing set", policy.Backoff{}, 0, 0, 0, 25 * ms, 50 * ms},
		{"nothing set, capped", policy.Backoff{}, 5, 0, 0, 500 * ms, time.Second},
		{"full", curve(policy.JitterFull), 1, 0, 0, 100 * ms, 200 * ms},
		{"full, negative n is the first", curve(policy.JitterFull), -7, 0, 0, 50 * ms, 100 * ms},
		{"equal", curve(policy.JitterEqual), 1, 0, 100 * ms, 150 * ms, 200 * ms},
		{"equal, capped", curve(policy.JitterEqual), 9, 0, 500 * ms, 750 * ms, time.Second},
		{"none", curve(policy.JitterNone), 1, 0, 200 * ms, 200 * ms, 200 * ms},
		{"decorrelated, the first", curve(policy.JitterDecorrelated), 0, 0, 100 * ms, 200 * ms, 300 * ms},
		{"decorrelated, from the delay before", curve(policy.JitterDecorrelated), 1, 200 * ms, 100 * ms, 350 * ms, 600 * ms},
		{"decorrelated, capped", curve(policy.JitterDecorrelated), 2, 900 * ms, 100 * ms, 550 * ms, time.Second},
		{"decorrelated, prev below base", curve(policy.JitterDecorrelated), 2, ms, 100 * ms, 200 * ms, 300 * ms},
		{"decorrelated, negative prev", curve(policy.JitterDecorrelated), 2, -time.Hour, 100 * ms, 200 * ms, 300 * ms},
		{"proportional, the spread of gRFC A6", spread(0.2), 1, 0, 160 * ms, 200 * ms, 240 * ms},
		{"proportional, spread unset is 0.2", spread(0), 1, 0, 160 * ms, 200 * ms, 240 * ms},
		{"proportional, half", spread(0.5), 1, 0, 100 * ms, 200 * ms, 300 * ms},
		{"proportional, widest", spread(1), 1, 0, 0, 200 * ms, 400 * ms},
		{"proportional, capped", spread(0.5), 9, 0, 500 * ms, time.Second, time.Second},
		{"an unknown jitter is full", curve(99), 1, 0, 0, 100 * ms, 200 * ms},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, draw := range []struct {
				u    float64
				want time.Duration
			}{
				{0, test.least},
				{0.5, test.middle},
				{1, test.most},
				// A draw outside of its range counts as its nearest end.
				{-3, test.least},
				{7, test.most},
			} {
				got := test.b.Delay(test.n, test.prev, draw.u)
				if diff := got - draw.want; diff < -1 || diff > 1 { // a nanosecond is rounding
					t.Errorf("Delay(%d, %v, %v) = %v, want %v", test.n, test.prev, draw.u, got, draw.want)
				}
			}
		})
	}
}

// Base and Max can come from two sources that know nothing of each other: the
// one that was set for this use stands, the inherited one yields.
func TestBackoff_specificOfBaseAndMaxWins(t *testing.T) {
	none := policy.JitterNone
	for _, test := range []struct {
		name   string
		layers []policy.Backoff // the most specific first
		first  time.Duration
		last   time.Duration
	}{
		{"Max alone lowers the default Base", []policy.Backoff{{Max: 10 * ms}}, 10 * ms, 10 * ms},
		{"Base alone lifts the default Max", []policy.Backoff{{Base: 5 * time.Second}}, 5 * time.Second, 5 * time.Second},
		{"a method's Max over a channel's Base", []policy.Backoff{{Max: 10 * ms}, {Base: 20 * ms}}, 10 * ms, 10 * ms},
		{"a method's Base over a channel's Max", []policy.Backoff{{Base: 20 * ms}, {Max: 10 * ms}}, 20 * ms, 20 * ms},
		{"no conflict", []policy.Backoff{{Base: 20 * ms}, {Max: 80 * ms}}, 20 * ms, 80 * ms},
	} {
		t.Run(test.name, func(t *testing.T) {
			var p policy.Policy
			for _, b := range test.layers {
				p = p.Over(policy.Policy{Backoff: b})
			}
			p.Backoff.Jitter = none
			compiled := policy.Compile(p).Backoff
			for from, b := range map[string]policy.Backoff{"stacked": p.Backoff, "compiled": compiled} {
				if first, last := b.Delay(0, 0, 0), b.Delay(100, 0, 0); first != test.first || last != test.last {
					t.Errorf("%s: delays go from %v to %v, want %v to %v", from, first, last, test.first, test.last)
				}
				b.Jitter = policy.JitterDecorrelated // draws between the two: they must not be crossed
				if d := b.Delay(0, 0, lastDraw); d < test.first || d > test.last {
					t.Errorf("%s: decorrelated, the first delay is %v, want %v to %v", from, d, test.first, test.last)
				}
				if err := backoffOf(b).Validate(); err != nil {
					t.Errorf("%s: %v", from, err)
				}
			}
		})
	}
}

// The float64 nearest to a large Duration can be larger: a share must not be.
func TestBackoff_largestDurations(t *testing.T) {
	for below := range time.Duration(1025) {
		b := policy.Backoff{Base: math.MaxInt64 - 1 - below, Max: math.MaxInt64 - 1 - below}
		for _, b.Jitter = range []policy.Jitter{policy.JitterFull, policy.JitterEqual, policy.JitterDecorrelated, policy.JitterProportional} {
			for _, u := range []float64{lastDraw, 1} {
				if d := b.Delay(0, 0, u); d < b.Max/2 || d > b.Max {
					t.Fatalf("%v: Delay(0, 0, %v) = %d, want at most %d and near it", b.Jitter, u, d, int64(b.Max))
				}
			}
		}
	}
}

// Fields that Validate refuses count as not set. A policy that nobody validated
// must not make a hot loop.
func TestBackoff_badFieldsCountAsUnset(t *testing.T) {
	good := policy.Backoff{Base: 100 * ms, Max: time.Second, Multiplier: 2, Jitter: policy.JitterProportional, Spread: 0.2}
	for _, test := range []struct {
		name  string
		spoil func(*policy.Backoff)
		unset func(*policy.Backoff)
	}{
		{"negative Base", func(b *policy.Backoff) { b.Base = -1 }, func(b *policy.Backoff) { b.Base = 0 }},
		{"negative Max", func(b *policy.Backoff) { b.Max = math.MinInt64 }, func(b *policy.Backoff) { b.Max = 0 }},
		{"negative Multiplier", func(b *policy.Backoff) { b.Multiplier = -2 }, func(b *policy.Backoff) { b.Multiplier = 0 }},
		{"shrinking Multiplier", func(b *policy.Backoff) { b.Multiplier = 0.5 }, func(b *policy.Backoff) { b.Multiplier = 0 }},
		{"NaN Multiplier", func(b *policy.Backoff) { b.Multiplier = math.NaN() }, func(b *policy.Backoff) { b.Multiplier = 0 }},
		{"infinite Multiplier", func(b *policy.Backoff) { b.Multiplier = math.Inf(1) }, func(b *policy.Backoff) { b.Multiplier = 0 }},
		{"negative Spread", func(b *policy.Backoff) { b.Spread = -0.1 }, func(b *policy.Backoff) { b.Spread = 0 }},
		{"Spread above 1", func(b *policy.Backoff) { b.Spread = 1.5 }, func(b *policy.Backoff) { b.Spread = 0 }},
		{"NaN Spread", func(b *policy.Backoff) { b.Spread = math.NaN() }, func(b *policy.Backoff) { b.Spread = 0 }},
	} {
		t.Run(test.name, func(t *testing.T) {
			spoilt, unset := good, good
			test.spoil(&spoilt)
			test.unset(&unset)
			for n := range 8 {
				if got, want := spoilt.Delay(n, 0, 0.5), unset.Delay(n, 0, 0.5); got != want {
					t.Errorf("Delay(%d) = %v, want %v", n, got, want)
				}
			}
			if err := (policy.Policy{Backoff: spoilt}).Validate(); err == nil {
				t.Error("Validate accepts it")
			}
		})
	}
}

func backoffOf(b policy.Backoff) policy.Policy { return policy.Policy{Backoff: b} }

// validBackoff draws backoffs that Validate accepts, to the ends of each range.
func validBackoff() *rapid.Generator[policy.Backoff] {
	return rapid.Custom(func(t *rapid.T) policy.Backoff {
		b := policy.Backoff{
			Base:       time.Duration(rapid.Int64Range(0, math.MaxInt64-1).Draw(t, "base")),
			Multiplier: rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1, math.MaxFloat64)).Draw(t, "multiplier"),
			Jitter:     policy.Jitter(rapid.Uint8Range(0, uint8(policy.JitterNone)).Draw(t, "jitter")),
			Spread:     rapid.Float64Range(0, 1).Draw(t, "spread"),
		}
		if rapid.Bool().Draw(t, "capped") {
			b.Max = time.Duration(rapid.Int64Range(max(1, int64(b.Base)), math.MaxInt64).Draw(t, "max"))
		}
		return b
	})
}

func TestBackoff_properties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := validBackoff().Draw(t, "backoff")
		n := rapid.IntRange(0, math.MaxInt-1).Draw(t, "n")
		prev := time.Duration(rapid.Int64().Draw(t, "prev"))
		u := rapid.Float64Range(0, lastDraw).Draw(t, "u")
		higher := rapid.Float64Range(u, lastDraw).Draw(t, "higher u")

		limit := max(b.Max, b.Base)
		if b.Max == 0 {
			limit = max(time.Second, b.Base)
		}
		d := b.Delay(n, prev, u)
		if d < 0 || d > limit {
			t.Fatalf("Delay = %v, want within [0, %v]", d, limit)
		}
		if again := b.Delay(n, prev, u); again != d {
			t.Fatalf("Delay = %v, then %v: not pure", d, again)
		}
		if more := b.Delay(n, prev, higher); more < d {
			t.Fatalf("a higher draw gives a shorter delay: %v for %v, %v for %v", d, u, more, higher)
		}
		if b.Jitter != policy.JitterDecorrelated { // which follows the delay before, not the curve
			if next := b.Delay(n+1, prev, u); next < d {
				t.Fatalf("retry %d waits %v, the one after it %v: the curve falls", n, d, next)
			}
		}
	})
}

// Half of what JitterEqual waits is certain, and JitterDecorrelated waits Base
// at least: the two that promise a least delay keep it.
func TestBackoff_leastDelay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := validBackoff().Draw(t, "backoff")
		b.Base = max(b.Base, 1)
		n := rapid.IntRange(0, 1000).Draw(t, "n")
		u := rapid.Float64Range(0, lastDraw).Draw(t, "u")

		b.Jitter = policy.JitterNone
		full := b.Delay(n, 0, u)
		b.Jitter = policy.JitterEqual
		if d := b.Delay(n, 0, u); d < full/2 || d > full {
			t.Fatalf("equal jitter waits %v, want within [%v, %v]", d, full/2, full)
		}
		b.Jitter = policy.JitterDecorrelated
		if d := b.Delay(n, full, u); d < b.Base {
			t.Fatalf("decorrelated jitter waits %v, want Base %v at least", d, b.Base)
		}
	})
}

// Next draws: with full jitter two of a thousand waits of a second are the same
// to the nanosecond with a chance of one in two thousand, all of them never.
func TestBackoff_Next(t *testing.T) {
	b := policy.Backoff{Base: time.Second, Max: time.Second}
	seen := map[time.Duration]bool{}
	for range 1000 {
		seen[b.Next(0, 0)] = true
	}
	if len(seen) < 900 {
		t.Errorf("1000 draws gave %d different delays", len(seen))
	}
}

func TestBackoff_Next_allocations(t *testing.T) {
	b := policy.Backoff{Base: ms, Jitter: policy.JitterDecorrelated}
	var d time.Duration
	if n := testing.AllocsPerRun(100, func() { d = b.Next(3, d) }); n != 0 {
		t.Errorf("Next allocates %v times, want 0", n)
	}
}

func FuzzBackoffDelay(f *testing.F) {
	r := rand.New(rand.NewPCG(7, 7))
	for range 16 {
		f.Add(r.Int64(), r.Int64(), 1+r.Float64()*9, uint8(r.IntN(7)), r.Float64(), r.IntN(200), r.Int64(), r.Float64())
	}
	for jitter := range uint8(7) {
		f.Add(int64(-1), int64(-1), -2.0, jitter, -1.0, -1, int64(-1), -1.0)
		f.Add(int64(math.MaxInt64), int64(math.MaxInt64-401), math.NaN(), jitter, math.NaN(), math.MaxInt, int64(math.MaxInt64), math.NaN())
		f.Add(int64(math.MinInt64), int64(math.MinInt64), math.Inf(-1), jitter, math.Inf(1), math.MinInt, int64(math.MinInt64), math.Inf(1))
		f.Add(int64(1), int64(math.MaxInt64), 10.0, jitter, 1.0, 64, int64(math.MaxInt64/2), lastDraw)
	}
	f.Fuzz(func(t *testing.T, base, limit int64, multiplier float64, jitter uint8, spread float64, n int, prev int64, u float64) {
		b := policy.Backoff{
			Base: time.Duration(base), Max: time.Duration(limit), Multiplier: multiplier,
			Jitter: policy.Jitter(jitter), Spread: spread,
		}
		d := b.Delay(n, time.Duration(prev), u)
		if d < 0 {
			t.Errorf("%+v.Delay(%d, %d, %v) = %v, want no negative delay", b, n, prev, u, d)
		}
		if b.Max > 0 && d > b.Max {
			t.Errorf("%+v.Delay(%d, %d, %v) = %v, want at most Max %v", b, n, prev, u, d, b.Max)
		}
		if b.Max <= 0 && d > max(time.Second, b.Base) {
			t.Errorf("%+v.Delay(%d, %d, %v) = %v, want at most the default Max or Base", b, n, prev, u, d)
		}
	})
}
