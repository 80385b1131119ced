// Package budget is the bank that keeps retries from multiplying.
//
// A call whose first attempt succeeds pays a small fraction of a retry in
// ([Budget.Deposit]). A retry takes a whole one out before it waits for its
// backoff ([Budget.Withdraw]) and gets it back if it works
// ([Permit.Refund]). So a retry that works is free, and a retry that fails
// ([Permit.Spend]) is paid for by calls that worked. Counting the permits that
// are still out, at every moment:
//
//	failed retries ≤ Initial + Earn × first-try successes
//
// In a total outage nothing succeeds, so the extra load ends when the bank is
// empty: 3 retries by default, however many calls arrive. There is no floor of
// so many retries a second, because such a floor lets a small client triple an
// outage, and nothing is forgotten with time except what exceeds the capacity.
//
// The capacity follows the traffic: the bank holds as much as the successes of
// the last Window earned, and never less than Initial. The same settings fit
// 0.1 and 10,000 calls a second.
//
// The package knows neither gRPC nor any other transport and starts no
// goroutine.
package budget
