// Command lab measures what retries do to the services below them, with Belay
// and with what Go programs use instead, under the same load and the same
// faults:
//
//   - none: gRPC as it comes;
//   - middleware: go-grpc-middleware's retry interceptor, three attempts;
//   - native: grpc-go's retryPolicy with its throttle (10 tokens, ratio 0.1);
//   - failsafe: failsafe-go's retry policy with its budget;
//   - ratio10: a bucket that allows one retry for ten calls (ratio.go);
//   - belay: Belay with its defaults, the same in all experiments;
//   - belay-nobreaker: the same without circuit breakers, to show that it is
//     not they that keep retries from multiplying;
//   - belay-hedge, belay-learn: the defaults and one of the two features that
//     are off until they are asked for.
//
// Calls arrive in an open loop: when the next one starts does not depend on how
// the last one fares, and latency counts from the intended start. Load is
// counted at the server. Each cell runs several times with other random
// numbers; the tables show the median and the worst.
//
// Most experiments run real gRPC clients and servers over in-memory connections
// in fake time, in a testing/synctest bubble: a thousand clients and hours of
// load fit into seconds, and no timing depends on the machine. The network
// costs nothing there, and neither does the processor. So the main experiments
// also run over loopback in real time, where they say clock=real.
//
// Run it with `make lab`, or `go run ./lab -h` in the examples module. It prints
// lines that a script can read,
//
//	RESULT lab exp=… stack=… key=value … key_worst=value …
//
// and writes one HTML page with all tables and plots.
package main
