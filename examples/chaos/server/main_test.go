package main

import (
	"database/sql"
	"database/sql/driver"
	"os"
	"testing"

	"github.com/belayrpc/belay/examples/chaos/order"
	"github.com/belayrpc/belay/examples/internal/testpg"
)

func TestMain(m *testing.M) {
	os.Exit(testpg.Main(m))
}

func orderFor(dsn string) order.Server { return order.Server{Store: "postgresql", DSN: dsn} }

func tapped(t *testing.T, c driver.Connector) *sql.DB {
	t.Helper()
	db := sql.OpenDB(c)
	t.Cleanup(func() { _ = db.Close() })
	return db
}
