package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
)

// policyJSON is the form of a Policy in JSON. An absent field inherits, so
// every field is left out when it is zero; Codes tells nil from empty.
type policyJSON struct {
	Timeout        jsonDuration `json:"timeout,omitzero"`
	AttemptTimeout jsonDuration `json:"attemptTimeout,omitzero"`
	MinAttempt     jsonDuration `json:"minAttempt,omitzero"`
	MaxAttempts    int          `json:"maxAttempts,omitzero"`
	Backoff        Backoff      `json:"backoff,omitzero"`
	Codes          []jsonCode   `json:"codes,omitzero"`
	Idempotency    Idempotency  `json:"idempotency,omitzero"`
	ConnectGrace   jsonDuration `json:"connectGrace,omitzero"`
	ReplayBytes    int          `json:"replayBytes,omitzero"`
	MaxIdle        jsonDuration `json:"maxIdle,omitzero"`
	Hedge          Hedge        `json:"hedge,omitzero"`
	Learn          Learn        `json:"learn,omitzero"`
}

type backoffJSON struct {
	Base       jsonDuration `json:"base,omitzero"`
	Max        jsonDuration `json:"max,omitzero"`
	Multiplier float64      `json:"multiplier,omitzero"`
	Jitter     Jitter       `json:"jitter,omitzero"`
	Spread     float64      `json:"spread,omitzero"`
}

// MarshalJSON implements [json.Marshaler].
func (p Policy) MarshalJSON() ([]byte, error) {
	out := policyJSON{
		Timeout:        jsonDuration(p.Timeout),
		AttemptTimeout: jsonDuration(p.AttemptTimeout),
		MinAttempt:     jsonDuration(p.MinAttempt),
		MaxAttempts:    p.MaxAttempts,
		Backoff:        p.Backoff,
		Idempotency:    p.Idempotency,
		ConnectGrace:   jsonDuration(p.ConnectGrace),
		ReplayBytes:    p.ReplayBytes,
		MaxIdle:        jsonDuration(p.MaxIdle),
		Hedge:          p.Hedge,
		Learn:          p.Learn,
	}
	if p.Codes != nil {
		out.Codes = make([]jsonCode, len(p.Codes))
		for i, c := range p.Codes {
			out.Codes[i] = jsonCode(c)
		}
	}
	return json.Marshal(out)
}

// UnmarshalJSON implements [json.Unmarshaler]. A name that is not a field of a
// Policy is an error: a misspelt bound must not be a missing one. The values
// are not validated; see [Policy.Validate].
func (p *Policy) UnmarshalJSON(data []byte) error {
	var in policyJSON
	if err := strictUnmarshal(data, &in); err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	*p = Policy{
		Timeout:        time.Duration(in.Timeout),
		AttemptTimeout: time.Duration(in.AttemptTimeout),
		MinAttempt:     time.Duration(in.MinAttempt),
		MaxAttempts:    in.MaxAttempts,
		Backoff:        in.Backoff,
		Idempotency:    in.Idempotency,
		ConnectGrace:   time.Duration(in.ConnectGrace),
		ReplayBytes:    in.ReplayBytes,
		MaxIdle:        time.Duration(in.MaxIdle),
		Hedge:          in.Hedge,
		Learn:          in.Learn,
	}
	if in.Codes != nil {
		p.Codes = make([]codes.Code, len(in.Codes))
		for i, c := range in.Codes {
			p.Codes[i] = codes.Code(c)
		}
	}
	return nil
}

// MarshalJSON implements [json.Marshaler].
func (b Backoff) MarshalJSON() ([]byte, error) {
	return json.Marshal(backoffJSON{
		Base: jsonDuration(b.Base), Max: jsonDuration(b.Max),
		Multiplier: b.Multiplier, Jitter: b.Jitter, Spread: b.Spread,
	})
}

// UnmarshalJSON implements [json.Unmarshaler].
func (b *Backoff) UnmarshalJSON(data []byte) error {
	var in backoffJSON
	if err := strictUnmarshal(data, &in); err != nil {
		return fmt.Errorf("backoff: %w", err)
	}
	*b = Backoff{
		Base: time.Duration(in.Base), Max: time.Duration(in.Max),
		Multiplier: in.Multiplier, Jitter: in.Jitter, Spread: in.Spread,
	}
	return nil
}

