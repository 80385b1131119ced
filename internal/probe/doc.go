// Package probe is the scripted gRPC service behind Belay's tests and examples.
//
// A [Server] answers every method of probe.proto. What one run of a handler
// does (which code, which trailers, how late, whether the reply gets lost) is a
// [Step]; a script is a list of steps, one for each time the handler is entered:
//
//	conn, srv := probe.Start(t)
//	srv.Script(probe.Read, probe.Step{Code: codes.Unavailable}, probe.Step{})
//	_, err := probe.Call(ctx, conn, probe.Read, &probev1.Request{}) // UNAVAILABLE, then OK
//
// [Start] runs a real grpc server and a real client over an in-memory
// connection, also inside a testing/synctest bubble, where all times are exact.
//
// The words are those of the failure cases: hits are handler entries
// ([Server.Hits]), attempts are calls of the innermost client invoker
// ([Counter]), effects are handler runs that did their work ([Server.Effects]).
//
// Only tests and examples import this package; a test in internal/arch says so.
package probe
