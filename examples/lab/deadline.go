package main

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/internal/probe/probev1"
)

var deadlineExperiment = experiment{
	name:  "deadline",
	title: "DEADLINE-6: six hops that together take about as long as the user waits",
	text: `Each of six services works for 5 to 30 ms, at random, before it calls the next; the user waits root_ms. With 100 ms half of the calls cannot end in time, with 150 ms nearly all could; the question is who notices, and what noticing costs.
With detached=3 the third hop calls on with a context of its own, as code does that forgets the one it was given: nothing tells its callee of the user's deadline, whatever the stack.
late: leaf work begun after the user's deadline. too_short: attempts begun with less time left than the fastest that was observed there in the last 15 s (where the last 10 s have 100 successes).
doomed_refused: of the calls at any hop that could not end in time, as the drawn work times tell afterwards, the share for which no attempt was made; good_refused: the same of those that could have.
oracle_refused: what somebody who knows the true distribution would refuse of the doomed ones, at the same hops with the same time left, without refusing more good ones. hopeless: work time of services, as a share, that went into calls which failed.`,
	cells: func(p plan) []cell {
		stacks := slices.Concat(peers, []string{stackBelay, stackNoBreaker, stackLearn, stackLearnNoBreaker})
		if p.quick {
			stacks = []string{stackNone, stackBelay, stackNoBreaker, stackLearn, stackLearnNoBreaker}
			return p.cross("deadline", stacks, "hops=6 root_ms=100")
		}
		cells := p.cross("deadline", stacks, "hops=6 root_ms=100", "hops=6 root_ms=150", "clock=real hops=6 root_ms=100")
		return append(cells, p.cross("deadline", []string{stackNone, stackBelay, stackNoBreaker, stackLearn}, "detached=3 hops=6 root_ms=100")...)
	},
	run: runDeadline,
}

const (
	deadlineLeast = 5 * time.Millisecond
	deadlineMost  = 30 * time.Millisecond
)

// workTime is how long a hop works on a call: drawn by their numbers alone, so
// that what a call would have needed is known even if it never got there.
func workTime(repeat int, id int64, hop int) time.Duration {
	r := rand.New(rand.NewPCG(uint64(repeat)<<32|uint64(hop), uint64(id))) //nolint:gosec // counts; nothing here is a secret
	return deadlineLeast + time.Duration(r.Int64N(int64(deadlineMost-deadlineLeast)))
}

// decision is one call at one hop: what time it had and whether it was tried.
type decision struct {
	id      int64
	hop     int // the caller's place; the next to work is service hop+1
	left    time.Duration
	refused bool
}

// deadlineWatch sees all decisions.
type deadlineWatch struct {
	repeat   int
	reserves bool // the servers keep a reserve

	mu        sync.Mutex // guards all below
	late      int
	tooShort  int
	worked    time.Duration
	workOf    map[int64]time.Duration
	observed  []observed // by hop
	decisions []decision
}

type attemptedKey struct{}

// interceptors are what sees the calls and the attempts of a hop.
func (d *deadlineWatch) interceptors(hop int) (calls, attempts grpc.UnaryClientInterceptor) {
	calls = func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		attempted := new(bool)
		left := timeLeft(ctx)
		err := invoke(context.WithValue(ctx, attemptedKey{}, attempted), method, req, reply, cc, opts...)
		d.decided(decision{id: req.(*probev1.Request).GetNumber(), hop: hop, left: left, refused: !*attempted}) //nolint:forcetypeassert // the lab's own calls
		return err
	}
	attempts = func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if attempted, ok := ctx.Value(attemptedKey{}).(*bool); ok {
			*attempted = true
		}
		began := time.Now()
		d.begun(hop, timeLeft(ctx))
		err := invoke(ctx, method, req, reply, cc, opts...)
		if err == nil {
			d.succeeded(hop, time.Since(began))
		}
		return err
	}
	return calls, attempts
}

func timeLeft(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return math.MaxInt64
	}
	return time.Until(deadline)
}

func (d *deadlineWatch) decided(made decision) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.decisions = append(d.decisions, made)
}

func (d *deadlineWatch) begun(hop int, left time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if fastest, known := d.observed[hop].fastest(time.Now()); known && left < fastest {
		d.tooShort++
	}
}

func (d *deadlineWatch) succeeded(hop int, took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.observed[hop].add(time.Now(), took)
}

// observed is the successes of the last 15 seconds.
type observed struct {
	at   []time.Time
	took []time.Duration
}

func (o *observed) add(now time.Time, took time.Duration) {
	o.at, o.took = append(o.at, now), append(o.took, took)
}

// fastest returns the shortest, and whether the last ten seconds had a hundred:
// as few as any limit that is learned should need.
func (o *observed) fastest(now time.Time) (time.Duration, bool) {
	old := 0
	for old < len(o.at) && now.Sub(o.at[old]) > 15*time.Second {
		old++
	}
	o.at, o.took = o.at[old:], o.took[old:]
	if len(o.at) < 100 || now.Sub(o.at[len(o.at)-100]) > 10*time.Second {
		return 0, false
	}
	return slices.Min(o.took), true
}

// work is a service's work on a call.
func (d *deadlineWatch) work(ctx context.Context, hop int, req *probev1.Request) error {
	began := time.Now()
	err := work(ctx, workTime(d.repeat, req.GetNumber(), hop))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.worked += time.Since(began)
	d.workOf[req.GetNumber()] += time.Since(began)
	return err
}

