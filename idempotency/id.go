package idempotency

import (
	"crypto/sha256"
	"encoding/binary"
)

// IDOf returns the identity of a call: SHA-256 over the length-prefixed scope,
// full method ("/pkg.Service/Method") and key. The prefixes keep ("ab", "c")
// and ("a", "bc") apart. There is no secret in it: a secret that rotates would
// split one identity in two, and the second half would run again.
func IDOf(scope, method, key string) ID {
	// Most calls fit the array, so that the identity costs no allocation.
	var fixed [256]byte
	b := fixed[:0]
	b = appendPart(b, scope)
	b = appendPart(b, method)
	b = appendPart(b, key)
	return sha256.Sum256(b)
}

func appendPart(b []byte, part string) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(len(part)))
	return append(b, part...)
}
