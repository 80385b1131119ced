package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"net"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"modernc.org/sqlite"

	"github.com/belayrpc/belay/examples/chaos/order"
	"github.com/belayrpc/belay/examples/internal/sqltap"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// poolSize is for one server.
const poolSize = 8

// openStore opens the database with p between it and database/sql.
func openStore(cfg order.Server, p *perpetrator) (*sqlstore.Store, error) {
	connector, dialect, err := connectorOf(cfg)
	if err != nil {
		return nil, err
	}
	mode := sqlstore.SameTransaction
	if cfg.Mode == "lease" {
		mode = sqlstore.Lease
	}
	db := sql.OpenDB(sqltap.Wrap(connector, p.hook))
	db.SetMaxOpenConns(poolSize)
	db.SetMaxIdleConns(poolSize)
	return sqlstore.New(db, sqlstore.Config{
		Dialect: dialect, Mode: mode, IdleTimeout: cfg.IdleTimeout, LockTimeout: cfg.LockTimeout,
	})
}

func connectorOf(cfg order.Server) (driver.Connector, sqlstore.Dialect, error) {
	switch cfg.Store {
	case "sqlite":
		c, err := sqlite.NewConnector(cfg.DSN)
		return c, sqlstore.SQLite, err
	case "postgresql":
		pgxConfig, err := pgx.ParseConfig(cfg.DSN)
		if err != nil {
			return nil, 0, err
		}
		pgxConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &wire{Conn: c}, nil
		}
		return stdlib.GetConnector(*pgxConfig), sqlstore.PostgreSQL, nil
	default:
		return nil, 0, fmt.Errorf("store is %q: must be postgresql or sqlite", cfg.Store)
	}
}
