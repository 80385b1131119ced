package interceptors_test

import (
	"math"
	"testing"

	"github.com/belayrpc/belay/interceptors"
)

// The rule holds for times whose sum does not fit.
func TestServerDeadlineWithHugeReserve(t *testing.T) {
	err := interceptors.DeadlineConfig{Reserve: math.MaxInt64, Floor: math.MaxInt64, Default: math.MaxInt64}.Validate()
	if err == nil {
		t.Error("a default that leaves a handler no time is accepted")
	}
}
