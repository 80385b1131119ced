package idempotency

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
)

// Sealer encrypts stored replies and errors. Both methods get the ID as
// additional data, so that a reply cannot be moved to another call's record.
// Implementations are safe for concurrent use and do not keep the slices.
type Sealer interface {
	// Seal returns the sealed form of plain and the id of the key it used,
	// which is stored beside it and must not be empty.
	Seal(plain []byte, id ID) (keyID string, sealed []byte, err error)

	// Open reverses Seal. A key that is gone and data that was touched are
	// errors: the call is then refused as RECORD_CORRUPT, never run again.
	Open(keyID string, sealed []byte, id ID) (plain []byte, err error)
}

// NewSealer returns a Sealer that uses AES-GCM with random nonces. A key is 16,
// 24 or 32 bytes. The first secret seals, any of them opens.
func NewSealer(secrets ...Secret) (Sealer, error) {
	if len(secrets) == 0 {
		return nil, errors.New("idempotency: NewSealer: no secrets: must have at least 1")
	}
	if err := validateSecrets("secrets", secrets); err != nil {
		return nil, err
	}
	s := &gcmSealer{current: secrets[0].ID, ciphers: make(map[string]cipher.AEAD, len(secrets))}
	for i, secret := range secrets {
		block, err := aes.NewCipher(secret.Key)
		if err != nil {
			return nil, fmt.Errorf("idempotency: secrets[%d].Key has %d bytes: must have 16, 24 or 32: %w", i, len(secret.Key), err)
		}
		aead, err := cipher.NewGCM(block)
		if err != nil {
			return nil, fmt.Errorf("idempotency: secrets[%d].Key: %w", i, err)
		}
		s.ciphers[secret.ID] = aead
	}
	return s, nil
}

type gcmSealer struct {
	current string
	ciphers map[string]cipher.AEAD
}

func (s *gcmSealer) Seal(plain []byte, id ID) (string, []byte, error) {
	aead := s.ciphers[s.current]
	nonce := make([]byte, aead.NonceSize(), aead.NonceSize()+len(plain)+aead.Overhead())
	_, _ = rand.Read(nonce) // never fails: crypto/rand ends the program instead
	return s.current, aead.Seal(nonce, nonce, plain, id[:]), nil
}

func (s *gcmSealer) Open(keyID string, sealed []byte, id ID) ([]byte, error) {
	aead, ok := s.ciphers[keyID]
	if !ok {
		return nil, fmt.Errorf("idempotency: sealed with key %q, which this server does not have", keyID)
	}
	if len(sealed) < aead.NonceSize() {
		return nil, errors.New("idempotency: sealed data is too short")
	}
	return aead.Open(nil, sealed[:aead.NonceSize()], sealed[aead.NonceSize():], id[:])
}
