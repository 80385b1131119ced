package interceptors

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/belayrpc/belay/interceptors/policy"
	"github.com/belayrpc/belay/proto/lint"
)

// checkTimeout bounds the questions that Check asks the stores.
const checkTimeout = 10 * time.Second

// Check verifies, after all services are registered and before the server
// serves, that what their .proto files promise can be kept: the options make
// sense, methods declared keyed have a store, no stream requires a key that
// cannot be honoured, and the stores are fit for it. Methods that no linked-in
// .proto describes promise nothing. The error names every method and rule.
func (s *Server) Check(services interface {
	GetServiceInfo() map[string]grpc.ServiceInfo
},
) error {
	if services == nil {
		return errors.New("interceptors: Check: the server is nil")
	}
	var errs []error
	info := services.GetServiceInfo()
	names := make([]string, 0, len(info))
	for name := range info {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, service := range names {
		if exempt(service) {
			continue
		}
		for _, m := range info[service].Methods {
			errs = append(errs, s.checkMethod("/"+service+"/"+m.Name)...)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
	defer cancel()
	for _, r := range s.stores {
		if err := r.engine.Check(ctx); err != nil {
			errs = append(errs, fmt.Errorf("store of %q: %w", r.pattern, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Server) checkMethod(full string) []error {
	d, err := policy.Find(full)
	if err != nil {
		return nil // what is not described promises nothing
	}
	var errs []error
	for _, p := range lint.Method(d) {
		errs = append(errs, fmt.Errorf("%s: %w", full, p))
	}
	m := s.keyedMethodOf(full)
	switch {
	case m.declared.Class != policy.Keyed:
	case d.IsStreamingServer() && m.declared.Required:
		errs = append(errs, fmt.Errorf("%s: key KEYING_REQUIRED on a method that streams responses: a stream of responses is not recorded, so the promise cannot be kept", full))
	case !m.honours():
		errs = append(errs, fmt.Errorf("%s: declared keyed, and the server has no store for it: give one with WithIdempotency", full))
	}
	return errs
}
