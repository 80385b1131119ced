package main

import (
	"context"
	"time"
)

// patience is the deadline of every call that a user makes.
const patience = time.Second

// scenario is one way in which things go wrong.
type scenario struct {
	name  string
	story string // for the table

	// fault is in force from the onset on.
	fault fault

	// script does, from the onset on, what is more than a fault.
	script func(context.Context, *chain) error

	// spare: a second ledger is kept ready for the script.
	spare bool

	// leafless: nothing is left of the leaf to count its calls, so they are
	// counted where the last caller makes them.
	leafless bool

	// stretch makes the scenario longer than the others.
	stretch float64

	// settle is how long work may go on for which no user waits any more.
	settle time.Duration

	// drill makes it a scenario of streams: there are no users then, and of the
	// fields above only those that name and describe it and spare count.
	drill *streamDrill
}

var scenarios = []scenario{
	{
		name:  "healthy",
		story: "nothing is wrong",
	},
	{
		name:  "ledger-down",
		story: "the ledger is up and answers everything with UNAVAILABLE",
		fault: fault{Down: true},
		// A breaker judges the last ten seconds by their failures, and after
		// warmUp healthy seconds it takes four times as long until four calls in
		// five have failed. Only then begins what is to be seen of it.
		stretch: 1.5,
	},
	{
		name:     "ledger-killed",
		story:    "the ledger is gone: kill -9 (its calls are counted at payments)",
		script:   killLedger,
		leafless: true,
	},
	{
		name:  "blips-10",
		story: "the ledger fails one call in ten, at random",
		fault: fault{Fail: 0.1},
	},
	{
		name:  "reply-lost",
		story: "5 % of charges and appended lines are done and their reply is lost",
		fault: fault{Lose: 0.05},
	},
	{
		name:   "slow-leaf",
		story:  "the ledger takes longer than the user's deadline for one call in ten",
		fault:  fault{Slow: 0.1, SlowFor: patience * 3 / 2},
		settle: patience,
	},
	{
		name:   "restart",
		story:  "the ledger is killed by kill -9 after 2 s and another takes its port 250 ms later",
		script: restartLedger(2*time.Second, 250*time.Millisecond),
		spare:  true,
	},
	{
		// Streams are then at every point of theirs: before the first entry, between
		// two, and, until the ledger is back, not begun. It is killed late: on a busy
		// machine up to watchWaiting are cut before their first entry, and what it
		// costs to begin these again is earned by the streams before.
		name:  "server-stream",
		story: "the ledger is killed by kill -9 while it sends, and another takes its port 100 ms later",
		spare: true,
		drill: &streamDrill{
			drill:  drill{Kind: drillWatch, Streams: 240},
			stacks: streamStacks,
			script: restartLedger(3*time.Second, 100*time.Millisecond),
		},
	},
	{
		name:  "upload",
		story: "10 MiB go up to a ledger that answers every other upload with UNAVAILABLE at its start",
		drill: &streamDrill{
			drill:  drill{Kind: drillImport, Streams: 8},
			stacks: streamStacks,
			fault:  fault{Blip: true},
		},
	},
}

// restartLedger kills the ledger after a while, and has the spare one take its
// port when it was down for that long.
func restartLedger(after, down time.Duration) func(context.Context, *chain) error {
	return func(ctx context.Context, c *chain) error {
		if err := work(ctx, after); err != nil {
			return err
		}
		addr := c.kill(roleLedger)
		if err := work(ctx, down); err != nil {
			return err
		}
		return c.replaceLedger(addr)
	}
}

func killLedger(_ context.Context, c *chain) error {
	c.kill(roleLedger)
	return nil
}
