package idempotency

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	belayv1 "github.com/belayrpc/belay/proto/belay/v1"
)

const (
	anyName = protoreflect.FullName("google.protobuf.Any")

	// maxAnyDepth bounds how far packed messages are unpacked inside each other;
	// deeper ones are taken byte for byte. Every level is decoded once more, so
	// a hostile request must not choose the number of levels.
	maxAnyDepth = 16

	// maxNesting bounds how far messages are written inside each other; below
	// that many levels a message is stood for by its hash. Every level moves all
	// that is inside it, to sort map entries and to put lengths in front, so a
	// hostile request of 10,000 levels, which is what decoders let pass, would
	// cost that many times its size.
	maxNesting = 32

	// maxPlans bounds the cache of descriptors. Generated ones are finite; a
	// server that builds dynamic ones for every call would grow it for ever.
	maxPlans = 4096
)

// canonicalizer writes messages in canonical wire form: what a protobuf encoder
// might have written, with everything that encoders are free to choose decided.
// Known fields are re-encoded in the order of their numbers, map entries are
// sorted, unknown fields are merged in by number, and fields that the .proto
// marks not_identity are left out.
//
// proto.MarshalOptions.Deterministic is not this: it promises sameness for one
// binary only and keeps unknown fields in the order they arrived. Being a wire
// form, it reads the same from a binary that knows a field and from one that
// carries it as unknown, so a rollout does not refuse honest retries.
type canonicalizer struct {
	plans     sync.Map // protoreflect.MessageDescriptor → *plan
	planCount atomic.Int64
}

// depth is how deep inside a request something is.
type depth struct {
	any  int // packed messages around it
	nest int // messages around it, since the last that is stood for by its hash
}

func (d depth) packed() depth { return depth{any: d.any + 1, nest: d.nest} }
func (d depth) nested() depth { return depth{any: d.any, nest: d.nest + 1} }

// plan is what the encoding of one message type needs, worked out once.
type plan struct {
	fields     []protoreflect.FieldDescriptor // by number, without not_identity
	skipped    []protoreflect.FieldNumber     // not_identity
	extensible bool
	isAny      bool
}

func (c *canonicalizer) planOf(md protoreflect.MessageDescriptor) *plan {
	if p, ok := c.plans.Load(md); ok {
		return p.(*plan) //nolint:forcetypeassert // the map holds nothing else
	}
	p := newPlan(md)
	if c.planCount.Add(1) <= maxPlans {
		c.plans.Store(md, p)
	}
	return p
}

func newPlan(md protoreflect.MessageDescriptor) *plan {
	p := &plan{extensible: md.ExtensionRanges().Len() > 0, isAny: md.FullName() == anyName}
	fields := md.Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if notIdentity(fd) {
			p.skipped = append(p.skipped, fd.Number())
			continue
		}
		p.fields = append(p.fields, fd)
	}
	slices.SortFunc(p.fields, func(a, b protoreflect.FieldDescriptor) int { return cmp.Compare(a.Number(), b.Number()) })
	return p
}

// notIdentity reads (belay.v1.field).not_identity by reflection rather than
// with proto.GetExtension: a descriptor that was built at run time may hold the
// option as a dynamic message, on which GetExtension panics.
func notIdentity(fd protoreflect.FieldDescriptor) bool {
	opts := fd.Options()
	if opts == nil {
		return false
	}
	found := false
	opts.ProtoReflect().Range(func(opt protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if opt.FullName() != belayv1.E_Field.TypeDescriptor().FullName() || opt.Message() == nil || opt.IsList() {
			return true
		}
		flag := opt.Message().Fields().ByName("not_identity")
		found = flag != nil && flag.Kind() == protoreflect.BoolKind && v.Message().Get(flag).Bool()
		return false
	})
	return found
}

// appendMessage appends the canonical form of m, without a length.
func (c *canonicalizer) appendMessage(b []byte, m protoreflect.Message, at depth) []byte {
	p := c.planOf(m.Descriptor())
	if p.isAny {
		return c.appendAny(b, m, at)
	}
	unknown := m.GetUnknown()
	if len(unknown) > 0 || p.extensible {
		return c.appendMerged(b, m, p, unknown, at)
	}
	for _, fd := range p.fields {
		if m.Has(fd) {
			b = c.appendField(b, fd, m.Get(fd), at)
		}
	}
	return b
}

