package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// nowhere is a database that cannot be reached: New must not need it.
type nowhere struct{}

var errNowhere = errors.New("nowhere")

func (nowhere) Connect(context.Context) (driver.Conn, error) { return nil, errNowhere }

func (nowhere) Driver() driver.Driver { return nil }

func openNowhere(t *testing.T, pool int) *sql.DB {
	t.Helper()
	db := sql.OpenDB(nowhere{})
	db.SetMaxOpenConns(pool)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func TestNew_RefusesBadConfiguration(t *testing.T) {
	pg, lite := sqlstore.PostgreSQL, sqlstore.SQLite
	for name, tc := range map[string]struct {
		cfg  sqlstore.Config
		pool int
		want string
	}{
		"no dialect":       {sqlstore.Config{}, 0, "Config.Dialect is Dialect(0): must be PostgreSQL or SQLite"},
		"unknown dialect":  {sqlstore.Config{Dialect: 9}, 0, "Config.Dialect is Dialect(9)"},
		"unknown mode":     {sqlstore.Config{Dialect: pg, Mode: 7}, 0, "Config.Mode is Mode(7)"},
		"table, injection": {sqlstore.Config{Dialect: pg, Table: `x"; DROP TABLE y; --`}, 0, "Config.Table is "},
		"table, digit":     {sqlstore.Config{Dialect: pg, Table: "1x"}, 0, `Config.Table is "1x"`},
		"table, dots":      {sqlstore.Config{Dialect: pg, Table: "a.b.c"}, 0, `Config.Table is "a.b.c"`},
		"table, no name":   {sqlstore.Config{Dialect: pg, Table: "a."}, 0, `Config.Table is "a."`},
		"table, no schema": {sqlstore.Config{Dialect: pg, Table: ".a"}, 0, `Config.Table is ".a"`},
		"table, too long":  {sqlstore.Config{Dialect: pg, Table: strings.Repeat("x", 49)}, 0, "at most 48"},
		"table, schema":    {sqlstore.Config{Dialect: lite, Table: "main.x"}, 0, "must not name a schema on SQLite"},
		"negative turns":   {sqlstore.Config{Dialect: pg, MaxConcurrent: -1}, 0, "Config.MaxConcurrent is -1: must not be negative"},
		"two writers":      {sqlstore.Config{Dialect: lite, MaxConcurrent: 2}, 0, "Config.MaxConcurrent is 2: must be 0 or 1 on SQLite"},
		"lock timeout":     {sqlstore.Config{Dialect: pg, LockTimeout: -1}, 0, "Config.LockTimeout is -1ns: must not be negative"},
		"lock timeout, ns": {sqlstore.Config{Dialect: pg, LockTimeout: 5}, 0, "Config.LockTimeout is 5ns: must be at least 1ms"},
		"idle timeout":     {sqlstore.Config{Dialect: pg, IdleTimeout: -time.Second}, 0, "Config.IdleTimeout is -1s: must not be negative"},
		"idle timeout, ns": {sqlstore.Config{Dialect: pg, IdleTimeout: 5}, 0, "Config.IdleTimeout is 5ns: must be at least 1ms"},
		"isolation":        {sqlstore.Config{Dialect: pg, Isolation: sql.LevelSnapshot}, 0, "Config.Isolation is Snapshot"},
		"isolation, lite":  {sqlstore.Config{Dialect: lite, Isolation: sql.LevelReadCommitted}, 0, "Config.Isolation is Read Committed: must be Default or Serializable on SQLite"},
		"pool of one":      {sqlstore.Config{Dialect: pg}, 1, "pool of 1 connection"},
		"pool of one lite": {sqlstore.Config{Dialect: lite}, 1, "pool of 1 connection"},
		"more than half":   {sqlstore.Config{Dialect: pg, MaxConcurrent: 6}, 10, "Config.MaxConcurrent is 6: must be at most 5, half of db's pool of 10"},
	} {
		t.Run(name, func(t *testing.T) {
			if store, err := sqlstore.New(openNowhere(t, tc.pool), tc.cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("New returned %v, %v: want an error with %q", store, err, tc.want)
			}
		})
	}
	if store, err := sqlstore.New(nil, sqlstore.Config{Dialect: pg}); err == nil || !strings.Contains(err.Error(), "db is nil") {
		t.Errorf("New(nil) returned %v, %v: want an error about db", store, err)
	}
}

func TestNew_DoesNotNeedTheDatabase(t *testing.T) {
	for _, cfg := range []sqlstore.Config{
		{Dialect: sqlstore.PostgreSQL},
		{Dialect: sqlstore.PostgreSQL, Mode: sqlstore.Lease, Table: "app.records", MaxConcurrent: 5, Isolation: sql.LevelSerializable},
		{Dialect: sqlstore.SQLite, Isolation: sql.LevelSerializable, MaxConcurrent: 1},
	} {
		if _, err := sqlstore.New(openNowhere(t, 10), cfg); err != nil {
			t.Errorf("New(%+v): %v", cfg, err)
		}
	}
}

// The engine sends no renewals where the connection is the lease.
func TestTraits(t *testing.T) {
	for _, tc := range []struct {
		dialect sqlstore.Dialect
		mode    sqlstore.Mode
		noLease bool
	}{
		{sqlstore.PostgreSQL, sqlstore.DefaultMode, true},
		{sqlstore.PostgreSQL, sqlstore.Lease, false},
		{sqlstore.SQLite, sqlstore.DefaultMode, false},
		{sqlstore.SQLite, sqlstore.SameTransaction, true},
	} {
		store, err := sqlstore.New(openNowhere(t, 10), sqlstore.Config{Dialect: tc.dialect, Mode: tc.mode})
		if err != nil {
			t.Fatal(err)
		}
		if got := store.Traits().NoLease; got != tc.noLease {
			t.Errorf("%v %v: NoLease is %v: want %v", tc.dialect, tc.mode, got, tc.noLease)
		}
	}
}

// A database that is down is an error everywhere, and a panic nowhere.
func TestStore_DatabaseDown(t *testing.T) {
	for _, d := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.SQLite} {
		for _, m := range []sqlstore.Mode{sqlstore.SameTransaction, sqlstore.Lease} {
			store, err := sqlstore.New(openNowhere(t, 10), sqlstore.Config{Dialect: d, Mode: m})
			if err != nil {
				t.Fatal(err)
			}
			ctx := t.Context()
			_, sweepErr := store.Sweep(ctx, 1)
			_, _, beginErr := store.Begin(ctx, claim())
			for what, err := range map[string]error{
				"Migrate": store.Migrate(ctx),
				"Check":   store.Check(ctx),
				"Sweep":   sweepErr,
				"Begin":   beginErr,
				"Run": store.Run(ctx, func(ctx context.Context) error {
					_, err := store.Tx(ctx)
					return err
				}),
			} {
				if !errors.Is(err, errNowhere) {
					t.Errorf("%v %v: %s returned %v: want the driver's error in it", d, m, what, err)
				}
			}
		}
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		sqlstore.PostgreSQL.String():      "PostgreSQL",
		sqlstore.SQLite.String():          "SQLite",
		sqlstore.DefaultMode.String():     "DefaultMode",
		sqlstore.SameTransaction.String(): "SameTransaction",
		sqlstore.Lease.String():           "Lease",
		sqlstore.EventTxUnused.String():   "tx_unused",
		sqlstore.EventTxSevered.String():  "tx_severed",
		sqlstore.EventCommitLost.String(): "commit_lost",
		sqlstore.EventInDoubt.String():    "in_doubt",
		sqlstore.EventKind(77).String():   "EventKind(77)",
	} {
		if got != want {
			t.Errorf("a name is %q: want %q", got, want)
		}
	}
}
