package idempotency

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"
)

// MaxKeyLength is the longest key that is accepted, in bytes. It is what
// Stripe's API and the other implementations of the IETF header allow.
const MaxKeyLength = 255

// firstSentLayout is RFC 3339 in UTC with milliseconds.
const firstSentLayout = "2006-01-02T15:04:05.000Z07:00"

// Key names one logical call: every attempt of it carries the same Key, and no
// other call ever does. A client that must survive its own crash saves the Key
// (it marshals to text) before it sends, and resumes with it.
//
// The zero Key is invalid.
type Key struct {
	// Value is 1 to MaxKeyLength printable ASCII characters, 0x21 to 0x7E.
	// Servers compare it byte for byte.
	Value string

	// FirstSent is when the first attempt was, or is about to be, sent, to the
	// millisecond. It is constant for the life of the key. A server refuses a
	// key whose record may already be gone, and only this tells it; zero means
	// not known, and then the guarantee holds for the server's retention after
	// its claim. The time bits inside a UUID are never read instead.
	FirstSent time.Time
}

// NewKey returns a random key (a version 4 UUID) first sent now.
func NewKey() Key {
	var u [16]byte
	_, _ = rand.Read(u[:]) // never fails: crypto/rand ends the program instead
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80

	var text [36]byte
	hex.Encode(text[0:8], u[0:4])
	hex.Encode(text[9:13], u[4:6])
	hex.Encode(text[14:18], u[6:8])
	hex.Encode(text[19:23], u[8:10])
	hex.Encode(text[24:36], u[10:16])
	text[8], text[13], text[18], text[23] = '-', '-', '-', '-'
	return Key{Value: string(text[:]), FirstSent: time.Now().UTC().Truncate(time.Millisecond)}
}

// DeriveKey returns the key of an intent that has a name of its own, such as
// ("orders", order.CreatedAt, order.ID, "charge"), so that a process that
// forgot which keys it had made makes the same ones again. The parts must say
// what is meant to happen once and nothing that changes from attempt to attempt
// (a clock, a token, a random number). firstSent must be as constant as the
// parts; zero means not known.
func DeriveKey(namespace string, firstSent time.Time, parts ...string) Key {
	b := appendPart(nil, namespace)
	for _, part := range parts {
		b = appendPart(b, part)
	}
	sum := sha256.Sum256(b)
	if !firstSent.IsZero() {
		firstSent = firstSent.UTC().Truncate(time.Millisecond)
	}
	return Key{Value: base64.RawURLEncoding.EncodeToString(sum[:]), FirstSent: firstSent}
}

// Validate reports the first rule that k breaks. The error holds no more of
// the key than its length and the offending byte: keys do not belong in logs.
func (k Key) Validate() error {
	if k.Value == "" {
		return errors.New("idempotency: key is empty: must have at least 1 character")
	}
	if len(k.Value) > MaxKeyLength {
		return fmt.Errorf("idempotency: key has %d bytes: must have at most %d", len(k.Value), MaxKeyLength)
	}
	for i := range len(k.Value) {
		if c := k.Value[i]; c < 0x21 || c > 0x7e {
			return fmt.Errorf("idempotency: key has byte 0x%02x at index %d: must be printable ASCII without spaces (0x21 to 0x7e)", c, i)
		}
	}
	if y := k.FirstSent.UTC().Year(); !k.FirstSent.IsZero() && (y < 1 || y > 9999) {
		return fmt.Errorf("idempotency: key's first-sent year is %d: must be 1 to 9999", y)
	}
	return nil
}

// MarshalText returns "value" or "value first-sent", the time in RFC 3339 UTC
// with milliseconds. A key that fails Validate is an error, so that what was
// saved can be used.
func (k Key) MarshalText() ([]byte, error) {
	if err := k.Validate(); err != nil {
		return nil, err
	}
	if k.FirstSent.IsZero() {
		return []byte(k.Value), nil
	}
	return []byte(k.Value + " " + FormatFirstSent(k.FirstSent)), nil
}

// UnmarshalText reads what MarshalText wrote. On an error k is unchanged.
func (k *Key) UnmarshalText(text []byte) error {
	value, sent, timed := strings.Cut(string(text), " ")
	read := Key{Value: value}
	if timed {
		t, err := ParseFirstSent(sent)
		if err != nil {
			return err
		}
		read.FirstSent = t
	}
	if err := read.Validate(); err != nil {
		return err
	}
	*k = read
	return nil
}

// FormatFirstSent writes t as it travels in metadata: RFC 3339, UTC, with
// milliseconds.
func FormatFirstSent(t time.Time) string { return t.UTC().Format(firstSentLayout) }

// ParseFirstSent reads a first-sent time from metadata. Any RFC 3339 time is
// accepted and brought to UTC and milliseconds.
func ParseFirstSent(s string) (time.Time, error) {
	// The bound keeps a peer's text out of the error message at any length.
	if len(s) > 64 {
		return time.Time{}, fmt.Errorf("idempotency: first-sent has %d characters: must be an RFC 3339 time", len(s))
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || t.IsZero() {
		return time.Time{}, fmt.Errorf("idempotency: first-sent %q: must be an RFC 3339 time", s)
	}
	return t.UTC().Truncate(time.Millisecond), nil
}

// KeyFromMetadata reads the values that a peer sent for the key and for its
// first-sent time. No value at all is no key: it returns false. A value that
// is empty, blank, malformed, or one of several is a KEY_INVALID refusal, never
// "no key": a client that tried to send one must not run unprotected.
func KeyFromMetadata(values, firstSent []string) (Key, bool, *Refusal) {
	switch {
	case len(values) == 0:
		return Key{}, false, nil
	case len(values) > 1:
		return Key{}, false, refuseKeyInvalid(fmt.Errorf("idempotency: %d keys: must be exactly 1", len(values)))
	case len(firstSent) > 1:
		return Key{}, false, refuseKeyInvalid(fmt.Errorf("idempotency: %d first-sent times: must be at most 1", len(firstSent)))
	}
	key := Key{Value: values[0]}
	if len(firstSent) == 1 {
		t, err := ParseFirstSent(firstSent[0])
		if err != nil {
			return Key{}, false, refuseKeyInvalid(err)
		}
		key.FirstSent = t
	}
	if err := key.Validate(); err != nil {
		return Key{}, false, refuseKeyInvalid(err)
	}
	return key, true, nil
}
