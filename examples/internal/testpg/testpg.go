package testpg

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
)

// Env names the environment variable that holds the connection string (a URL)
// of a server to use.
const Env = "BELAY_TEST_PG"

var shared struct {
	once   sync.Once
	url    string
	server *server
	err    error
	number atomic.Int64 // of databases
}

// Main runs the tests and stops the server that they started: call it from
// TestMain and pass its result to os.Exit.
func Main(m *testing.M) int {
	defer Stop()
	return m.Run()
}

// Stop ends the server, if one was started. Main calls it.
func Stop() {
	if shared.server != nil {
		shared.server.stop()
	}
}

// Database makes an empty database that lives as long as t, and returns its
// connection string.
func Database(t testing.TB) string {
	t.Helper()
	base := URL(t)
	name := fmt.Sprintf("belay_test_%d_%d", os.Getpid(), shared.number.Add(1))
	admin(t, base, "CREATE DATABASE "+name)
	if shared.server == nil {
		// Somebody else's server. Our own is thrown away whole, and a DROP makes it
		// flush everything first.
		t.Cleanup(func() { admin(t, base, "DROP DATABASE "+name+" WITH (FORCE)") })
	}
	u, err := url.Parse(base)
	if err != nil {
		t.Fatalf("testpg: %s is not a URL (postgres://user@host:port/database): %v", Env, err)
	}
	u.Path = "/" + name
	return u.String()
}

// URL is Start for tests.
func URL(t testing.TB) string {
	t.Helper()
	base, err := Start()
	if err != nil {
		t.Fatal(err)
	}
	return base
}

// Start returns the connection string of the server's own database, starting
// the server when this is the first call.
func Start() (string, error) {
	shared.once.Do(func() {
		if shared.url = os.Getenv(Env); shared.url != "" {
			return
		}
		if shared.server, shared.err = start(); shared.err != nil {
			shared.err = fmt.Errorf("testpg: %w", shared.err)
			return
		}
		shared.url = shared.server.url
	})
	return shared.url, shared.err
}

func admin(t testing.TB, base, query string) {
	t.Helper()
	db, err := sql.Open("pgx", base)
	if err != nil {
		t.Fatalf("testpg: %v", err)
	}
	defer func() { _ = db.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := db.ExecContext(ctx, query); err != nil {
		t.Fatalf("testpg: %s: %v", query, err)
	}
}
