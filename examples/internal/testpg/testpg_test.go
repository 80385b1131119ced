package testpg_test

import (
	"database/sql"
	"os"
	"testing"

	"github.com/belayrpc/belay/examples/internal/testpg"
)

func TestMain(m *testing.M) {
	os.Exit(testpg.Main(m))
}

func TestDatabase_IsEmptyAndOnesOwn(t *testing.T) {
	for range 2 {
		db, err := sql.Open("pgx", testpg.Database(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		if _, err := db.ExecContext(t.Context(), `CREATE TABLE mine (n integer)`); err != nil {
			t.Fatalf("the second database has the first one's table: %v", err)
		}
		var durable string
		if err := db.QueryRowContext(t.Context(), `SELECT current_setting('fsync')`).Scan(&durable); err != nil {
			t.Fatal(err)
		}
		if os.Getenv(testpg.Env) == "" && durable != "on" {
			t.Errorf("fsync = %s, want on", durable)
		}
	}
}
