package idempotency

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
)

// outcomeFormat is the version that this package writes and the only one it
// reads.
const outcomeFormat = 1

// Metadata is response metadata: lower-case keys and their values in order. It
// converts to and from grpc's metadata.MD.
type Metadata map[string][]string

// reply is the content of an outcome: what every caller of one key is answered.
// It is immutable once made; every caller decodes the response for itself, so
// that no caller's interceptor can edit another's answer.
type reply struct {
	code        code.Code
	status      []byte // google.rpc.Status, for a code other than OK
	response    []byte
	hasResponse bool
	typeName    protoreflect.FullName
	header      Metadata
	trailer     Metadata
	tombstone   bool
	completed   time.Time
	epoch       uint64
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksumField is Outcome.checksum's number; with its tag the field takes 5
// bytes, the last of a record.
const (
	checksumField = 15
	checksumSize  = 5
)

// NewOutcome returns the outcome that Resolve records when a person has found
// out how a call ended: with response and a nil status for OK, or with the
// status that every later call with the key is to be answered. It is not sealed.
func NewOutcome(response proto.Message, status *spb.Status) (*Outcome, error) {
	r, err := newReply(Result{Response: response, Status: status}, nil)
	if err != nil {
		return nil, err
	}
	if status != nil && r.code != code.Code_OK && response != nil {
		return nil, errors.New("idempotency: NewOutcome: response is set: must be nil when status is an error")
	}
	r.completed = time.Now()
	o, err := r.encode(nil, ID{}, 0)
	if err != nil {
		return nil, err
	}
	return &o, nil
}

// newReply takes what a handler returned apart, keeping the metadata on the
// allow list.
func newReply(res Result, allowed []string) (*reply, error) {
	r := &reply{header: keep(res.Header, allowed), trailer: keep(res.Trailer, allowed)}
	if res.Status.GetCode() != 0 {
		r.code = code.Code(res.Status.GetCode())
		b, err := proto.Marshal(res.Status)
		if err != nil {
			return r, fmt.Errorf("idempotency: status cannot be encoded: %w", err)
		}
		r.status = b
		return r, nil
	}
	if res.Response == nil {
		return r, nil
	}
	m := res.Response.ProtoReflect()
	r.typeName = m.Descriptor().FullName()
	if !m.IsValid() { // a typed nil: as absent as an untyped one
		return r, nil
	}
	b, err := proto.Marshal(res.Response)
	if err != nil {
		return r, fmt.Errorf("idempotency: response cannot be encoded: %w", err)
	}
	r.response, r.hasResponse = b, true
	return r, nil
}

func keep(md Metadata, allowed []string) Metadata {
	var kept Metadata
	for _, name := range allowed {
		if values := md[name]; len(values) > 0 {
			if kept == nil {
				kept = make(Metadata)
			}
			kept[name] = slices.Clone(values)
		}
	}
	return kept
}

// size is what MaxReply limits.
func (r *reply) size() int {
	n := len(r.status) + len(r.response)
	for _, md := range []Metadata{r.header, r.trailer} {
		for name, values := range md {
			n += len(name)
			for _, v := range values {
				n += len(v)
			}
		}
	}
	return n
}

// buried returns the tombstone of r.
func (r *reply) buried() *reply {
	return &reply{code: r.code, tombstone: true, completed: r.completed, epoch: r.epoch, typeName: r.typeName}
}

// encode returns r as stores keep it. A maxSize of 0 means no limit.
func (r *reply) encode(sealer Sealer, id ID, maxSize int) (Outcome, error) {
	if maxSize > 0 && r.size() > maxSize {
		r = r.buried()
	}
	status, response, keyID, err := r.seal(sealer, id)
	if err != nil {
		return Outcome{}, err
	}
	data := r.appendRecord(make([]byte, 0, 96+len(status)+len(response)+len(r.typeName)), status, response, keyID)
	sum := crc32.Checksum(data, castagnoli)
	data = protowire.AppendTag(data, checksumField, protowire.Fixed32Type)
	data = protowire.AppendFixed32(data, sum)
	return Outcome{Data: data, Undo: r.code != code.Code_OK}, nil
}

// seal returns status and response as they are stored.
func (r *reply) seal(sealer Sealer, id ID) (status, response []byte, keyID string, err error) {
	status, response = r.status, r.response
	if sealer == nil {
		return status, response, "", nil
	}
	for _, field := range []*[]byte{&status, &response} {
		if len(*field) == 0 {
			continue
		}
		keyID, *field, err = sealer.Seal(*field, id)
		if err == nil && keyID == "" {
			err = errors.New("the Sealer returned an empty key id")
		}
		if err != nil {
			return nil, nil, "", fmt.Errorf("idempotency: outcome cannot be sealed: %w", err)
		}
	}
	return status, response, keyID, nil
}

// appendRecord writes a belay.v1.Outcome without its checksum. By hand, because
// this is on the path of every keyed call and the generated code needs a dozen
// allocations for the optional fields; decoding is left to that.
func (r *reply) appendRecord(b, status, response []byte, keyID string) []byte {
	b = appendVarintField(b, 1, outcomeFormat)
	b = appendVarintField(b, 2, uint64(r.code)) //nolint:gosec // sign extension is how int32 is encoded
	b = appendBytesField(b, 3, status)
	b = appendBytesField(b, 4, response)
	b = appendVarintField(b, 5, protowire.EncodeBool(r.hasResponse))
	b = appendBytesField(b, 6, r.typeName)
	b = appendMetadata(b, 7, r.header)
	b = appendMetadata(b, 8, r.trailer)
	b = appendVarintField(b, 9, protowire.EncodeBool(r.tombstone))

	var fixed [24]byte
	at := appendVarintField(fixed[:0], 1, uint64(r.completed.Unix())) //nolint:gosec // as above
	at = appendVarintField(at, 2, uint64(r.completed.Nanosecond()))   //nolint:gosec // never negative
	b = protowire.AppendTag(b, 10, protowire.BytesType)
	b = protowire.AppendBytes(b, at)

	b = appendVarintField(b, 11, r.epoch)
	return appendBytesField(b, 12, keyID)
}

// appendVarintField and appendBytesField leave zero values out.
func appendVarintField(b []byte, num protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, num, protowire.VarintType), v)
}