type hedgeJSON struct {
	After      jsonDuration `json:"after,omitzero"`
	Quantile   float64      `json:"quantile,omitzero"`
	Max        int          `json:"max,omitzero"`
	Repeatable bool         `json:"repeatable,omitzero"`
}

// MarshalJSON implements [json.Marshaler].
func (h Hedge) MarshalJSON() ([]byte, error) {
	return json.Marshal(hedgeJSON{jsonDuration(h.After), h.Quantile, h.Max, h.Repeatable})
}

// UnmarshalJSON implements [json.Unmarshaler].
func (h *Hedge) UnmarshalJSON(data []byte) error {
	var in hedgeJSON
	if err := strictUnmarshal(data, &in); err != nil {
		return fmt.Errorf("hedge: %w", err)
	}
	*h = Hedge{time.Duration(in.After), in.Quantile, in.Max, in.Repeatable}
	return nil
}

type learnJSON struct {
	AttemptQuantile float64      `json:"attemptQuantile,omitzero"`
	AttemptFactor   float64      `json:"attemptFactor,omitzero"`
	AttemptFloor    jsonDuration `json:"attemptFloor,omitzero"`
	MinChance       float64      `json:"minChance,omitzero"`
	ShortenDeadline bool         `json:"shortenDeadline,omitzero"`
	MinSamples      int          `json:"minSamples,omitzero"`
}

// MarshalJSON implements [json.Marshaler].
func (l Learn) MarshalJSON() ([]byte, error) {
	return json.Marshal(learnJSON{
		l.AttemptQuantile, l.AttemptFactor, jsonDuration(l.AttemptFloor), l.MinChance, l.ShortenDeadline, l.MinSamples,
	})
}

// UnmarshalJSON implements [json.Unmarshaler].
func (l *Learn) UnmarshalJSON(data []byte) error {
	var in learnJSON
	if err := strictUnmarshal(data, &in); err != nil {
		return fmt.Errorf("learn: %w", err)
	}
	*l = Learn{
		in.AttemptQuantile, in.AttemptFactor, time.Duration(in.AttemptFloor), in.MinChance, in.ShortenDeadline, in.MinSamples,
	}
	return nil
}

func strictUnmarshal(data []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	if bad := (*json.UnmarshalTypeError)(nil); errors.As(err, &bad) && bad.Type == durationType {
		return fmt.Errorf(`%s: %s: want a duration like "50ms" or "unlimited"`, bad.Field, bad.Value)
	}
	return err
}

// jsonDuration is a duration in Go's notation, so that a person can read it.
type jsonDuration time.Duration

var durationType = reflect.TypeFor[jsonDuration]()

func (d jsonDuration) MarshalText() ([]byte, error) {
	if time.Duration(d) == Unlimited {
		return []byte("unlimited"), nil
	}
	return []byte(time.Duration(d).String()), nil
}

func (d *jsonDuration) UnmarshalText(text []byte) error {
	if string(text) == "unlimited" {
		*d = jsonDuration(Unlimited)
		return nil
	}
	v, err := time.ParseDuration(string(text))
	if err != nil {
		// Of all errors, encoding/json adds the name of the field to this type alone.
		return &json.UnmarshalTypeError{Value: strconv.Quote(string(text)), Type: durationType}
	}
	*d = jsonDuration(v)
	return nil
}

// jsonCode is a status code by its canonical name.
type jsonCode codes.Code

func (c jsonCode) MarshalText() ([]byte, error) {
	if codes.Code(c) > codes.Unauthenticated {
		return nil, fmt.Errorf("policy: Codes: %d is not one of gRPC's 17 codes", uint32(c))
	}
	return []byte(codeName(codes.Code(c))), nil
}

func (c *jsonCode) UnmarshalText(text []byte) error {
	for i, name := range codeNames {
		if name == string(text) {
			*c = jsonCode(i)
			return nil
		}
	}
	return fmt.Errorf("code %q is not one of gRPC's 17 codes", text)
}
