package idempotency_test

import (
	"strings"
	"testing"

	"github.com/belayrpc/belay/idempotency"
)

// A store that nobody made is a mistake of the program's start, and not an
// answer "no room" to every call.
func TestMemoryStoreThatNobodyMade(t *testing.T) {
	for name, store := range map[string]*idempotency.MemoryStore{"zero": {}, "nil": nil} {
		_, err := idempotency.NewEngine(store, idempotency.Config{Scope: idempotency.SingleTenant})
		if err == nil || !strings.Contains(err.Error(), "NewMemoryStore") {
			t.Errorf("%s: error %v, want one that names NewMemoryStore", name, err)
		}
	}
}
