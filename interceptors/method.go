package interceptors

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/interceptors/policy"
)

// method is what is known of one method under one set of policies: read from
// descriptors and rules once, then looked up.
type method struct {
	full     string // "/pkg.Service/Method"
	service  string // "pkg.Service"
	exempt   bool
	declared policy.Declared

	// above and below are the policy's layers over and under the matchers, the
	// most specific first. rules is all of them without the matchers.
	above, below []policy.Sourced
	rules        policy.Rules
	class        policy.Idempotency

	span spanNames

	// refused is the status of a call that the breaker refuses.
	refused func() *status.Status
}

// maxMethods bounds the table of methods. A generated client has far fewer; a
// proxy that passes on whatever name it is given must not fill the memory.
const maxMethods = 4096

// policySet is one generation of policies and the methods resolved under it.
type policySet struct {
	config  policyConfig
	methods sync.Map // full method → *method
	count   atomic.Int32

	// places are where most methods are found without the map, which costs a
	// call as much as its breaker. A place is the first method's that comes to it.
	places [64]atomic.Pointer[method]
}

func newPolicySet(cfg policyConfig) *policySet { return &policySet{config: cfg} }

// placeOf tells the methods of one service apart by their length and their end.
func (s *policySet) placeOf(full string) *atomic.Pointer[method] {
	n := len(full)
	if n == 0 {
		return &s.places[0]
	}
	return &s.places[(5*n+int(full[n-1])+3*int(full[n/2]))%len(s.places)]
}

func (s *policySet) method(full string) *method {
	place := s.placeOf(full)
	if m := place.Load(); m != nil && m.full == full {
		return m
	}
	m := s.find(full)
	place.CompareAndSwap(nil, m)
	return m
}

func (s *policySet) find(full string) *method {
	if m, ok := s.methods.Load(full); ok {
		return m.(*method) //nolint:forcetypeassert // the map holds nothing else
	}
	m := s.resolve(full)
	if s.count.Load() >= maxMethods {
		return m
	}
	actual, loaded := s.methods.LoadOrStore(full, m)
	if !loaded {
		s.count.Add(1)
	}
	return actual.(*method) //nolint:forcetypeassert // as above
}

func (s *policySet) resolve(full string) *method {
	m := &method{full: full, service: serviceOf(full), declared: policy.DeclaredFor(full)}
	m.exempt = exempt(m.service)
	m.above = policy.Layers(s.config.rules, full)
	m.below = []policy.Sourced{{Policy: s.config.everywhere, Source: "WithPolicy"}}
	layers := append(append([]policy.Sourced(nil), m.above...), m.below...)
	m.rules = policy.Compile(policy.Stack(layers))
	m.class = classOf(&m.rules, m.declared)
	m.span = newSpanNames(full)
	m.refused = sync.OnceValue(func() *status.Status { return breakerOpen(m.service) })
	return m
}

// classOf is the idempotency that a policy says, else the declared one.
func classOf(rules *policy.Rules, declared policy.Declared) policy.Idempotency {
	if rules.Idempotency != policy.Unspecified {
		return rules.Idempotency
	}
	return declared.Class
}

// rulesFor returns the rules of one call: the method's own, unless a matcher
// or an override of this call says something. They must be valid.
func (s *policySet) rulesFor(ctx context.Context, m *method, override *policy.Policy) *policy.Rules {
	if len(s.config.matchers) == 0 && override == nil {
		return &m.rules
	}
	var p policy.Policy
	if override != nil {
		p = *override
	}
	p = p.Over(policy.Stack(m.above))
	if len(s.config.matchers) > 0 {
		meta := middleware.NewClientCallMeta(m.full, nil, nil)
		for _, matcher := range s.config.matchers {
			if matcher.match.Match(ctx, meta) {
				p = p.Over(matcher.policy)
			}
		}
	}
	rules := policy.Compile(p.Over(policy.Stack(m.below)))
	return &rules
}

// breakerOpen is what a caller is told whose call the breaker refuses.
func breakerOpen(service string) *status.Status {
	st := status.New(codes.Unavailable, "circuit breaker is open for "+service)
	with, err := st.WithDetails(&errdetails.ErrorInfo{
		Reason: "BREAKER_OPEN", Domain: idempotency.ErrorDomain, Metadata: map[string]string{"service": service},
	})
	if err != nil {
		return st
	}
	return with
}

func serviceOf(full string) string {
	service, _, _ := strings.Cut(strings.TrimPrefix(full, "/"), "/")
	return service
}

// exempt names the services that speak about a server rather than through it.
// Probing a sick server must not be refused because it is sick.
func exempt(service string) bool {
	return service == "grpc.health.v1.Health" ||
		strings.HasPrefix(service, "grpc.reflection.") ||
		strings.HasPrefix(service, "grpc.channelz.")
}
