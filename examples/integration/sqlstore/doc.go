// Package sqlstore tests the SQL store on real databases: PostgreSQL through
// pgx, SQLite through modernc.org/sqlite.
package sqlstore
