package main

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "modernc.org/sqlite"             // the driver "sqlite"

	"github.com/belayrpc/belay/idempotency/sqlstore"
)

const poolSize = 16

// openDatabase opens PostgreSQL for a URL, else a file of SQLite's, and makes
// what is not there yet. The store keeps its records in the database that the
// handlers write to: that is what makes the two one transaction.
func openDatabase(ctx context.Context, dsn string) (*sql.DB, *sqlstore.Store, error) {
	driver, dialect := "sqlite", sqlstore.SQLite
	if strings.Contains(dsn, "://") {
		driver, dialect = "pgx", sqlstore.PostgreSQL
	} else {
		// FULL: what was answered survives a power cut. Check asks for it.
		dsn = "file:" + dsn + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return nil, nil, fmt.Errorf("open the database: %w", err)
	}
	db.SetMaxOpenConns(poolSize)
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: dialect})
	if err == nil {
		err = store.Migrate(ctx)
	}
	if err == nil {
		err = migrate(ctx, db)
	}
	if err != nil {
		_ = db.Close()
		return nil, nil, err
	}
	return db, store, nil
}

// schema suits both databases.
var schema = []string{
	`CREATE TABLE IF NOT EXISTS accounts (name text PRIMARY KEY, balance_cents bigint NOT NULL CHECK (balance_cents >= 0))`,
	`CREATE TABLE IF NOT EXISTS charges (charge_id text PRIMARY KEY, account text NOT NULL, order_name text NOT NULL, amount_cents bigint NOT NULL)`,
	// What others are to be told. Some relay reads it and deletes what it has
	// delivered; charge_id lets the receivers drop what comes twice.
	`CREATE TABLE IF NOT EXISTS outbox (charge_id text PRIMARY KEY, event text NOT NULL)`,
	// Somebody to charge.
	`INSERT INTO accounts (name, balance_cents) VALUES ('alice', 100000) ON CONFLICT DO NOTHING`,
}

func migrate(ctx context.Context, db *sql.DB) error {
	for _, query := range schema {
		if _, err := db.ExecContext(ctx, query); err != nil {
			return fmt.Errorf("%s: %w", query, err)
		}
	}
	return nil
}