// appendNested appends a message that is a field of another.
func (c *canonicalizer) appendNested(b []byte, m protoreflect.Message, at depth) []byte {
	if at = at.nested(); at.nest < maxNesting {
		return c.appendMessage(b, m, at)
	}
	sum := sha256.Sum256(c.appendMessage(nil, m, depth{any: at.any}))
	return append(b, sum[:]...)
}

// chunk is the encoding of one field number, a span of a shared buffer.
type chunk struct {
	number protoreflect.FieldNumber
	start  int
	end    int
}

// appendMerged is appendMessage for a message with unknown fields or with
// extensions, whose numbers lie between those of the known fields.
func (c *canonicalizer) appendMerged(b []byte, m protoreflect.Message, p *plan, unknown []byte, at depth) []byte {
	base := len(b)
	var chunks []chunk
	add := func(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
		start := len(b)
		b = c.appendField(b, fd, v, at)
		chunks = append(chunks, chunk{fd.Number(), start, len(b)})
	}
	for _, fd := range p.fields {
		if m.Has(fd) {
			add(fd, m.Get(fd))
		}
	}
	if p.extensible {
		m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			if fd.IsExtension() && !notIdentity(fd) {
				add(fd, v)
			}
			return true
		})
	}
	b, chunks = appendUnknown(b, chunks, unknown, p.skipped)
	// Stable: a number that is both known and unknown (another wire type) keeps
	// the known one first, and unknown ones keep their order.
	slices.SortStableFunc(chunks, func(x, y chunk) int { return cmp.Compare(x.number, y.number) })
	return permute(b, base, chunks)
}

// permute brings the tail of b from base, which the chunks cover in whole, into
// the chunks' order.
func permute(b []byte, base int, chunks []chunk) []byte {
	end := len(b)
	for _, ch := range chunks {
		b = append(b, b[ch.start:ch.end]...)
	}
	n := copy(b[base:], b[end:])
	return b[:base+n]
}

// appendUnknown appends the unknown fields, each in its shortest encoding, and
// their chunks. Entries of one number that all look like map entries are
// sorted: Go's encoder writes the entries of a map that this binary does not
// know in a new order every time, and an honest retry must still match. What
// that costs is that the order of a list of unknown two-field messages is not
// compared.
func appendUnknown(b []byte, chunks []chunk, unknown []byte, skipped []protoreflect.FieldNumber) ([]byte, []chunk) {
	first := len(chunks)
	for len(unknown) > 0 {
		num, typ, n := protowire.ConsumeTag(unknown)
		if n < 0 {
			break
		}
		m := protowire.ConsumeFieldValue(num, typ, unknown[n:])
		if m < 0 {
			break
		}
		value := unknown[n : n+m]
		unknown = unknown[n+m:]
		if slices.Contains(skipped, num) {
			continue
		}
		start := len(b)
		b = protowire.AppendTag(b, num, typ)
		switch typ {
		case protowire.VarintType:
			v, _ := protowire.ConsumeVarint(value)
			b = protowire.AppendVarint(b, v)
		case protowire.BytesType:
			v, _ := protowire.ConsumeBytes(value)
			b = protowire.AppendBytes(b, v)
		default:
			b = append(b, value...)
		}
		chunks = append(chunks, chunk{num, start, len(b)})
	}
	if len(unknown) > 0 { // not valid wire format: a decoder does not let it pass
		chunks = append(chunks, chunk{math.MaxInt32, len(b), len(b) + len(unknown)})
		b = append(b, unknown...)
	}

	added := chunks[first:]
	slices.SortStableFunc(added, func(x, y chunk) int { return cmp.Compare(x.number, y.number) })
	for len(added) > 0 {
		n := 1
		for n < len(added) && added[n].number == added[0].number {
			n++
		}
		if n > 1 && allMapEntries(b, added[:n]) {
			sortChunks(b, added[:n])
		}
		added = added[n:]
	}
	return b, chunks
}

func sortChunks(b []byte, chunks []chunk) {
	slices.SortFunc(chunks, func(x, y chunk) int { return bytes.Compare(b[x.start:x.end], b[y.start:y.end]) })
}

