//go:build unix

package main

import (
	"bufio"
	"context"
	"database/sql"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/belayrpc/belay/examples/internal/testpg"
)

// commandEnv makes the test's own binary the program, so that the tests have real
// processes to kill.
const commandEnv = "PAYMENTS_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandEnv) != "" {
		main()
		return
	}
	code := testpg.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		_, _ = os.Stderr.WriteString(err.Error() + "\n")
		code = 1
	}
	os.Exit(code)
}

// patience is for processes on a busy machine.
const patience = 30 * time.Second

func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...) //nolint:noctx // the tests end it, each at its own moment
	cmd.Env = append(os.Environ(), commandEnv+"=1")
	return cmd
}

// world is a database, a server process on it and a client's folder.
type world struct {
	t      *testing.T
	dsn    string
	db     *sql.DB
	addr   string
	file   string
	server *exec.Cmd
}

// databases are the two that the service runs on.
var databases = map[string]func(*testing.T) string{
	"sqlite":     func(t *testing.T) string { t.Helper(); return filepath.Join(t.TempDir(), "payments.db") },
	"postgresql": func(t *testing.T) string { t.Helper(); return testpg.Database(t) },
}

func newWorld(t *testing.T, dsn string) *world {
	t.Helper()
	db, _, err := openDatabase(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := &world{t: t, dsn: dsn, db: db, file: filepath.Join(t.TempDir(), "pending.json"), addr: "127.0.0.1:0"}
	w.start()
	return w
}

// start starts the server, on the address that it had before, if any.
func (w *world) start() {
	w.t.Helper()
	cmd := command(w.t, "serve", "-db", w.dsn, "-listen", w.addr)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.server = cmd
	w.t.Cleanup(func() { w.kill(cmd) })
	line, err := bufio.NewReader(out).ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "serving on ")
	if !ok {
		w.t.Fatalf("the server said %q, %v", line, err)
	}
	w.addr = addr
}

// kill is kill -9, and returns when the process is gone. Twice is as good as once.
func (w *world) kill(cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait()
}

func (w *world) chargeArgs(cents int, order string) []string {
	return []string{
		"charge", "-server", w.addr, "-pending", w.file, "-timeout", patience.String(),
		"-account", "alice", "-cents", strconv.Itoa(cents), "-order", order,
	}
}

// charge runs the client to its end and returns what it printed.
func (w *world) charge(cents int, order string) string {
	w.t.Helper()
	out, err := command(w.t, w.chargeArgs(cents, order)...).CombinedOutput()
	if err != nil {
		w.t.Fatalf("charge %s: %v\n%s", order, err, out)
	}
	return string(out)
}

// pending reports whether the client has something under way.
func (w *world) pending() bool {
	_, err := os.Stat(w.file)
	return err == nil
}

func (w *world) number(query string, args ...any) int {
	w.t.Helper()
	var n int
	if err := w.db.QueryRowContext(w.t.Context(), query, args...).Scan(&n); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// wantBooks checks that every charge is there once, in full.
func (w *world) wantBooks(charges, cents int) {
	w.t.Helper()
	for query, want := range map[string]int{
		`SELECT count(*) FROM charges`:                                       charges,
		`SELECT count(DISTINCT order_name) FROM charges`:                     charges,
		`SELECT count(*) FROM outbox JOIN charges USING (charge_id)`:         charges,
		`SELECT count(*) FROM outbox`:                                        charges,
		`SELECT 100000 - balance_cents FROM accounts WHERE name = 'alice'`:   cents,
		`SELECT COALESCE(CAST(SUM(amount_cents) AS bigint), 0) FROM charges`: cents,
		`SELECT count(*) FROM belay_idempotency WHERE state NOT IN (2)`:      0,
	} {
		if got := w.number(query); got != want {
			w.t.Errorf("%s = %d, want %d", query, got, want)
		}
	}
}

func (w *world) eventually(what string, holds func() bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.t.Fatalf("not after %v: %s", patience, what)
		}
	}
}
