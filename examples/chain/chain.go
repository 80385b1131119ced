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
}

func startChain(stackName string, countAtCaller bool, keep func(fact)) (*chain, error) {
	c := &chain{stack: stackName, countAtCaller: countAtCaller, keep: keep, processes: map[string]*process{}}
	for _, role := range roles {
		if err := c.start(role, "127.0.0.1:0"); err != nil {
			c.stop()
			return nil, err
		}
	}
	return c, nil
}

// start starts the process of one role; those it calls are running.
func (c *chain) start(role, listen string) error {
	peers := map[string]string{}
	for _, peer := range callees[role] {
		peers[peer] = c.processes[peer].addr
	}
	p, err := startProcess(role, config{
		Stack: c.stack, Listen: listen, Peers: peers, CountAtCaller: c.countAtCaller,
	}, c.keep)
	if err != nil {
		return fmt.Errorf("stack %s: %w", c.stack, err)
	}
	c.processes[role] = p
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
	wg.Wait()
}
