// Package breaker is a circuit breaker that cannot get stuck: it stops calls to a server that
// fails most of them, and lets a few probes find out when it works again.
//
// A call asks [Breaker.Allow] before it starts and reports with [Permit.Done] when it ends:
//
//	permit, err := b.Allow()
//	if err != nil {
//		return err // errors.Is(err, breaker.ErrOpen)
//	}
//	start := time.Now()
//	err = call(ctx)
//	permit.Done(outcomeOf(err), time.Since(start))
//
// The states and what leads from one to the next:
//
//	          a rate or a run of failures is reached
//	    ┌──────────────────────────────────────────────────────┐
//	    │                                                      ▼
//	┌────────┐  Probes succeed  ┌──────────┐  time is over  ┌──────┐
//	│ Closed │ ◀─────────────── │ HalfOpen │ ◀───────────── │ Open │
//	└────────┘                  └──────────┘  and a call    └──────┘
//	                                  │       arrives          ▲
//	                                  └────────────────────────┘
//	                              a probe fails: open for longer
//
//	any state ── ForceOpen ──▶ ForcedOpen  ─┐
//	any state ── ForceClose ─▶ ForcedClosed ┴─ Resume ──▶ Closed
//
// machine.go is that picture in Go. What keeps it from getting stuck or fooled:
//
//   - A result belongs to the stay in a state that admitted its call. When the breaker has moved
//     on, a late result changes nothing; a success from before the outage cannot close a half-open
//     breaker.
//   - A result is filed when the call ends, so calls longer than the window count.
//   - A probe holds its place for ProbeLease at most; a probe that never reports frees itself.
//   - [Neutral] says nothing about the server: it frees a probe's place and counts nowhere. It is
//     the zero Outcome, so a forgotten verdict does no harm.
//   - A permit counts once, however often it is copied and reported.
//   - Rates are compared as integers: 99 of 200 is not one half.
//
// The package knows no RPC system and imports the standard library alone. Which error is which
// [Outcome] is the caller's to say. All types are safe for concurrent use.
package breaker
