// Command benchsql measures what deduplication costs a handler that writes to
// PostgreSQL: its throughput with unique keys, beside the same handler in a
// transaction of its own.
//
//	go run ./benchsql           five rounds of three seconds each
//	go run ./benchsql -check    fail when the bar is missed
//
// All contestants have the same callers and 16 connections at work, and the
// server's fsync is on. The store leaves half of a pool to others (a handler may
// use the *sql.DB too), so its pool has 32; belay-same-transaction-pool-16 shows
// what a pool of 16 leaves to it, eight transactions at a time.
//
// There is no gRPC in it, which would cost each of them the same and bring their
// ratio nearer to 1: the store's engine is called as the interceptor calls it. The
// contestants take turns ten times a round, in an order by chance, and the ratio to
// the baseline of the same round is what counts; of five, the median is printed. The
// baseline runs twice, and a ratio says nothing that this control's distance from 1
// can explain.
//
//	RESULT bench what=sql-throughput stack=… per_second=… ratio=… base=plain callers=… connections=…
//	RESULT bench-bar what=sql-throughput stack=… metric=ratio value=… limit=… met=true|false
package main
