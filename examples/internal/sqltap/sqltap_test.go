package sqltap_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"modernc.org/sqlite"

	"github.com/belayrpc/belay/examples/internal/sqltap"
)

type nameKey struct{}

func TestWrap_HookSeesEveryOperationAndItsContext(t *testing.T) {
	c, err := sqlite.NewConnector("file:" + filepath.Join(t.TempDir(), "tap.db"))
	if err != nil {
		t.Fatal(err)
	}
	kinds := []string{"connect", "exec", "query", "begin", "commit", "rollback"}
	var seen []string
	db := sql.OpenDB(sqltap.Wrap(c, func(ctx context.Context, op sqltap.Op) func(error) {
		line := fmt.Sprintf("%s %v %s", kinds[op.Kind], ctx.Value(nameKey{}), op.Query)
		if (op.Conn == nil) != (op.Kind == sqltap.Connect) {
			t.Errorf("%s: the driver's connection is %v", line, op.Conn)
		}
		return func(err error) { seen = append(seen, fmt.Sprintf("%s: %t", line, err == nil)) }
	}))
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1)

	ctx := func(name string) context.Context { return context.WithValue(t.Context(), nameKey{}, name) }
	_, _ = db.ExecContext(ctx("a"), `CREATE TABLE t (n integer)`)
	_, _ = db.ExecContext(ctx("b"), `NONSENSE`)
	tx, err := db.BeginTx(ctx("c"), nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = tx.ExecContext(ctx("d"), `INSERT INTO t VALUES (1)`)
	_ = tx.Commit()
	if tx, err = db.BeginTx(ctx("e"), nil); err != nil {
		t.Fatal(err)
	}
	_ = tx.Rollback()
	var n int
	if err := db.QueryRowContext(ctx("f"), `SELECT n FROM t WHERE n = $1`, 1).Scan(&n); err != nil || n != 1 {
		t.Fatalf("n = %d, %v", n, err)
	}
	want := []string{
		"connect a : true", "exec a CREATE TABLE t (n integer): true", "exec b NONSENSE: false",
		"begin c : true", "exec d INSERT INTO t VALUES (1): true", "commit c : true",
		"begin e : true", "rollback e : true", "query f SELECT n FROM t WHERE n = $1: true",
	}
	if diff := cmp.Diff(want, slices.Clip(seen)); diff != "" {
		t.Errorf("the hook saw (-want +got):\n%s", diff)
	}
}