func allMapEntries(b []byte, chunks []chunk) bool {
	for _, ch := range chunks {
		_, typ, n := protowire.ConsumeTag(b[ch.start:ch.end])
		if typ != protowire.BytesType {
			return false
		}
		entry, m := protowire.ConsumeBytes(b[ch.start+n : ch.end])
		if m < 0 || !isMapEntry(entry) {
			return false
		}
	}
	return true
}

// isMapEntry reports whether entry reads as a key (field 1) and a value (field
// 2), in this order, which is how every encoder writes a map entry.
func isMapEntry(entry []byte) bool {
	for want := protowire.Number(1); want <= 2; want++ {
		num, typ, n := protowire.ConsumeTag(entry)
		if n < 0 || num != want {
			return false
		}
		m := protowire.ConsumeFieldValue(num, typ, entry[n:])
		if m < 0 {
			return false
		}
		entry = entry[n+m:]
	}
	return len(entry) == 0
}

// appendAny writes an Any with its message in canonical form when the type is
// linked into this binary, and byte for byte when it is not.
func (c *canonicalizer) appendAny(b []byte, m protoreflect.Message, at depth) []byte {
	fields := m.Descriptor().Fields()
	urlField, valueField := fields.ByNumber(1), fields.ByNumber(2)
	if urlField == nil || valueField == nil || urlField.Kind() != protoreflect.StringKind || valueField.Kind() != protoreflect.BytesKind {
		return b
	}
	url, value := m.Get(urlField).String(), m.Get(valueField).Bytes()
	if url != "" {
		b = protowire.AppendTag(b, 1, protowire.BytesType)
		b = protowire.AppendString(b, url)
	}
	if inner := unpack(url, value, at.any); inner != nil {
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		start := len(b)
		b = c.appendMessage(b, inner, at.packed())
		b = prefixLength(b, start)
	} else if len(value) > 0 {
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		b = protowire.AppendBytes(b, value)
	}
	return append(b, m.GetUnknown()...)
}

// unpack returns the message in an Any, nil when it cannot be known.
func unpack(url string, value []byte, packed int) protoreflect.Message {
	if url == "" || packed >= maxAnyDepth {
		return nil
	}
	mt, err := protoregistry.GlobalTypes.FindMessageByURL(url)
	if err != nil {
		return nil
	}
	inner := mt.New()
	if err := (proto.UnmarshalOptions{AllowPartial: true}).Unmarshal(value, inner.Interface()); err != nil {
		return nil
	}
	return inner
}

// prefixLength turns the tail of b from start into a length-prefixed one.
func prefixLength(b []byte, start int) []byte {
	size := len(b) - start
	n := protowire.SizeVarint(uint64(size)) //nolint:gosec // a length is not negative
	var room [10]byte
	b = append(b, room[:n]...)
	copy(b[start+n:], b[start:start+size])
	protowire.AppendVarint(b[:start], uint64(size)) //nolint:gosec // as above; writes in place, the room is there
	return b
}

func (c *canonicalizer) appendField(b []byte, fd protoreflect.FieldDescriptor, v protoreflect.Value, at depth) []byte {
	switch {
	case fd.IsMap():
		return c.appendMap(b, fd, v.Map(), at)
	case fd.IsList():
		return c.appendList(b, fd, v.List(), at)
	default:
		return c.appendSingular(b, fd, v, at)
	}
}

func (c *canonicalizer) appendMap(b []byte, fd protoreflect.FieldDescriptor, m protoreflect.Map, at depth) []byte {
	base := len(b)
	var fixed [32]chunk
	entries := fixed[:0]
	key, value := fd.MapKey(), fd.MapValue()
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		start := len(b)
		b = protowire.AppendTag(b, fd.Number(), protowire.BytesType)
		body := len(b)
		b = c.appendSingular(b, key, k.Value(), at)
		b = c.appendSingular(b, value, v, at)
		b = prefixLength(b, body)
		entries = append(entries, chunk{fd.Number(), start, len(b)})
		return true
	})
	// By their bytes rather than by key: a binary that does not know the field
	// can do the same (appendUnknown).
	sortChunks(b, entries)
	return permute(b, base, entries)
}

