// Package interceptors puts Belay into gRPC clients and servers.
//
// Most programs need two lines:
//
//	client, err := interceptors.NewClient()
//	conn, err := grpc.NewClient(target, append(client.DialOptions(), creds)...)
//
//	server, err := interceptors.NewServer(interceptors.WithIdempotency(store, config))
//	s := grpc.NewServer(server.ServerOptions(yours...)...)
//
// # One call
//
// Wrapping order, outermost first. Interceptors outside ours run once per call,
// those inside once per attempt.
//
//	client   your interceptors that see calls   (e.g. gRPC's OpenTelemetry plugin)
//	           Belay: policy · deadline · key · loop { breaker · attempt · verdict · bank }
//	             your interceptors that see attempts   (auth, logging)
//	               the wire
//	server           Belay's guard: deadline · ledger · bank · one pushback value
//	                   your interceptors   (authn, authz, validation, shedding)
//	                     Belay's dedupe: claim · run, replay, wait or refuse
//	                       the handler
//
// The guard is outermost so that it speaks last; dedupe is innermost so that a
// replay never passes by your authorisation, and what you refuse is not recorded.
//
// # Errors
//
// A single final error is returned as it came. As soon as the suite did
// something (tried again, or refused to) the error is a [CallError], whose
// status is that of the deciding attempt and which also says what stopped the
// call and whether its effect may have happened.
//
// # Concurrency
//
// A Client and a Server may be used from many goroutines and for many channels
// and servers. Retry banks and breakers are kept per ClientConn.
package interceptors
