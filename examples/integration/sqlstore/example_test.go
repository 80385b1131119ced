package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// A handler's code outside gRPC: Run commits what the function wrote when it
// returns nil. Under a server the same code runs inside a keyed call.
func ExampleStore_Run() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "accounts.db")+
		"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	if _, err := db.ExecContext(ctx, `CREATE TABLE accounts (name text PRIMARY KEY, balance integer NOT NULL)`); err != nil {
		log.Fatal(err)
	}

	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	if err := store.Check(ctx); err != nil {
		log.Fatal(err)
	}

	deposit := func(ctx context.Context, name string, amount int) error {
		tx, err := store.Tx(ctx)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO accounts (name, balance) VALUES ($1, $2)
			ON CONFLICT (name) DO UPDATE SET balance = balance + excluded.balance`, name, amount)
		return err
	}
	err = store.Run(ctx, func(ctx context.Context) error {
		if err := deposit(ctx, "ada", 70); err != nil {
			return err
		}
		return deposit(ctx, "ada", 30)
	})
	if err != nil {
		log.Fatal(err)
	}

	var balance int
	if err := db.QueryRowContext(ctx, `SELECT balance FROM accounts WHERE name = 'ada'`).Scan(&balance); err != nil {
		log.Fatal(err)
	}
	fmt.Println(balance)
	// Output: 100
}

// A service that uses pgx itself gives the store the same pool: handlers write
// through Tx, and read through pgx, with its types and batches.
//
// database/sql does not see a pgxpool's limit, so MaxConcurrent says how many of
// its connections the store may hold: half, for what handlers do beside Tx.
func ExampleNew_pgxpool() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, exampleDatabase("belay_example"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `CREATE TABLE payments (payee text, cents bigint)`); err != nil {
		log.Fatal(err)
	}

	db := stdlib.OpenDBFromPool(pool)
	defer func() { _ = db.Close() }()
	store, err := sqlstore.New(db, sqlstore.Config{
		Dialect:       sqlstore.PostgreSQL,
		MaxConcurrent: max(1, int(pool.Config().MaxConns)/2),
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}

	err = store.Run(ctx, func(ctx context.Context) error {
		tx, err := store.Tx(ctx)
		if err != nil {
			return err
		}
		for _, payee := range []string{"ada", "grace"} {
			if _, err := tx.ExecContext(ctx, `INSERT INTO payments (payee, cents) VALUES ($1, $2)`, payee, 1999); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}

	rows, err := pool.Query(ctx, `SELECT payee FROM payments ORDER BY payee`)
	if err != nil {
		log.Fatal(err)
	}
	payees, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(payees)
	// Output: [ada grace]
}
