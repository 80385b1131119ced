package budget_test

import (
	"encoding/json"
	"fmt"

	"github.com/belayrpc/belay/budget"
)

// In an outage the bank of an idle client allows three retries, however many
// calls fail.
func Example() {
	bank := budget.New(budget.Config{})

	retries := 0
	for range 1000 { // calls whose first attempt failed
		permit, ok := bank.Withdraw()
		if !ok {
			continue // give the caller the error at once
		}
		// Wait for the backoff, try again; it fails again.
		retries++
		permit.Spend()
	}
	fmt.Println("retries:", retries)

	// Once the server is back, ten calls that work pay for one that does not.
	for range 10 {
		bank.Deposit()
	}
	_, ok := bank.Withdraw()
	fmt.Println("retry after ten successes:", ok)

	// Output:
	// retries: 3
	// retry after ten successes: true
}

// A retry that works costs nothing, so scattered failures are all retried.
func ExamplePermit_Refund() {
	bank := budget.New(budget.Config{})
	for range 1000 {
		permit, _ := bank.Withdraw()
		permit.Refund()
	}
	fmt.Println(bank.Snapshot().Balance)

	// Output:
	// 3
}

// A hedge is sent before anything has failed, so its bank begins empty and earns
// slowly.
func ExampleConfig_hedges() {
	bank := budget.New(budget.Config{StartEmpty: true, Earn: 0.02})
	_, ok := bank.Withdraw()
	fmt.Println("at the start:", ok)
	for range 50 {
		bank.Deposit()
	}
	_, ok = bank.Withdraw()
	fmt.Println("after 50 successes:", ok)

	// Output:
	// at the start: false
	// after 50 successes: true
}

func ExampleConfig_Validate() {
	fmt.Println(budget.Config{Earn: 1.5}.Validate())

	// Output:
	// budget: Config.Earn is 1.5: must be 0 (the default) or between 1e-09 and 1
}

func ExampleBudget_Snapshot() {
	bank := budget.New(budget.Config{})
	permit, _ := bank.Withdraw()
	permit.Spend()
	bank.Withdraw() // still out

	text, err := json.MarshalIndent(bank.Snapshot(), "", "  ")
	fmt.Println(string(text), err)

	// Output:
	// {
	//   "balance": 1,
	//   "cap": 3,
	//   "inFlight": 1,
	//   "deposits": 0,
	//   "withdrawals": 2,
	//   "refunds": 0,
	//   "spent": 1,
	//   "refused": 0
	// } <nil>
}
