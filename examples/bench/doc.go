// Bench measures what Belay costs, beside what people use today, in one run:
// go-grpc-middleware's retry, failsafe-go (retry, budget and breaker) and
// sony/gobreaker.
//
//	go run ./bench                      all of it, about three minutes
//	go run ./bench -quick               a look, in less than half of one
//	go run ./bench -what breaker,rpc    some of it
//	go run ./bench -markdown README.md  rewrite the table between the marks in a file
//	go run ./bench -check               fail when a bar is missed
//
// How to read it. Times on shared machines drift by more than what is measured
// here, so contestants take turns (A, B, C, A, B, C …), the order moves on by one
// each round, and what counts is the ratio to the baseline of the same round, of
// which the median is printed. Each race has an A/A control: the baseline
// entered a second time. A ratio says nothing that the control's distance
// from 1 can explain.
//
// The baseline is the bare call: the same call with no interceptor. A budget and
// a breaker have no bare call; theirs is the fastest peer. Every line names it.
//
// Every line that a script should read starts with RESULT:
//
//	RESULT bench what=… stack=… ns=… allocs=… ratio=… mode=seq|par64 case=… base=…
//	       control=… over_ns=… over_allocs=… best_ns=… cpu_ns=… bytes=…
//	RESULT bench-bar what=… case=… mode=… metric=… value=… limit=… met=true|false
//
// ns is the time of one operation: the run's length over the number of
// operations, of all goroutines together in mode par64. It is the median of the
// rounds, best_ns the least. cpu_ns is processor time, which other programs on
// the machine disturb less, with that of garbage collection on other cores.
// over_ns and over_allocs are what is added to the baseline.
package main
