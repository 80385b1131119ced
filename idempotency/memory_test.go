package idempotency_test

import (
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/storetest"
)

func newMemory(*testing.T) idempotency.Store {
	return idempotency.NewMemoryStore(idempotency.MemoryConfig{})
}

func TestMemoryStoreKeepsTheContract(t *testing.T) {
	storetest.Run(t, newMemory, storetest.FakeTime())
}

func TestMemoryStoreKeepsTheContractInRealTime(t *testing.T) {
	storetest.Run(t, newMemory, storetest.Lease(50*time.Millisecond))
}
