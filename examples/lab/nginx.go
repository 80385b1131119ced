package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// nginxBinary returns an nginx: the one in PATH, or Debian's package, unpacked
// into the user's cache and not installed.
func nginxBinary(ctx context.Context) (string, error) {
	if path, err := exec.LookPath("nginx"); err == nil {
		return path, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	home := filepath.Join(cache, "belay", "nginx")
	binary := filepath.Join(home, "usr", "sbin", "nginx")
	if _, err := os.Stat(binary); err == nil {
		return binary, nil
	}
	if err := unpackNginx(ctx, home); err != nil {
		return "", fmt.Errorf("there is no nginx in PATH, and Debian's package cannot be had: %w", err)
	}
	return binary, nil
}

// unpackNginx downloads the package and moves it into place in one step: several
// cells may be at it at the same time.
func unpackNginx(ctx context.Context, home string) error {
	if err := os.MkdirAll(filepath.Dir(home), 0o755); err != nil { //nolint:gosec // a cache holds no secrets
		return err
	}
	aside, err := os.MkdirTemp(filepath.Dir(home), "nginx-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(aside) //nolint:errcheck // of no use to anybody, wherever it is
	if err := command(ctx, aside, "apt-get", "download", "nginx"); err != nil {
		return err
	}
	packages, err := filepath.Glob(filepath.Join(aside, "*.deb"))
	if err != nil || len(packages) != 1 {
		return fmt.Errorf("apt-get left %d packages in %s, want one", len(packages), aside)
	}
	root := filepath.Join(aside, "root")
	if err := command(ctx, aside, "dpkg", "-x", packages[0], root); err != nil {
		return err
	}
	if err := os.Rename(root, home); err != nil {
		if _, there := os.Stat(filepath.Join(home, "usr", "sbin", "nginx")); there == nil {
			return nil // somebody was faster
		}
		return err
	}
	return nil
}

func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // the lab's own words
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// nginxConfig is a proxy of gRPC that fails one request in ten of its own
// accord. What it is to answer is put in; nothing listens anywhere else.
const nginxConfig = `daemon off;
worker_processes 1;
pid %[1]s/pid;
error_log %[1]s/error.log;
events { worker_connections 512; }
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	split_clients $request_id $fault { 10%% 1; * 0; }
	server {
		listen %[2]s http2;
		http2_max_requests 1000000;
		keepalive_requests 1000000;
		location / {
			%[3]s
			grpc_pass grpc://%[4]s;
		}
	}
}
`

// nginxAnswers is what the proxy does with the requests that it fails.
var nginxAnswers = map[string]string{
	"502":  `if ($fault) { return 502; }`,
	"503":  `if ($fault) { return 503; }`,
	"429":  `if ($fault) { add_header Retry-After 1 always; return 429; }`,
	"cut":  `if ($fault) { return 444; }`,
	"none": ``,
}

// startNginx puts a proxy before a server. The proxy ends with the world.
func (w *world) startNginx(answer, upstream string) (*node, error) {
	fault, known := nginxAnswers[answer]
	if !known {
		return nil, fmt.Errorf("nginx: answer %q: not known", answer)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.onClose(func() error { cancel(); return nil })
	binary, err := nginxBinary(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "belay-lab-nginx-*")
	if err != nil {
		return nil, err
	}
	w.onClose(func() error { return os.RemoveAll(dir) })
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, nginxConfig, dir, address, fault, upstream), 0o600); err != nil {
		return nil, err
	}
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, "-p", dir, "-c", config, "-e", filepath.Join(dir, "error.log")) //nolint:gosec // the binary found above
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // its workers end with it only if it is asked
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	w.onClose(func() error {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("nginx: %w", err)
		}
		return nil
	})
	n := &node{address: address, connect: func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}}
	return n, n.await(ended, &said)
}

// await waits until a server accepts connections.
func (n *node) await(ended <-chan error, said *bytes.Buffer) error {
	for range 200 {
		conn, err := n.connect(context.Background())
		if err == nil {
			return conn.Close()
		}
		select {
		case err := <-ended:
			return fmt.Errorf("nginx ended: %w\n%s", err, said.Bytes())
		default:
			time.Sleep(25 * time.Millisecond)
		}
	}
	return errors.New("nginx does not listen after 5 s")
}

// freeAddress is a port of loopback that nobody has now.
func freeAddress(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	address := l.Addr().String()
	return address, l.Close()
}
