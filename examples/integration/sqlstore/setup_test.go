package sqlstore_test

import (
	"context"
	"database/sql"
	"log"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/belayrpc/belay/examples/internal/testpg"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

func TestMain(m *testing.M) {
	code := testpg.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		_, _ = os.Stderr.WriteString(err.Error() + "\n")
		code = 1
	}
	os.Exit(code)
}

// kind is one of the four that a store can be.
type kind struct {
	name    string
	dialect sqlstore.Dialect
	mode    sqlstore.Mode
}

var kinds = []kind{
	{"postgresql_same", sqlstore.PostgreSQL, sqlstore.SameTransaction},
	{"postgresql_lease", sqlstore.PostgreSQL, sqlstore.Lease},
	{"sqlite_same", sqlstore.SQLite, sqlstore.SameTransaction},
	{"sqlite_lease", sqlstore.SQLite, sqlstore.Lease},
}

var (
	pgSame      = kinds[0]
	pgLease     = kinds[1]
	sqliteSame  = kinds[2]
	sqliteLease = kinds[3]
)

func (k kind) driver() string {
	if k.dialect == sqlstore.PostgreSQL {
		return "pgx"
	}
	return "sqlite"
}

// dsn names a new, empty database.
func (k kind) dsn(t *testing.T) string {
	t.Helper()
	if k.dialect == sqlstore.PostgreSQL {
		return testpg.Database(t)
	}
	return "file:" + filepath.Join(t.TempDir(), "test.db") +
		"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(2000)"
}

const poolSize = 16

func open(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(poolSize)
	db.SetMaxIdleConns(poolSize)
	t.Cleanup(func() {
		if n := db.Stats().InUse; n != 0 {
			t.Errorf("%d connections are still in use", n)
		}
		_ = db.Close()
	})
	return db
}

// newStore returns a store in db, migrated and checked.
func (k kind) newStore(t *testing.T, db *sql.DB, change ...func(*sqlstore.Config)) *sqlstore.Store {
	t.Helper()
	cfg := sqlstore.Config{Dialect: k.dialect, Mode: k.mode, Logger: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&cfg)
	}
	store, err := sqlstore.New(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	if err := store.Migrate(ctx); err != nil {
		t.Fatal(err)
	}
	if err := store.Check(ctx); err != nil && os.Getenv(testpg.Env) == "" {
		t.Fatal(err)
	}
	return store
}

// fresh returns a store in a database of its own, with the table of effects.
func (k kind) fresh(t *testing.T, change ...func(*sqlstore.Config)) (*sqlstore.Store, *sql.DB) {
	t.Helper()
	db := open(t, k.driver(), k.dsn(t))
	createEffects(t, db)
	return k.newStore(t, db, change...), db
}

// each runs a test on every kind of store.
func each(t *testing.T, test func(t *testing.T, k kind)) {
	t.Helper()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) { test(t, k) })
	}
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// exampleDatabase makes a database for an Example, which has no test to end it.
func exampleDatabase(name string) string {
	base, err := testpg.Start()
	if err != nil {
		log.Fatal(err)
	}
	db, err := sql.Open("pgx", base)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	for _, query := range []string{"DROP DATABASE IF EXISTS " + name + " WITH (FORCE)", "CREATE DATABASE " + name} {
		if _, err := db.ExecContext(context.Background(), query); err != nil {
			log.Fatal(err)
		}
	}
	u, err := url.Parse(base)
	if err != nil {
		log.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}
