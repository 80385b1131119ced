package budget_test

import (
	"testing"

	"github.com/belayrpc/belay/budget"
)

// The bars are 30 ns for a deposit and for withdraw + refund, and no more per
// operation in parallel than alone.

func BenchmarkDeposit(b *testing.B) {
	bank := budget.New(budget.Config{})
	for b.Loop() {
		bank.Deposit()
	}
}

func BenchmarkDeposit_parallel(b *testing.B) {
	bank := budget.New(budget.Config{})
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			bank.Deposit()
		}
	})
}

func BenchmarkWithdrawRefund(b *testing.B) {
	bank := budget.New(budget.Config{})
	for b.Loop() {
		p, _ := bank.Withdraw()
		p.Refund()
	}
}

func BenchmarkWithdrawRefund_parallel(b *testing.B) {
	bank := budget.New(budget.Config{})
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			p, _ := bank.Withdraw()
			p.Refund()
		}
	})
}

// A bank above its Initial must look at the clock before it lends: it may hold
// what traffic that has stopped long ago had earned.
func BenchmarkWithdrawRefund_full(b *testing.B) {
	bank := budget.New(budget.Config{Window: 1 << 62})
	for range 1000 {
		bank.Deposit()
	}
	for b.Loop() {
		p, _ := bank.Withdraw()
		p.Refund()
	}
}

func BenchmarkRefused(b *testing.B) {
	bank := budget.New(budget.Config{StartEmpty: true})
	for b.Loop() {
		bank.Withdraw()
	}
}
