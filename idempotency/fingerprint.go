package idempotency

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"sync"

	"google.golang.org/protobuf/proto"
)

// fingerprintVersion is the first byte of every fingerprint. It changes with
// the canonical form, and a binary with a new one makes the old one beside it
// for as long as records of the old one live.
const fingerprintVersion = 1

// Secret is a named key for an HMAC or a cipher. The name is stored with what
// the secret made, so that secrets can be rotated.
type Secret struct {
	// ID is 1 to 32 printable ASCII characters, unique among its neighbours.
	ID string

	// Key is at least 16 bytes. It is copied, not kept.
	Key []byte
}

func validateSecrets(field string, secrets []Secret) error {
	seen := make(map[string]bool, len(secrets))
	for i, s := range secrets {
		switch {
		case len(s.ID) < 1 || len(s.ID) > 32 || Key.Validate(Key{Value: s.ID}) != nil:
			return fmt.Errorf("idempotency: %s[%d].ID is %q: must be 1 to 32 printable ASCII characters without spaces", field, i, s.ID)
		case seen[s.ID]:
			return fmt.Errorf("idempotency: %s[%d].ID is %q: must be unique", field, i, s.ID)
		case len(s.Key) < 16:
			return fmt.Errorf("idempotency: %s[%d].Key has %d bytes: must have at least 16", field, i, len(s.Key))
		}
		seen[s.ID] = true
	}
	return nil
}

// Fingerprinter makes fingerprints of requests: a hash of the canonical wire
// form, the same in every process and build. It is safe for concurrent use.
//
// The fingerprint covers the message's type, every field that the .proto does
// not mark (belay.v1.field).not_identity, and unknown fields. The method is not
// in it: it is in the ID.
type Fingerprinter struct {
	secrets []Secret
	canon   canonicalizer
	buffers sync.Pool // *[]byte
}

// NewFingerprinter returns a fingerprinter. Without secrets the hash is plain
// SHA-256, from which somebody who reads the store can guess a request of few
// possible values; with secrets it is an HMAC. The first secret makes the
// fingerprint of a new record, and records made with any of them are
// recognised: to rotate, put the new one in front and drop the old one when its
// last record is gone.
func NewFingerprinter(secrets ...Secret) (*Fingerprinter, error) {
	if err := validateSecrets("secrets", secrets); err != nil {
		return nil, err
	}
	f := &Fingerprinter{}
	for _, s := range secrets {
		f.secrets = append(f.secrets, Secret{ID: s.ID, Key: append([]byte(nil), s.Key...)})
	}
	return f, nil
}

// Of returns the fingerprint of a call with one request, and, when there are
// several secrets, those that the other secrets make. A nil request counts as
// one without a type and without fields.
func (f *Fingerprinter) Of(request proto.Message) (Fingerprint, []Fingerprint) {
	buf := f.buffer()
	defer f.buffers.Put(buf)
	*buf = f.appendRequest((*buf)[:0], request)
	if len(f.secrets) == 0 { // no hash.Hash: this is the path of every call
		sum := sha256.Sum256(*buf)
		return encodeFingerprint("", sum[:]), nil
	}
	r := f.Rolling()
	r.write(*buf)
	return r.Sum()
}

// Rolling returns the fingerprint of a call whose requests come one by one.
func (f *Fingerprinter) Rolling() *Rolling {
	r := &Rolling{f: f}
	if len(f.secrets) == 0 {
		r.hashes = []hash.Hash{sha256.New()}
		return r
	}
	for _, s := range f.secrets {
		r.hashes = append(r.hashes, hmac.New(sha256.New, s.Key))
	}
	return r
}

func (f *Fingerprinter) buffer() *[]byte {
	if buf, ok := f.buffers.Get().(*[]byte); ok && cap(*buf) <= 64<<10 {
		return buf
	}
	buf := make([]byte, 0, 512)
	return &buf
}

// appendRequest appends one request: its type and its canonical form, both
// length-prefixed, so that two requests cannot pass for one.
func (f *Fingerprinter) appendRequest(b []byte, request proto.Message) []byte {
	if request == nil {
		return binary.BigEndian.AppendUint64(appendPart(b, ""), 0)
	}
	m := request.ProtoReflect()
	b = appendPart(b, string(m.Descriptor().FullName()))
	start := len(b)
	b = binary.BigEndian.AppendUint64(b, 0)
	if m.IsValid() { // a typed nil has no fields and is equal to an empty message
		b = f.canon.appendMessage(b, m, depth{})
	}
	binary.BigEndian.PutUint64(b[start:], uint64(len(b)-start-8)) //nolint:gosec // a length is not negative
	return b
}

// Rolling is the fingerprint of a stream of requests. Of is the same as a
// Rolling with one Add. It is not safe for concurrent use.
type Rolling struct {
	f      *Fingerprinter
	hashes []hash.Hash
}

// Add takes one more request in. The request may be changed afterwards.
func (r *Rolling) Add(request proto.Message) {
	buf := r.f.buffer()
	defer r.f.buffers.Put(buf)
	*buf = r.f.appendRequest((*buf)[:0], request)
	r.write(*buf)
}

func (r *Rolling) write(b []byte) {
	for _, h := range r.hashes {
		h.Write(b) // a hash never fails
	}
}

// Sum returns the fingerprint of what was added so far, and those that the
// other secrets make. More may be added afterwards.
func (r *Rolling) Sum() (Fingerprint, []Fingerprint) {
	var sum [sha256.Size]byte
	if len(r.f.secrets) == 0 {
		return encodeFingerprint("", r.hashes[0].Sum(sum[:0])), nil
	}
	all := make([]Fingerprint, len(r.hashes))
	for i, h := range r.hashes {
		all[i] = encodeFingerprint(r.f.secrets[i].ID, h.Sum(sum[:0]))
	}
	return all[0], all[1:]
}

// encodeFingerprint writes the version, the secret's id after its length, and
// the sum.
func encodeFingerprint(secretID string, sum []byte) Fingerprint {
	var fixed [2 + 32 + sha256.Size]byte
	b := append(fixed[:0], fingerprintVersion, byte(len(secretID))) //nolint:gosec // at most 32, see validateSecrets
	b = append(b, secretID...)
	return Fingerprint(append(b, sum...))
}

// comparable reports whether a fingerprint that matches none of ours is really
// of another request: it is not when it was made by a version or with a secret
// that this server does not have.
func (f *Fingerprinter) comparable(stored Fingerprint) bool {
	if len(stored) < 2 || stored[0] != fingerprintVersion || len(stored) != 2+int(stored[1])+sha256.Size {
		return false
	}
	id := string(stored[2 : 2+int(stored[1])])
	if len(f.secrets) == 0 {
		return id == ""
	}
	for _, s := range f.secrets {
		if s.ID == id {
			return true
		}
	}
	return false
}
