// Package observability shows Belay's telemetry beside that of others.
//
// Its tests run gRPC's own OpenTelemetry plugin around the suite: placed before
// it in the chain, the plugin records one call with its attempts below.
package observability
