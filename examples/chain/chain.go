package main

import (
	"fmt"
	"sync"
)

// chain is four processes, one for each role.
type chain struct {
	stack         string
	countAtCaller bool
	keep          func(fact)

	processes map[string]*process
	spare     *process // takes the ledger's place; nil: none is kept
}

func startChain(stackName string, countAtCaller bool, keep func(fact)) (*chain, error) {
	c := &chain{stack: stackName, countAtCaller: countAtCaller, keep: keep, processes: map[string]*process{}}
	for _, role := range roles {
		if err := c.start(role); err != nil {
			c.stop()
			return nil, err
		}
	}
	return c, nil
}

// start starts the process of one role; those it calls are running.
func (c *chain) start(role string) (err error) {
	c.processes[role], err = c.newProcess(role)
	return err
}

func (c *chain) newProcess(role string) (*process, error) {
	peers := map[string]string{}
	for _, peer := range callees[role] {
		peers[peer] = c.processes[peer].addr
	}
	p, err := startProcess(role, config{Stack: c.stack, Peers: peers, CountAtCaller: c.countAtCaller}, c.keep)
	if err != nil {
		return nil, fmt.Errorf("stack %s: %w", c.stack, err)
	}
	return p, nil
}

// keepSpare starts a second ledger, which nobody calls yet. How long a process
// takes to start is the machine's affair; how long a ledger is gone is the
// scenario's.
func (c *chain) keepSpare() (err error) {
	c.spare, err = c.newProcess(roleLedger)
	return err
}

// replaceLedger has the spare one serve at the address of the one that is gone.
func (c *chain) replaceLedger(addr string) error {
	if err := c.spare.give(order{Listen: addr}); err != nil {
		return err
	}
	c.spare.addr = addr
	c.processes[roleLedger], c.spare = c.spare, nil
	return nil
}

// apply sets the fault in every process that is alive. Each acts on what
// concerns it. When it returns, everything reported before is kept.
func (c *chain) apply(f fault) error {
	for _, role := range roles {
		if p := c.processes[role]; p != nil {
			if err := p.order(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// kill is kill -9 on the process of a role. It returns the address that is now
// free.
func (c *chain) kill(role string) (addr string) {
	p := c.processes[role]
	p.kill()
	delete(c.processes, role)
	return p.addr
}

// stop ends all processes and returns when they are gone.
func (c *chain) stop() {
	var wg sync.WaitGroup
	for _, p := range c.processes {
		wg.Go(p.stop)
	}
	if c.spare != nil {
		wg.Go(c.spare.stop)
	}
	wg.Wait()
}
