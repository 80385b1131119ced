package policy_test

import (
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/belayrpc/belay/interceptors/policy"
)

// The same failure means different things for a method that may be repeated and
// for one of which nobody said so.
func ExampleDecide() {
	rules := policy.Compile(policy.Policy{})
	for _, class := range []policy.Idempotency{policy.Idempotent, policy.Undeclared} {
		d := policy.Decide(policy.Situation{
			Rules:       &rules,
			Class:       class,
			Code:        codes.Unavailable,
			Attempts:    1,
			Backoff:     40 * time.Millisecond,
			HasDeadline: true,
			Left:        2 * time.Second,
		})
		if d.Retry {
			fmt.Printf("%v: %v, retry after %v\n", class, d.Outcome, d.Delay)
		} else {
			fmt.Printf("%v: %v, stop: %v\n", class, d.Outcome, d.Stop)
		}
	}

	// Output:
	// idempotent: transient, retry after 40ms
	// undeclared: transient, stop: not_declared
}

// A policy in a configuration file. What it leaves out is inherited; what is
// misspelt or out of range is an error.
func ExamplePolicy() {
	var p policy.Policy
	err := json.Unmarshal([]byte(`{
		"timeout": "2s",
		"maxAttempts": 3,
		"backoff": {"base": "20ms", "jitter": "equal"},
		"codes": ["UNAVAILABLE", "ABORTED"]
	}`), &p)
	fmt.Println(p.Timeout, p.MaxAttempts, p.Backoff.Jitter, p.Codes, err)
	fmt.Println("inherited:", policy.Compile(p).MinAttempt)

	fmt.Println(json.Unmarshal([]byte(`{"timeout": "2 seconds"}`), &p))
	fmt.Println(policy.Policy{MaxAttempts: -1}.Validate())

	// Output:
	// 2s 3 equal [Unavailable Aborted] <nil>
	// inherited: 2ms
	// policy: timeout: "2 seconds": want a duration like "50ms" or "unlimited"
	// MaxAttempts: -1 must not be negative; 1 means no retry
}

// The curve of the waits, on the middle of each draw.
func ExampleBackoff() {
	b := policy.Backoff{Base: 100 * time.Millisecond, Max: time.Second, Jitter: policy.JitterFull}
	for n := range 6 {
		fmt.Println(b.Delay(n, 0, 0.5), "of", b.Delay(n, 0, 1))
	}

	// Output:
	// 50ms of 100ms
	// 100ms of 200ms
	// 200ms of 400ms
	// 400ms of 800ms
	// 500ms of 1s
	// 500ms of 1s
}
