package interceptors

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors/policy"
)

// prepareKey gives the call its one key, before the first attempt: the
// caller's, the request field's, or a new one. The caller's message is never
// written to; where the key belongs in a field, a copy is sent.
func (c *call) prepareKey() error {
	given := c.key != nil
	if c.class != policy.Keyed && !given {
		return nil
	}
	if !given {
		c.key = &idempotency.Key{}
	}
	if c.class == policy.Keyed {
		if c.channel.demoted.has(c.method.full) {
			// The key is still sent: a server that honours it again does no harm.
			c.class = policy.Undeclared
		}
	}
	if md, ok := metadata.FromOutgoingContext(c.ctx); ok && len(md[MetadataKey]) > 0 && !c.nested {
		return fmt.Errorf("the context's outgoing metadata has an %s; a key is given by WithKey, "+
			"since one in a context would leak into the next call", MetadataKey)
	}
	field, err := c.keyField()
	if err != nil {
		return err
	}
	if field != nil {
		if err := c.keyInField(field, given); err != nil {
			return err
		}
	}
	if c.key.Value == "" && !given {
		*c.key = idempotency.NewKey()
	}
	if c.key.FirstSent.IsZero() {
		c.key.FirstSent = c.first.start
	}
	return c.key.Validate()
}

// keyField returns the descriptor of the request field that carries the key;
// nil when metadata alone does.
func (c *call) keyField() (protoreflect.FieldDescriptor, error) {
	name := c.method.declared.KeyField
	if name == "" || c.stream != nil { // a stream's key travels in metadata
		return nil, nil //nolint:nilnil // no field is the ordinary case
	}
	m, ok := c.request.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("key_field %q: the request is a %T and not a protobuf message", name, c.request)
	}
	field := m.ProtoReflect().Descriptor().Fields().ByName(name)
	if field == nil || field.Kind() != protoreflect.StringKind || field.Cardinality() == protoreflect.Repeated {
		return nil, fmt.Errorf("key_field %q: %s has no singular string field of that name",
			name, m.ProtoReflect().Descriptor().FullName())
	}
	return field, nil
}

// keyInField makes the field and the call's key one.
func (c *call) keyInField(field protoreflect.FieldDescriptor, given bool) error {
	m := c.request.(proto.Message) //nolint:forcetypeassert // keyField has looked
	if value := m.ProtoReflect().Get(field).String(); value != "" {
		if given && c.key.Value != value {
			return errors.New("WithKey and the request field " + string(field.Name()) + " have different keys")
		}
		c.key.Value = value
		return nil
	}
	if !given {
		*c.key = idempotency.NewKey()
	}
	copied := proto.Clone(m)
	copied.ProtoReflect().Set(field, protoreflect.ValueOfString(c.key.Value))
	c.request = copied
	return nil
}

// checkPromise looks, on the first success of a keyed call, whether the server
// honoured the key. One that did not say so is not relied on: from now on the
// method counts as undeclared on this channel.
func (c *call) checkPromise(a *attempt) {
	if !a.finished() {
		return // an inner interceptor has answered, and no server was asked
	}
	said := a.trailer[MetadataStatus]
	if len(said) == 0 {
		said = a.header[MetadataStatus]
	}
	// A handler that passes downstream metadata on makes more than one of it.
	if len(said) > 0 && !slices.Contains(said, "ignored") {
		return
	}
	status := strings.Join(said, ",")
	if !c.channel.demoted.add(c.method.full) {
		return
	}
	c.client.config.logger.ErrorContext(c.ctx,
		"belay: the server does not honour idempotency keys of a method that is declared keyed; its calls are not repeated on this channel any more",
		"method", c.method.full, MetadataStatus, status)
	spanEvent(c.span, "demoted")
	c.client.config.observe(c.ctx, Event{Kind: EventDemoted, Method: c.method.full, Detail: status})
}

// stripHopScoped removes what only a hop itself may say.
func stripHopScoped(md metadata.MD) {
	for k := range md {
		if k == metadataAttempts || k == metadataPushback || len(k) > 6 && k[:6] == "belay-" {
			delete(md, k)
		}
	}
}
