package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/belayrpc/belay/examples/chaos/order"
)

const fleetSize = 3

// fleet is the servers of a cell. One that dies is started again at once, on the
// same socket, which the parent holds: callers wait in its queue meanwhile.
type fleet struct {
	program string
	config  string
	orders  *orders
	sockets []*os.File
	addrs   []string

	mu       sync.Mutex // guards all below
	running  map[*exec.Cmd]struct{}
	closing  bool
	starts   map[string]int // handlers started, by key
	failures []error
	life     sync.WaitGroup
}

func startFleet(program string, cfg order.Server, o *orders) (*fleet, error) {
	config, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	f := &fleet{
		program: program, config: string(config), orders: o,
		running: make(map[*exec.Cmd]struct{}), starts: make(map[string]int),
	}
	for range fleetSize {
		if err := f.listen(); err != nil {
			f.close()
			return nil, err
		}
	}
	for _, socket := range f.sockets {
		f.life.Go(func() { f.keepAlive(socket) })
	}
	return f, nil
}

func (f *fleet) listen() error {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // the socket outlives every context here
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	socket, err := l.(*net.TCPListener).File() //nolint:forcetypeassert // it was asked for TCP
	if err != nil {
		return err
	}
	f.sockets = append(f.sockets, socket)
	f.addrs = append(f.addrs, l.Addr().String())
	return nil
}

// keepAlive runs one server after the other.
func (f *fleet) keepAlive(socket *os.File) {
	for {
		killed, err := f.runOne(socket)
		f.mu.Lock()
		closing := f.closing
		if !closing && err != nil {
			f.failures = append(f.failures, err)
		}
		f.mu.Unlock()
		if closing || !killed {
			return
		}
	}
}

// runOne runs a server to its end, and reports whether it was killed.
func (f *fleet) runOne(socket *os.File) (killed bool, err error) {
	report, reportEnd, err := os.Pipe()
	if err != nil {
		return false, err
	}
	defer func() { _ = report.Close() }()
	var stderr bytes.Buffer
	cmd := exec.Command(f.program, f.config) //nolint:gosec,noctx // built by this program; close ends it
	cmd.ExtraFiles = []*os.File{reportEnd, socket}
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe() // its end tells the server that we are gone
	if err != nil {
		return false, errors.Join(err, reportEnd.Close())
	}
	defer func() { _ = stdin.Close() }()
	ok, err := f.start(cmd)
	_ = reportEnd.Close() // the server has its own
	if err != nil || !ok {
		return false, err
	}
	f.listenTo(cmd, report)
	err = cmd.Wait()
	f.mu.Lock()
	delete(f.running, cmd)
	f.mu.Unlock()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
		return true, nil
	}
	return false, fmt.Errorf("a server ended by itself: %w\n%s", err, stderr.String())
}

// start starts a server, unless the fleet closes.
func (f *fleet) start(cmd *exec.Cmd) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing {
		return false, nil
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	f.running[cmd] = struct{}{}
	return true, nil
}

// listenTo takes in what a server tells, until it is gone.
func (f *fleet) listenTo(cmd *exec.Cmd, report *os.File) {
	lines := bufio.NewScanner(report)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "start":
			f.mu.Lock()
			f.starts[rest]++
			f.mu.Unlock()
			continue
		case "error":
			f.fail(errors.New("a server says: " + rest))
			continue
		}
		o, err := order.Parse(lines.Text())
		if err != nil {
			f.fail(err)
			continue
		}
		f.orders.done(o.Deed, o.Point)
		if o.Deed == order.Stop {
			time.AfterFunc(o.For, func() { _ = cmd.Process.Signal(syscall.SIGCONT) }) // an error says that it is gone
		}
	}
}

func (f *fleet) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failures = append(f.failures, err)
}

// failure is what should not have happened.
func (f *fleet) failure() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.failures...)
}

// repeats counts the handlers that were started for a key after the first.
func (f *fleet) repeats() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, starts := range f.starts {
		n += starts - 1
	}
	return n
}

// close kills all servers and returns when they are gone.
func (f *fleet) close() {
	f.mu.Lock()
	f.closing = true
	for cmd := range f.running {
		_ = cmd.Process.Kill() // an error says that it is gone
	}
	f.mu.Unlock()
	f.life.Wait()
	for _, s := range f.sockets {
		_ = s.Close()
	}
}
