package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Rule gives a Policy to the methods that a pattern names.
type Rule struct {
	// Pattern is "pkg.Service/Method", "pkg.Service/*" or "*".
	Pattern string

	// Policy applies to them. Between rules the more specific pattern wins,
	// field by field; between equal patterns the later rule.
	Policy Policy
}

// patternKind orders patterns from the least to the most specific.
type patternKind uint8

const (
	anyMethod patternKind = iota
	anyOfService
	oneMethod
)

// Validate returns an error that names the pattern, and what is wrong with it
// or with its Policy. A pattern must name a service and method that a .proto
// linked into this program has: a misspelt rule would silently not apply.
func (r Rule) Validate() error {
	kind, service, err := parsePattern(r.Pattern)
	switch {
	case err != nil:
		return err
	case kind == oneMethod:
		_, err = Find(r.Pattern)
	case kind == anyOfService:
		_, err = FindService(service)
	}
	if err != nil {
		return fmt.Errorf("rule %q: %w", r.Pattern, err)
	}
	if err := r.Policy.Validate(); err != nil {
		return fmt.Errorf("rule %q: %w", r.Pattern, err)
	}
	return nil
}

func parsePattern(pattern string) (kind patternKind, service string, err error) {
	if pattern == "*" {
		return anyMethod, "", nil
	}
	service, method, ok := strings.Cut(strings.TrimPrefix(pattern, "/"), "/")
	if !ok || service == "" || method == "" || strings.Contains(method, "/") || strings.Contains(service, "*") ||
		strings.Contains(method, "*") && method != "*" {
		return 0, "", fmt.Errorf(`rule %q: want "pkg.Service/Method", "pkg.Service/*" or "*"`, pattern)
	}
	if method == "*" {
		return anyOfService, service, nil
	}
	return oneMethod, service, nil
}

// matches reports whether the rule names the method, given as "pkg.Service/Method".
func (r Rule) matches(method string) (patternKind, bool) {
	kind, service, err := parsePattern(r.Pattern)
	if err != nil {
		return 0, false
	}
	switch kind {
	case anyMethod:
		return kind, true
	case anyOfService:
		return kind, strings.HasPrefix(method, service+"/")
	default:
		return kind, strings.TrimPrefix(r.Pattern, "/") == method
	}
}

// Sourced is a Policy and where it comes from, for people.
type Sourced struct {
	Policy Policy
	Source string
}

// Layers returns the policies that rules give to a method, the most specific
// first, each with its source.
func Layers(rules []Rule, fullMethod string) []Sourced {
	method := strings.TrimPrefix(fullMethod, "/")
	var layers []Sourced
	for kind := oneMethod; ; kind-- {
		for _, r := range slices.Backward(rules) { // the later of equal patterns wins
			if k, ok := r.matches(method); ok && k == kind {
				layers = append(layers, Sourced{r.Policy, fmt.Sprintf("WithRule(%q)", r.Pattern)})
			}
		}
		if kind == anyMethod {
			return layers
		}
	}
}

// Stack returns the one Policy that layers, the most specific first, make.
func Stack(layers []Sourced) Policy {
	var p Policy
	for _, l := range layers {
		p = p.Over(l.Policy)
	}
	return p
}

// ValidateAll returns all that is wrong with a list of rules.
func ValidateAll(rules []Rule) error {
	errs := make([]error, 0, len(rules))
	for _, r := range rules {
		errs = append(errs, r.Validate())
	}
	return errors.Join(errs...)
}