func (c *canonicalizer) appendList(b []byte, fd protoreflect.FieldDescriptor, list protoreflect.List, at depth) []byte {
	if !fd.IsPacked() {
		for i := range list.Len() {
			b = c.appendSingular(b, fd, list.Get(i), at)
		}
		return b
	}
	b = protowire.AppendTag(b, fd.Number(), protowire.BytesType)
	start := len(b)
	for i := range list.Len() {
		b = appendScalar(b, fd.Kind(), list.Get(i))
	}
	return prefixLength(b, start)
}

func (c *canonicalizer) appendSingular(b []byte, fd protoreflect.FieldDescriptor, v protoreflect.Value, at depth) []byte {
	kind := fd.Kind()
	b = protowire.AppendTag(b, fd.Number(), wireTypes[kind])
	switch kind {
	case protoreflect.MessageKind:
		start := len(b)
		b = c.appendNested(b, v.Message(), at)
		return prefixLength(b, start)
	case protoreflect.GroupKind:
		b = c.appendNested(b, v.Message(), at)
		return protowire.AppendTag(b, fd.Number(), protowire.EndGroupType)
	default:
		return appendScalar(b, kind, v)
	}
}

var wireTypes = [...]protowire.Type{
	protoreflect.BoolKind:     protowire.VarintType,
	protoreflect.EnumKind:     protowire.VarintType,
	protoreflect.Int32Kind:    protowire.VarintType,
	protoreflect.Sint32Kind:   protowire.VarintType,
	protoreflect.Uint32Kind:   protowire.VarintType,
	protoreflect.Int64Kind:    protowire.VarintType,
	protoreflect.Sint64Kind:   protowire.VarintType,
	protoreflect.Uint64Kind:   protowire.VarintType,
	protoreflect.Sfixed32Kind: protowire.Fixed32Type,
	protoreflect.Fixed32Kind:  protowire.Fixed32Type,
	protoreflect.FloatKind:    protowire.Fixed32Type,
	protoreflect.Sfixed64Kind: protowire.Fixed64Type,
	protoreflect.Fixed64Kind:  protowire.Fixed64Type,
	protoreflect.DoubleKind:   protowire.Fixed64Type,
	protoreflect.StringKind:   protowire.BytesType,
	protoreflect.BytesKind:    protowire.BytesType,
	protoreflect.MessageKind:  protowire.BytesType,
	protoreflect.GroupKind:    protowire.StartGroupType,
}

//nolint:gosec // the conversions between widths and signs are the wire format
func appendScalar(b []byte, kind protoreflect.Kind, v protoreflect.Value) []byte {
	switch kind {
	case protoreflect.BoolKind:
		return protowire.AppendVarint(b, protowire.EncodeBool(v.Bool()))
	case protoreflect.EnumKind:
		return protowire.AppendVarint(b, uint64(v.Enum()))
	case protoreflect.Int32Kind, protoreflect.Int64Kind:
		return protowire.AppendVarint(b, uint64(v.Int()))
	case protoreflect.Sint32Kind, protoreflect.Sint64Kind:
		return protowire.AppendVarint(b, protowire.EncodeZigZag(v.Int()))
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		return protowire.AppendVarint(b, v.Uint())
	case protoreflect.Sfixed32Kind:
		return protowire.AppendFixed32(b, uint32(v.Int()))
	case protoreflect.Fixed32Kind:
		return protowire.AppendFixed32(b, uint32(v.Uint()))
	case protoreflect.Sfixed64Kind:
		return protowire.AppendFixed64(b, uint64(v.Int()))
	case protoreflect.Fixed64Kind:
		return protowire.AppendFixed64(b, v.Uint())
	case protoreflect.FloatKind:
		return protowire.AppendFixed32(b, floatBits(float32(v.Float())))
	case protoreflect.DoubleKind:
		return protowire.AppendFixed64(b, doubleBits(v.Float()))
	case protoreflect.StringKind:
		return protowire.AppendString(b, v.String())
	case protoreflect.BytesKind:
		return protowire.AppendBytes(b, v.Bytes())
	default: // messages and groups never come here
		return b
	}
}

// floatBits and doubleBits fold every NaN into one and keep −0 apart from 0.
func floatBits(f float32) uint32 {
	if math.IsNaN(float64(f)) {
		return 0x7fc00000
	}
	return math.Float32bits(f)
}

func doubleBits(f float64) uint64 {
	if math.IsNaN(f) {
		return 0x7ff8000000000000
	}
	return math.Float64bits(f)
}
