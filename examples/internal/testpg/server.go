package testpg

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// server is a running postmaster.
type server struct {
	url  string
	dir  string
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
}

// setupTime bounds all that precedes the server, a download of its packages
// included.
const setupTime = 10 * time.Minute

const startTries = 3 // a free port may be taken before the server has it

// settings keep the server small and its durability real: what the tests prove
// includes that.
var settings = []string{
	"listen_addresses=127.0.0.1",
	"unix_socket_directories=",
	"max_connections=200",
	"shared_buffers=32MB",
	"fsync=on",
	"synchronous_commit=on",
}

func start() (*server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), setupTime)
	defer cancel()
	programs, err := find(ctx)
	if err != nil {
		return nil, err
	}
	as, err := unprivileged()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "belay-testpg-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the server's data: %w", err)
	}
	if err := as.own(dir); err != nil {
		return nil, fmt.Errorf("give the data folder to the server's user: %w", err)
	}
	data := filepath.Join(dir, "data")
	initdb := programs.command(ctx, "initdb", "--pgdata="+data, "--username=belay", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
	as.apply(initdb)
	initdb.Dir = dir
	if out, err := initdb.CombinedOutput(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	for range startTries {
		var s *server
		if s, err = startOnce(ctx, programs, as, dir, data); err == nil {
			return s, nil
		}
	}
	_ = os.RemoveAll(dir)
	return nil, err
}

func startOnce(ctx context.Context, programs programs, as user, dir, data string) (*server, error) {
	port, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	args := []string{"-D", data, "-p", port}
	for _, s := range settings {
		args = append(args, "-c", s)
	}
	var log bytes.Buffer
	cmd := programs.command(context.WithoutCancel(ctx), "postgres", args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = &log, &log, dir
	as.apply(cmd)
	s := &server{
		url:  "postgres://belay@127.0.0.1:" + port + "/postgres?sslmode=disable",
		dir:  dir,
		cmd:  cmd,
		done: make(chan struct{}),
	}
	started := make(chan error)
	go func() {
		// The kernel ends the server when the thread that started it ends, so that
		// thread must stay, for as long as the server runs.
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in its log
		}
		close(s.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	if err := s.waitReady(ctx); err != nil {
		_ = cmd.Process.Kill()
		<-s.done
		return nil, fmt.Errorf("%w\n%s", err, log.String())
	}
	return s, nil
}

const readyTime = 60 * time.Second

func (s *server) waitReady(ctx context.Context) error {
	db, err := sql.Open("pgx", s.url)
	if err != nil {
		return fmt.Errorf("open %s: %w", s.url, err)
	}
	defer func() { _ = db.Close() }()
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if err = db.PingContext(ctx); err == nil {
			return nil
		}
		select {
		case <-s.done:
			return errors.New("postgres ended before it answered")
		case <-ctx.Done():
			return fmt.Errorf("postgres did not answer within %v: %w", readyTime, err)
		case <-tick.C:
		}
	}
}

// stop ends the server at once: its data is thrown away.
func (s *server) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGQUIT)
	timer := time.NewTimer(10 * time.Second)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C:
		_ = s.cmd.Process.Kill()
		<-s.done
	}
	_ = os.RemoveAll(s.dir)
}

func freePort(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer func() { _ = l.Close() }()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
