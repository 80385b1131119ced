// Package probev1 is the generated form of probe.proto.
package probev1
