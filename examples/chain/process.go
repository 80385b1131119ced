package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

const (
	startLimit = 20 * time.Second // to be listening, on a busy machine
	stopLimit  = 5 * time.Second  // to end by itself, its spans sent
	stderrKept = 4 << 10
)

// process is one service of the chain, as its parent holds it. Its methods are
// called by one goroutine.
type process struct {
	role  string
	addr  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	acks  int // orders given so far

	listening chan string // one address
	acked     chan int
	ended     chan struct{} // closed when the process is gone and all its facts are read
	stderr    *tail
}

// startProcess runs this program again as a service and waits until it listens.
// Whatever it reports goes to keep.
func startProcess(role string, cfg config, keep func(fact)) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{
		role: role,
		cmd:  exec.Command(self, serveCommand, role), //nolint:gosec,noctx // this very program; it lives until its input ends
		// Both have room for what can come without anybody waiting for it.
		listening: make(chan string, 1),
		acked:     make(chan int, 1),
		ended:     make(chan struct{}),
		stderr:    &tail{keep: stderrKept},
	}
	p.cmd.Stderr = p.stderr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go p.read(stdout, keep)

	if err := json.NewEncoder(p.stdin).Encode(cfg); err != nil {
		p.kill()
		return nil, p.failed(err)
	}
	timer := time.NewTimer(startLimit)
	defer timer.Stop()
	select {
	case p.addr = <-p.listening:
		return p, nil
	case <-p.ended:
		return nil, p.failed(errors.New("ended before it served"))
	case <-timer.C:
		p.kill()
		return nil, p.failed(fmt.Errorf("does not serve after %v", startLimit))
	}
}

// read takes in facts until the process is gone.
func (p *process) read(stdout io.Reader, keep func(fact)) {
	defer close(p.ended)
	lines := json.NewDecoder(stdout)
	for {
		var f fact
		if err := lines.Decode(&f); err != nil {
			break // the end, or the half line of a process that was killed
		}
		switch {
		case f.Listening != "":
			p.listening <- f.Listening
		case f.Ack != 0:
			p.acked <- f.Ack
		default:
			keep(f)
		}
	}
	_, _ = io.Copy(io.Discard, stdout)
	_ = p.cmd.Wait() // how a service ends is of no interest, only that it did
}

// order sets the fault. When it returns, the fault is in force and everything
// that the process reported before is kept.
func (p *process) order(f fault) error { return p.give(order{Fault: f}) }

// give hands an order down and waits until it is acknowledged.
func (p *process) give(o order) error {
	p.acks++
	o.Ack = p.acks
	if err := json.NewEncoder(p.stdin).Encode(o); err != nil {
		return p.failed(err)
	}
	select {
	case <-p.acked:
		return nil
	case <-p.ended:
		return p.failed(errors.New("ended unasked"))
	}
}

// kill is kill -9, and returns when the process is gone.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error says that it is gone already
	<-p.ended
	_ = p.stdin.Close()
}

// stop lets the process end by itself, for as long as that takes a process that
// is well.
func (p *process) stop() {
	_ = p.stdin.Close()
	timer := time.NewTimer(stopLimit)
	defer timer.Stop()
	select {
	case <-p.ended:
	case <-timer.C:
		p.kill()
	}
}

func (p *process) failed(err error) error {
	return fmt.Errorf("service %s: %w%s", p.role, err, p.stderr)
}

// tail keeps the end of what is written to it.
type tail struct {
	keep int

	mu   sync.Mutex // guards text
	text []byte
}

// Write implements [io.Writer].
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if over := len(t.text) - t.keep; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(b), nil
}

// String returns what was kept, as the end of an error message.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.text) == 0 {
		return ""
	}
	return "; it said:\n" + string(t.text)
}