func runDeadline(w *world) (outcome, error) {
	warm, measured, rate := 20*time.Second, 30*time.Second, 300.0
	switch {
	case w.cell.Quick:
		warm, measured = 11*time.Second, 5*time.Second
	case !w.fake:
		warm, measured, rate = 8*time.Second, 12*time.Second, 100
	}
	hops := w.cell.param("hops")
	d := &deadlineWatch{
		repeat: w.cell.Repeat, reserves: isBelay(w.cell.Stack), workOf: map[int64]time.Duration{},
		observed: make([]observed, hops),
	}
	w.watch, w.detached = d.interceptors, w.cell.param("detached")
	t := newTally()
	c, err := w.startChain(w.cell.Stack, hops, func(ctx context.Context, req *probev1.Request, _ bool) error {
		t.arrived(req.GetNumber())
		if late(req) {
			d.mu.Lock()
			d.late++
			d.mu.Unlock()
		}
		return d.work(ctx, hops, req)
	}, d.work)
	if err != nil {
		return outcome{}, err
	}
	u := &users{tally: t, rate: rate, timeout: time.Duration(w.cell.param("root_ms")) * time.Millisecond, random: w.random(2), channels: c.conns[:1]}
	ctx := context.Background()
	at := u.arrive(ctx, t.zero, warm)
	u.wait()
	d.restart()
	at = later(at)
	u.arrive(ctx, at, measured)
	u.wait()
	if err := w.close(); err != nil { // what nobody waits for any more has ended then
		return outcome{}, err
	}
	w.cleanups = nil

	all := t.between(at.Sub(t.zero), forever)
	d.mu.Lock()
	defer d.mu.Unlock()
	var o outcome
	o.add("late", float64(d.late))
	o.add("too_short", float64(d.tooShort))
	doomed, oracle, good := d.refusals(hops)
	o.add("doomed_refused", doomed)
	o.add("oracle_refused", oracle)
	o.add("good_refused", good)
	o.add("success", all.success())
	o.add("hopeless", d.hopeless(t))
	o.add("calls", float64(all.calls))
	return o, nil
}

// restart forgets what was counted; what was observed stays.
func (d *deadlineWatch) restart() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.late, d.tooShort, d.worked, d.decisions = 0, 0, 0, nil
	clear(d.workOf)
}

// hopeless is the share of the work that went into calls which failed.
func (d *deadlineWatch) hopeless(t *tally) float64 {
	wasted := d.worked
	for _, u := range t.users {
		if u.error == nil {
			wasted -= d.workOf[u.id]
		}
	}
	return wasted.Seconds() / max(d.worked.Seconds(), 1e-9)
}

// refusals compares what was refused with what an oracle would have refused.
func (d *deadlineWatch) refusals(hops int) (doomed, oracle, good float64) {
	truth := newDeadlineTruth(hops, d.reserves)
	type judged struct {
		chance float64
		doomed bool
	}
	points := make([]judged, 0, len(d.decisions))
	var doomedAll, doomedRefused, goodAll, goodRefused int
	for _, made := range d.decisions {
		p := judged{truth.chance(made.hop, made.left), !truth.ends(made.left, func(hop int) time.Duration {
			return workTime(d.repeat, made.id, hop)
		}, made.hop)}
		points = append(points, p)
		switch {
		case p.doomed && made.refused:
			doomedAll, doomedRefused = doomedAll+1, doomedRefused+1
		case p.doomed:
			doomedAll++
		case made.refused:
			goodAll, goodRefused = goodAll+1, goodRefused+1
		default:
			goodAll++
		}
	}
	// The oracle refuses the least likely first, until one more good one would
	// be too many.
	slices.SortFunc(points, func(a, b judged) int {
		switch {
		case a.chance < b.chance:
			return -1
		case a.chance > b.chance:
			return 1
		}
		return 0
	})
	mayStill, oracleRefused := goodRefused, 0
	for _, p := range points {
		if p.doomed {
			oracleRefused++
			continue
		}
		if mayStill == 0 {
			break
		}
		mayStill--
	}
	return ratio(doomedRefused, doomedAll), ratio(oracleRefused, doomedAll), ratio(goodRefused, goodAll)
}

// deadlineTruth is the true distribution of what is still to be done.
type deadlineTruth struct {
	hops     int
	reserves bool
	samples  [][]time.Duration // work times by hop, from 1
}

func newDeadlineTruth(hops int, reserves bool) *deadlineTruth {
	t := &deadlineTruth{hops: hops, reserves: reserves}
	for i := range int64(1000) {
		sample := make([]time.Duration, hops+1)
		for hop := range sample {
			sample[hop] = workTime(-1, i, hop)
		}
		t.samples = append(t.samples, sample)
	}
	return t
}

// chance is how likely a call with so much time left at a hop ends in time.
func (t *deadlineTruth) chance(hop int, left time.Duration) float64 {
	n := 0
	for _, s := range t.samples {
		if t.ends(left, func(h int) time.Duration { return s[h] }, hop) {
			n++
		}
	}
	return ratio(n, len(t.samples))
}

// ends reports whether a call ends in time at all hops below its caller, which
// keep Belay's default reserve if they are Belay's: 5 %, at most 5 ms.
func (t *deadlineTruth) ends(left time.Duration, work func(hop int) time.Duration, caller int) bool {
	for hop := caller + 1; hop <= t.hops; hop++ {
		if t.reserves {
			left -= min(left/20, 5*time.Millisecond)
		}
		left -= work(hop)
		if left < 0 {
			return false
		}
	}
	return true
}
