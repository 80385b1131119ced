package idempotency_test

import (
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency/storetest"
)

// The public failure cases B03, B17, B25, B31, B39 and B49 on the memory store;
// the names of the subtests begin with the case's id.

func TestCasesOnTheMemoryStore(t *testing.T) {
	storetest.Cases(t, newMemory, storetest.FakeTime())
}

func TestCasesOnTheMemoryStoreInRealTime(t *testing.T) {
	storetest.Cases(t, newMemory, storetest.Lease(200*time.Millisecond))
}
