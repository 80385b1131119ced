package sqlstore_test

import (
	"time"

	"github.com/belayrpc/belay/idempotency"
)

func claim() idempotency.Claim {
	return idempotency.Claim{
		ID: idempotency.ID{1}, Owner: idempotency.Owner{1}, Fingerprint: "f", Lease: time.Second, Retention: time.Hour,
	}
}
