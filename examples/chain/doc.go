// Command chain shows what retries do to a chain of services, and what Belay
// does about it.
//
//	user → edge → orders → payments → ledger
//
// Each service is a process of its own and speaks real gRPC over loopback. The
// user is this program: it calls edge at a fixed rate, whatever comes back. For
// each scenario (the ledger down, killed, flaky, slow, restarted; replies lost
// after the effect) the same chain runs four times, with
//
//   - none: gRPC as it comes,
//   - middleware: go-grpc-middleware's retry, three attempts at every hop,
//   - belay: Belay with its defaults at every hop,
//   - belay-nobreaker: the same without circuit breakers, to show that it is
//     not they that keep retries from multiplying.
//
// Beside the chain an auditor reads and writes the ledger by streams, and counts
// which of them are lost and which messages come twice; see streams.go.
//
// Run it with `make demo`, or `go run ./chain -h` in the examples module. To
// put Belay into services of your own, read stack.go, services.go and
// proto/belay/chain/v1/chain.proto, in this order; everything else here is
// load, faults and counting.
package main
