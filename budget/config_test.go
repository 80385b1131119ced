package budget_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/belayrpc/belay/budget"
)

func TestConfig_Validate(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, tt := range []struct {
		name   string
		config budget.Config
		want   []string // parts of the error; none: valid
	}{
		{"zero", budget.Config{}, nil},
		{"hedges", budget.Config{StartEmpty: true, Earn: 0.02}, nil},
		{"all set", budget.Config{Initial: 5, Earn: 1, Cap: 5, Window: time.Hour, MaxInFlight: 1}, nil},
		{"largest", budget.Config{Initial: 1e9, Earn: 1, Cap: 1e9, Window: math.MaxInt64, MaxInFlight: math.MaxInt}, nil},
		{"smallest", budget.Config{Initial: 1e-12, Earn: 1e-9, Cap: 1, Window: time.Millisecond}, nil},

		{"negative initial", budget.Config{Initial: -1}, []string{"Config.Initial is -1", "between 0 and"}},
		{"initial NaN", budget.Config{Initial: nan}, []string{"Config.Initial is NaN", "between 0 and"}},
		{"initial Inf", budget.Config{Initial: inf}, []string{"Config.Initial is +Inf", "between 0 and"}},
		{"negative earn", budget.Config{Earn: -0.1}, []string{"Config.Earn is -0.1", "between 1e-09 and 1"}},
		{"earn too small to count", budget.Config{Earn: 1e-10}, []string{"Config.Earn is 1e-10", "between 1e-09 and 1"}},
		{"earn above one", budget.Config{Earn: 1.5}, []string{"Config.Earn is 1.5", "between 1e-09 and 1"}},
		{"earn NaN", budget.Config{Earn: nan}, []string{"Config.Earn is NaN"}},
		{"negative cap", budget.Config{Cap: -4}, []string{"Config.Cap is -4", "between 1 and"}},
		{"cap NaN", budget.Config{Cap: nan}, []string{"Config.Cap is NaN"}},
		{"cap Inf", budget.Config{Cap: inf}, []string{"Config.Cap is +Inf"}},
		{"cap that never lends", budget.Config{Initial: 0.1, Cap: 0.5}, []string{"Config.Cap is 0.5", "between 1 and"}},
		{"cap below initial", budget.Config{Initial: 5, Cap: 4}, []string{"Config.Cap is 4", "at least Initial, which is 5"}},
		{"cap below the default initial", budget.Config{Cap: 2}, []string{"Config.Cap is 2", "at least Initial, which is 3"}},
		{"negative window", budget.Config{Window: -time.Second}, []string{"Config.Window is -1s", "at least 1ms"}},
		{"window too short", budget.Config{Window: time.Nanosecond}, []string{"Config.Window is 1ns", "at least 1ms"}},
		{"negative in flight", budget.Config{MaxInFlight: -1}, []string{"Config.MaxInFlight is -1", "or positive"}},
		{"all at once", budget.Config{Initial: -1, Earn: 2, MaxInFlight: -3}, []string{"Initial is -1", "Earn is 2", "MaxInFlight is -3"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.config.Validate()
			if len(tt.want) == 0 && err != nil {
				t.Fatalf("Validate() = %v, want nil", err)
			}
			for _, part := range tt.want {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Errorf("Validate() = %v, want it to say %q", err, part)
				}
			}
		})
	}
}

func TestNew_invalidConfigLendsNothing(t *testing.T) {
	config := budget.Config{Earn: math.NaN()}
	bank := budget.New(config)
	refusesEverything(t, bank)
	if err := bank.Err(); err == nil || err.Error() != config.Validate().Error() {
		t.Errorf("Err() = %v, want what Validate says: %v", err, config.Validate())
	}
}

func TestBudget_zeroValueLendsNothing(t *testing.T) {
	var bank budget.Budget
	refusesEverything(t, &bank)
	if err := bank.Err(); err == nil || !strings.Contains(err.Error(), "made with New") {
		t.Errorf("Err() = %v, want it to name New", err)
	}
}

func TestNew_validConfigHasNoError(t *testing.T) {
	if err := budget.New(budget.Config{}).Err(); err != nil {
		t.Errorf("Err() = %v, want nil", err)
	}
}

func refusesEverything(t *testing.T, bank *budget.Budget) {
	t.Helper()
	for range 1000 {
		bank.Deposit()
	}
	p, ok := bank.Withdraw()
	if ok {
		t.Error("Withdraw() gave a permit")
	}
	p.Refund()
	wantSnapshot(t, bank, budget.Snapshot{Deposits: 1000, Refused: 1})
}
