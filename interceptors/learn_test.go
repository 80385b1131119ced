package interceptors_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors"
	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/internal/probe"
)

func learning(l policy.Learn, more ...interceptors.ClientOption) []interceptors.ClientOption {
	return append([]interceptors.ClientOption{interceptors.WithPolicy(policy.Policy{Learn: l})}, more...)
}

// taught is a rig whose method takes 10 ms and has been observed often enough.
func taught(t *testing.T, client []interceptors.ClientOption) *rig {
	t.Helper()
	r := start(t, setup{client: client})
	r.srv.Default(probe.Step{Delay: 10 * time.Millisecond})
	r.earn(t, probe.Idempotent, 120)
	r.earn(t, probe.Undeclared, 120)
	time.Sleep(200 * time.Millisecond) // a view of the distribution may be 100 ms old
	return r
}

func TestLearnedAttemptTimeout(t *testing.T) {
	learn := policy.Learn{AttemptQuantile: 0.99, AttemptFactor: 3}
	bubbles(t, "cuts an attempt off and tries again", func(t *testing.T) {
		r := taught(t, learning(learn))
		r.srv.Script(probe.Idempotent, probe.Step{Hang: true}, probe.Step{})
		begin := time.Now()
		_, err := r.call(t, probe.Idempotent, request("x"))
		wantOK(t, err)
		r.wantCounts(t, probe.Idempotent, 2, r.srv.Hits(probe.Idempotent))
		left := r.counter.Attempts()[0].Left
		if left < 30*time.Millisecond || left > 36*time.Millisecond {
			t.Errorf("the first attempt was given %v, want 3 × about 10ms", left)
		}
		if took := time.Since(begin); took > 100*time.Millisecond {
			t.Errorf("took %v", took)
		}
	})
	bubbles(t, "not where nothing may be repeated", func(t *testing.T) {
		r := taught(t, learning(learn))
		r.srv.Script(probe.Undeclared, probe.Step{Delay: 500 * time.Millisecond})
		_, err := r.call(t, probe.Undeclared, request("x"))
		wantOK(t, err)
	})
	bubbles(t, "not with too few samples", func(t *testing.T) {
		r := start(t, setup{client: learning(learn)})
		r.srv.Default(probe.Step{Delay: 10 * time.Millisecond})
		r.earn(t, probe.Idempotent, 90)
		time.Sleep(200 * time.Millisecond)
		r.srv.Script(probe.Idempotent, probe.Step{Delay: 500 * time.Millisecond})
		_, err := r.call(t, probe.Idempotent, request("x"))
		wantOK(t, err)
		r.wantCounts(t, probe.Idempotent, 1, r.srv.Hits(probe.Idempotent))
	})
	bubbles(t, "never below the floor", func(t *testing.T) {
		learn := learn
		learn.AttemptFloor = 200 * time.Millisecond
		r := taught(t, learning(learn))
		_, err := r.call(t, probe.Idempotent, request("x"))
		wantOK(t, err)
		if left := r.counter.Attempts()[0].Left; left != 200*time.Millisecond {
			t.Errorf("given %v, want the floor of 200ms", left)
		}
	})
}

func TestLearnedRefusal(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var learned []interceptors.Event
		r := taught(t, learning(policy.Learn{MinChance: 0.05}, interceptors.WithObserver(interceptors.ObserverFunc(
			func(_ context.Context, e interceptors.Event) {
				if e.Kind == interceptors.EventLearned {
					learned = append(learned, e)
				}
			}))))
		short := func(d time.Duration) error {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			_, err := probe.Call(ctx, r.conn, probe.Idempotent, request("x"))
			return err
		}
		err := short(5 * time.Millisecond)
		wantCode(t, err, codes.DeadlineExceeded)
		if n := r.counter.Count(); n != 0 {
			t.Errorf("%d attempts that could not finish, want 0", n)
		}
		if stop := callErrorOf(t, err).Stop(); stop != interceptors.DeadlineTooShort {
			t.Errorf("stop %v", stop)
		}
		if len(learned) != 1 || !strings.Contains(learned[0].Detail, "120 samples") || learned[0].Delay != 5*time.Millisecond {
			t.Errorf("events %+v, want one with its numbers", learned)
		}
		wantOK(t, short(50*time.Millisecond))

		// In the middle of a call the last error is what is returned.
		r.srv.Script(probe.Idempotent, probe.Step{Delay: 42 * time.Millisecond, Code: codes.Unavailable})
		r.counter.Reset()
		err = short(50 * time.Millisecond)
		wantCode(t, err, codes.Unavailable)
		if n := r.counter.Count(); n != 1 {
			t.Errorf("%d attempts, want 1", n)
		}
	})
}

func TestLearnedDeadlineIsShortened(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := taught(t, learning(policy.Learn{ShortenDeadline: true}))
		for _, c := range []struct{ deadline, want time.Duration }{
			{time.Second, time.Second - 5*time.Millisecond},                   // half of the least latency
			{40 * time.Millisecond, 40*time.Millisecond - 2*time.Millisecond}, // at most 5 %
		} {
			r.counter.Reset()
			ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
			_, err := probe.Call(ctx, r.conn, probe.Idempotent, request("x"))
			cancel()
			wantOK(t, err)
			if left := r.counter.Attempts()[0].Left; left != c.want {
				t.Errorf("of %v the server was given %v, want %v", c.deadline, left, c.want)
			}
		}

		// What ends then has ended with the call's deadline: an attempt's own
		// timeout would be the server's fault, and tried again.
		for _, deadline := range []time.Duration{40 * time.Millisecond, time.Second} {
			r.counter.Reset()
			r.srv.Script(probe.Idempotent, probe.Step{Hang: true})
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			_, err := probe.Call(ctx, r.conn, probe.Idempotent, request("x"))
			cancel()
			wantCode(t, err, codes.DeadlineExceeded)
			if n := r.counter.Count(); n != 1 {
				t.Errorf("of %v: %d attempts, want 1", deadline, n)
			}
		}

		// The error says so too, with what the server had answered before.
		r.srv.Script(probe.Idempotent, unavailable(), probe.Step{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := probe.Call(ctx, r.conn, probe.Idempotent, request("x"))
		wantStop(t, err, interceptors.CallerGone, interceptors.Maybe)
		if !errors.Is(err, context.DeadlineExceeded) || reaches(err, codes.Unavailable) == nil {
			t.Errorf("%v: want context.DeadlineExceeded and UNAVAILABLE behind it", err)
		}
	})
}
