package idempotency

import (
	"context"
	"crypto/tls"
	"errors"
)

type tlsKey struct{}

// ContextWithTLS returns a context that carries the connection's TLS state for
// ScopeFromTLS. The gRPC edge calls it; a nil state leaves ctx as it is.
func ContextWithTLS(ctx context.Context, state *tls.ConnectionState) context.Context {
	if state == nil {
		return ctx
	}
	return context.WithValue(ctx, tlsKey{}, state)
}

// ScopeFromTLS is a Config.Scope for mutual TLS: the scope is the verified
// client certificate's first URI name (a SPIFFE ID), else its subject. It fails
// without a client certificate, and for one that the server did not verify:
// with tls.RequireAnyClientCert anybody could write any name into it.
func ScopeFromTLS(ctx context.Context) (string, error) {
	state, _ := ctx.Value(tlsKey{}).(*tls.ConnectionState)
	if state == nil {
		return "", errors.New("idempotency: no scope: the call did not come over TLS")
	}
	if len(state.VerifiedChains) == 0 || len(state.VerifiedChains[0]) == 0 {
		return "", errors.New("idempotency: no scope: the connection has no verified client certificate")
	}
	leaf := state.VerifiedChains[0][0]
	if len(leaf.URIs) > 0 {
		return "uri:" + leaf.URIs[0].String(), nil
	}
	// The prefix keeps a subject that reads like a URI from being one.
	if subject := leaf.Subject.String(); subject != "" {
		return "subject:" + subject, nil
	}
	return "", errors.New("idempotency: no scope: the client certificate has neither a URI name nor a subject")
}

// SingleTenant is a Config.Scope for a server whose callers all belong
// together: one constant scope. On any other server two tenants that choose the
// same key would be shown each other's replies.
func SingleTenant(context.Context) (string, error) { return "single-tenant", nil }
