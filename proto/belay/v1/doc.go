// Package belayv1 is the generated form of Belay's protos: the options by which
// an API declares what may be repeated (policy.proto), and the stored outcome of
// a keyed call (record.proto). Import it to read the options; to declare them,
// import belay/v1/policy.proto in a .proto.
package belayv1