func appendBytesField[T ~string | ~[]byte](b []byte, num protowire.Number, v T) []byte {
	if len(v) == 0 {
		return b
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, num, protowire.BytesType), uint64(len(v)))
	return append(b, v...)
}

func appendMetadata(b []byte, num protowire.Number, md Metadata) []byte {
	for name, values := range md {
		entry := appendBytesField(nil, 1, name)
		for _, v := range values { // an empty value is a value
			entry = protowire.AppendBytes(protowire.AppendTag(entry, 2, protowire.BytesType), []byte(v))
		}
		b = appendBytesField(b, num, entry)
	}
	return b
}

// decodeReply reads an outcome. Every error means that the record is corrupt.
func decodeReply(o *Outcome, sealer Sealer, id ID) (*reply, error) {
	if o == nil {
		return nil, errors.New("idempotency: the record has no outcome")
	}
	rec, err := decodeRecord(o.Data)
	if err != nil {
		return nil, err
	}
	if keyID := rec.GetSealKeyId(); keyID != "" {
		if sealer == nil {
			return nil, fmt.Errorf("idempotency: the record is sealed with key %q and there is no Sealer", keyID)
		}
		for _, field := range []*[]byte{&rec.Status, &rec.Response} {
			if len(*field) == 0 {
				continue
			}
			if *field, err = sealer.Open(keyID, *field, id); err != nil {
				return nil, fmt.Errorf("idempotency: the record cannot be opened: %w", err)
			}
		}
	}
	return &reply{
		code:        code.Code(rec.GetCode()),
		status:      rec.GetStatus(),
		response:    rec.GetResponse(),
		hasResponse: rec.GetHasResponse(),
		typeName:    protoreflect.FullName(rec.GetResponseType()),
		header:      loadedMetadata(rec.GetHeader()),
		trailer:     loadedMetadata(rec.GetTrailer()),
		tombstone:   rec.GetTombstone(),
		completed:   rec.GetCompleted().AsTime(),
		epoch:       rec.GetEpoch(),
	}, nil
}

func decodeRecord(data []byte) (*belayv1.Outcome, error) {
	n := len(data) - checksumSize
	if n < 0 || data[n] != checksumField<<3|byte(protowire.Fixed32Type) {
		return nil, errors.New("idempotency: the record has no checksum")
	}
	if sum := binary.LittleEndian.Uint32(data[n+1:]); sum != crc32.Checksum(data[:n], castagnoli) {
		return nil, errors.New("idempotency: the record's checksum is wrong")
	}
	rec := &belayv1.Outcome{}
	if err := proto.Unmarshal(data, rec); err != nil {
		return nil, fmt.Errorf("idempotency: the record cannot be decoded: %w", err)
	}
	if rec.GetFormat() != outcomeFormat {
		return nil, fmt.Errorf("idempotency: the record has format %d: this binary reads %d", rec.GetFormat(), outcomeFormat)
	}
	return rec, nil
}

func loadedMetadata(list []*belayv1.Metadata) Metadata {
	if len(list) == 0 {
		return nil
	}
	md := make(Metadata, len(list))
	for _, entry := range list {
		md[entry.GetKey()] = append(md[entry.GetKey()], entry.GetValues()...)
	}
	return md
}

// decodeStatus returns a new copy of the stored status.
func (r *reply) decodeStatus() (*spb.Status, error) {
	st := &spb.Status{}
	if err := proto.Unmarshal(r.status, st); err != nil {
		return nil, fmt.Errorf("idempotency: the stored status cannot be decoded: %w", err)
	}
	if st.GetCode() != int32(r.code) {
		return nil, fmt.Errorf("idempotency: the stored status has code %d and the record %d", st.GetCode(), r.code)
	}
	return st, nil
}

// decodeResponse returns a new copy of the stored response, nil when there was
// none. newResponse is the method's own response type; without it the type is
// looked up among those linked into the program.
func (r *reply) decodeResponse(newResponse func() proto.Message) (proto.Message, error) {
	if !r.hasResponse {
		return nil, nil //nolint:nilnil // "no response" is a valid answer and is what the handler gave
	}
	var msg proto.Message
	if newResponse != nil {
		msg = newResponse()
	} else {
		mt, err := protoregistry.GlobalTypes.FindMessageByName(r.typeName)
		if err != nil {
			return nil, fmt.Errorf("idempotency: the stored response has type %s: %w", r.typeName, err)
		}
		msg = mt.New().Interface()
	}
	if name := msg.ProtoReflect().Descriptor().FullName(); name != r.typeName {
		return nil, fmt.Errorf("idempotency: the stored response has type %s: the method returns %s", r.typeName, name)
	}
	if err := proto.Unmarshal(r.response, msg); err != nil {
		return nil, fmt.Errorf("idempotency: the stored response cannot be decoded: %w", err)
	}
	return msg, nil
}
