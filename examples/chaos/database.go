package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "modernc.org/sqlite"             // the driver "sqlite"

	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// database is where one cell's records and effects are.
type database struct {
	db    *sql.DB
	dsn   string // for the servers
	proxy *proxy // nil with SQLite, which has no wire
	close func()
}

// databases makes them.
type databases struct {
	dir    string // for SQLite's files
	pg     string // PostgreSQL's own database
	number atomic.Int64
}

// dropOneIn: see proxy.oneIn.
const dropOneIn = 400

func (d *databases) open(ctx context.Context, c cell) (*database, error) {
	base, dialect, err := d.make(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := prepare(ctx, base.db, dialect); err != nil {
		base.close()
		return nil, err
	}
	return base, nil
}

func (d *databases) make(ctx context.Context, c cell) (*database, sqlstore.Dialect, error) {
	number := d.number.Add(1)
	if c.store == sqlite {
		dir := filepath.Join(d.dir, fmt.Sprintf("cell-%d", number))
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, 0, err
		}
		dsn := "file:" + filepath.Join(dir, "chaos.db") + "?_pragma=busy_timeout(2000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"
		db, err := sql.Open("sqlite", dsn)
		if err != nil {
			return nil, 0, err
		}
		return &database{db: db, dsn: dsn, close: func() { _ = db.Close(); _ = os.RemoveAll(dir) }}, sqlstore.SQLite, nil
	}
	name := fmt.Sprintf("chaos_%d_%d", os.Getpid(), number)
	if err := d.admin(ctx, "CREATE DATABASE "+name); err != nil {
		return nil, 0, err
	}
	direct, err := url.Parse(d.pg)
	if err != nil {
		return nil, 0, err
	}
	direct.Path = "/" + name
	p, err := newProxy(direct.Host, dropOneIn)
	if err != nil {
		return nil, 0, err
	}
	proxied := *direct
	proxied.Host = p.addr()
	db, err := sql.Open("pgx", direct.String())
	if err != nil {
		p.close()
		return nil, 0, err
	}
	return &database{db: db, dsn: proxied.String(), proxy: p, close: func() {
		p.close()
		_ = db.Close()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_ = d.admin(ctx, "DROP DATABASE "+name+" WITH (FORCE)") // the server is thrown away, or somebody else's
	}}, sqlstore.PostgreSQL, nil
}

func (d *databases) admin(ctx context.Context, query string) error {
	db, err := sql.Open("pgx", d.pg)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	_, err = db.ExecContext(ctx, query)
	return err
}

// prepare makes the tables. Nothing in them keeps a second effect out: that is
// the store's work, and what is looked for.
func prepare(ctx context.Context, db *sql.DB, dialect sqlstore.Dialect) error {
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: dialect})
	if err != nil {
		return err
	}
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if err := store.Check(ctx); err != nil {
		return err
	}
	for _, table := range []string{"effects", "halves"} {
		if _, err := db.ExecContext(ctx, `CREATE TABLE `+table+` (call_key text NOT NULL, token text NOT NULL)`); err != nil {
			return err
		}
	}
	return nil
}

// settle waits until what dead servers left behind is gone: a backend rolls back
// when it notices that nobody is there any more.
func (d *database) settle(ctx context.Context) error {
	if d.proxy == nil {
		return nil
	}
	d.proxy.close()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var others int
		err := d.db.QueryRowContext(ctx, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle'`).Scan(&others)
		if err != nil || others == 0 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d backends still run: %w", others, ctx.Err())
		}
	}
}

// tokens reads a table of effects: by key, the tokens written for it.
func (d *database) tokens(ctx context.Context, table string) (map[string][]string, error) {
	rows, err := d.db.QueryContext(ctx, `SELECT call_key, token FROM `+table) //nolint:gosec // one of two words of ours
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	all := make(map[string][]string)
	for rows.Next() {
		var key, token string
		if err := rows.Scan(&key, &token); err != nil {
			return nil, err
		}
		all[key] = append(all[key], token)
	}
	return all, rows.Err()
}

// open counts the records that nobody has concluded.
func (d *database) openRecords(ctx context.Context) (n int, states string, err error) {
	rows, err := d.db.QueryContext(ctx, `SELECT state, count(*) FROM belay_idempotency WHERE state <> 2 GROUP BY state`)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = rows.Close() }()
	var parts []string
	for rows.Next() {
		var state, count int
		if err := rows.Scan(&state, &count); err != nil {
			return 0, "", err
		}
		n += count
		parts = append(parts, fmt.Sprintf("state %d: %d", state, count))
	}
	return n, strings.Join(parts, ", "), rows.Err()
}
