package main

import (
	"errors"

	failsafebudget "github.com/failsafe-go/failsafe-go/budget"

	"github.com/belayrpc/belay/budget"
)

// The budget races. failsafe-go's is the one peer: grpc-go's throttle cannot be
// called from outside, and gobreaker and go-grpc-middleware have none. What
// stands against a deposit is its entry and exit of a call, which is what it
// does for a call that needs no retry.

func budgetRaces() []race {
	return []race{
		{what: "budget", name: "deposit", base: failsafe, contestants: []contestant{
			{belay, belayBank(budget.Config{}, deposit)},
			{failsafe, failsafeBank(failsafebudget.New, enterAndLeave)},
		}},
		{what: "budget", name: "withdraw-refund", base: failsafe, contestants: []contestant{
			{belay, belayBank(budget.Config{Initial: 64}, withdrawAndRefund)},
			{failsafe, failsafeBank(wideBudget, acquireAndRelease)},
		}},
		{what: "budget", name: "refusal", base: failsafe, contestants: []contestant{
			{belay, belayBank(budget.Config{StartEmpty: true}, beRefused)},
			{failsafe, failsafeBank(spentBudget, acquireInVain)},
		}},
	}
}

var (
	errRefused  = errors.New("a bank with a balance refused")
	errAdmitted = errors.New("an empty bank lent")
)

func belayBank(cfg budget.Config, loop func(*budget.Budget, int) error) func() (subject, error) {
	return func() (subject, error) {
		bank := budget.New(cfg)
		return subject{worker: func() worker { return func(n int) error { return loop(bank, n) } }}, bank.Err()
	}
}

func deposit(bank *budget.Budget, n int) error {
	for range n {
		bank.Deposit()
	}
	return nil
}

func withdrawAndRefund(bank *budget.Budget, n int) error {
	for range n {
		permit, ok := bank.Withdraw()
		if !ok {
			return errRefused
		}
		permit.Refund()
	}
	return nil
}

func beRefused(bank *budget.Budget, n int) error {
	for range n {
		if _, ok := bank.Withdraw(); ok {
			return errAdmitted
		}
	}
	return nil
}

// failsafePermits is what failsafe-go's policies call on a budget.
type failsafePermits interface {
	RecordExecution()
	ReleaseExecution()
	TryAcquirePermit() bool
	ReleasePermit()
}

func failsafeBank(open func() failsafebudget.Budget, loop func(failsafePermits, int) error) func() (subject, error) {
	return func() (subject, error) {
		bank, ok := open().(failsafePermits)
		if !ok {
			return subject{}, errors.New("failsafe-go's budget has no permits: look at its new version")
		}
		return subject{worker: func() worker { return func(n int) error { return loop(bank, n) } }}, nil
	}
}

// spentBudget never lends: two retries are out and nothing else runs.
func spentBudget() failsafebudget.Budget {
	b := failsafebudget.NewBuilder().WithMaxRate(0).WithMinConcurrency(2).Build()
	if bank, ok := b.(failsafePermits); ok {
		bank.TryAcquirePermit()
		bank.TryAcquirePermit()
	}
	return b
}

func enterAndLeave(bank failsafePermits, n int) error {
	for range n {
		bank.RecordExecution()
		bank.ReleaseExecution()
	}
	return nil
}

func acquireAndRelease(bank failsafePermits, n int) error {
	for range n {
		if !bank.TryAcquirePermit() {
			return errRefused
		}
		bank.ReleasePermit()
	}
	return nil
}

func acquireInVain(bank failsafePermits, n int) error {
	for range n {
		if bank.TryAcquirePermit() {
			return errAdmitted
		}
	}
	return nil
}
