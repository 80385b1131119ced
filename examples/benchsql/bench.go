package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/belayrpc/belay/examples/payments/paymentsv1"
	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/idempotency/sqlstore"
)

// The contestants.
const (
	plain      = "plain"
	control    = "plain-control" // the same once more
	belaySame  = "belay-same-transaction"
	belayLease = "belay-lease"
	belayPool  = "belay-same-transaction-pool-16"
)

var stacks = []string{plain, control, belaySame, belayLease, belayPool}

const (
	connections = 16   // that work at the same time
	accounts    = 1000 // so that it is not one row's lock that is measured
)

// bench is a database and the ways to call one handler on it.
type bench struct {
	db     *sql.DB // with as many connections as work
	double *sql.DB // with as many again, since the store leaves half of a pool to others
	calls  map[string]func(ctx context.Context) error
	schema string
}

func newBench(ctx context.Context, url string) (*bench, error) {
	db, err := open(url, connections)
	if err != nil {
		return nil, err
	}
	double, err := open(url, 2*connections)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	b := &bench{db: db, double: double, schema: fmt.Sprintf("benchsql_%d", os.Getpid())}
	if err := b.prepare(ctx); err != nil {
		return nil, errors.Join(err, b.close()) //nolint:contextcheck // it cleans up, also when ctx has ended
	}
	b.calls = map[string]func(context.Context) error{plain: b.callPlain, control: b.callPlain}
	for _, c := range []struct {
		name string
		db   *sql.DB
		mode sqlstore.Mode
	}{
		{belaySame, double, sqlstore.SameTransaction},
		{belayLease, double, sqlstore.Lease},
		{belayPool, db, sqlstore.SameTransaction},
	} {
		if b.calls[c.name], err = b.deduplicated(ctx, c.name, c.db, c.mode); err != nil {
			return nil, errors.Join(err, b.close()) //nolint:contextcheck // see above
		}
	}
	return b, nil
}

func open(url string, pool int) (*sql.DB, error) {
	db, err := sql.Open("pgx", url)
	if err == nil {
		db.SetMaxOpenConns(pool)
		db.SetMaxIdleConns(pool)
	}
	return db, err
}

// prepare makes tables in a schema of their own: the server may be somebody's.
func (b *bench) prepare(ctx context.Context) error {
	for _, query := range []string{
		`CREATE SCHEMA ` + b.schema,
		`CREATE TABLE ` + b.schema + `.accounts (id integer PRIMARY KEY, cents bigint NOT NULL) WITH (fillfactor = 50)`,
		`CREATE TABLE ` + b.schema + `.charges (id bigserial PRIMARY KEY, account integer NOT NULL, cents bigint NOT NULL)`,
		fmt.Sprintf(`INSERT INTO %s.accounts SELECT n, 0 FROM generate_series(0, %d) AS n`, b.schema, accounts-1),
	} {
		if _, err := b.db.ExecContext(ctx, query); err != nil {
			return fmt.Errorf("%s: %w", query, err)
		}
	}
	return nil
}

func (b *bench) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := b.db.ExecContext(ctx, `DROP SCHEMA IF EXISTS `+b.schema+` CASCADE`)
	return errors.Join(err, b.db.Close(), b.double.Close())
}

// handler is what everybody runs: an UPDATE and an INSERT.
func (b *bench) handler(ctx context.Context, tx sqlstore.Tx) error {
	account := rand.IntN(accounts) //nolint:gosec // spreads the locks
	if _, err := tx.ExecContext(ctx, `UPDATE `+b.schema+`.accounts SET cents = cents - 1 WHERE id = $1`, account); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO `+b.schema+`.charges (account, cents) VALUES ($1, 1)`, account)
	return err
}

// callPlain is the handler between BEGIN and COMMIT.
func (b *bench) callPlain(ctx context.Context) error {
	tx, err := b.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // without effect after a commit
	if err := b.handler(ctx, tx); err != nil {
		return err
	}
	return tx.Commit()
}

// deduplicated is the handler behind the store, called with a new key each time.
func (b *bench) deduplicated(ctx context.Context, name string, db *sql.DB, mode sqlstore.Mode) (func(context.Context) error, error) {
	store, err := sqlstore.New(db, sqlstore.Config{
		Dialect: sqlstore.PostgreSQL, Mode: mode, Table: b.schema + "." + strings.ReplaceAll(name, "-", "_"),
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(store.Migrate(ctx), store.Check(ctx)); err != nil {
		return nil, err
	}
	engine, err := idempotency.NewEngine(store, idempotency.Config{Scope: idempotency.SingleTenant})
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		reply := engine.Do(ctx, idempotency.Call{
			Method: paymentsv1.PaymentsService_Charge_FullMethodName, Key: idempotency.NewKey(),
			Request: &paymentsv1.ChargeRequest{Account: "alice", AmountCents: 1, Order: "o"},
		}, func(ctx context.Context) idempotency.Result {
			tx, err := store.Tx(ctx)
			if err == nil {
				err = b.handler(ctx, tx)
			}
			return idempotency.Result{Response: wrapperspb.Int64(1), Err: err}
		})
		switch {
		case reply.Refusal != nil:
			return reply.Refusal
		case reply.Mark != idempotency.MarkExecuted:
			return fmt.Errorf("a new key was %s", reply.Mark)
		default:
			return reply.Err
		}
	}, nil
}

// turns is how often the contestants take turns within a round: what else the
// machine does in the meantime then meets all of them.
const turns = 10

// race returns the calls that each contestant made in a second, by round.
func (b *bench) race(ctx context.Context, s settings, progress io.Writer) (map[string][]float64, error) {
	perSecond := make(map[string][]float64)
	for _, name := range stacks { // plans, connections and pages are there before it counts
		if _, err := b.measure(ctx, name, s.callers, s.perRun/turns); err != nil {
			return nil, err
		}
	}
	for round := range s.rounds {
		calls := make(map[string]float64)
		for range turns {
			order := slices.Clone(stacks)
			// What one leaves to the server to do (vacuum, write-ahead log) is done
			// while the next is measured: nobody always has the same one before it.
			rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] }) //nolint:gosec // an order, not a secret
			for _, name := range order {
				n, err := b.measure(ctx, name, s.callers, s.perRun/turns)
				if err != nil {
					return nil, err
				}
				calls[name] += n / turns
			}
		}
		for _, name := range stacks {
			perSecond[name] = append(perSecond[name], calls[name])
			_, _ = fmt.Fprintf(progress, "round %d of %d: %s %.0f a second\n", round+1, s.rounds, name, calls[name])
		}
	}
	return perSecond, nil
}

// measure makes calls for a while and returns how many a second.
func (b *bench) measure(ctx context.Context, name string, callers int, d time.Duration) (float64, error) {
	var (
		calls  atomic.Int64
		failed atomic.Pointer[error]
		all    sync.WaitGroup
		start  = time.Now()
	)
	for range callers {
		all.Go(func() {
			for time.Since(start) < d && failed.Load() == nil {
				if err := b.calls[name](ctx); err != nil {
					failed.CompareAndSwap(nil, &err)
					return
				}
				calls.Add(1)
			}
		})
	}
	all.Wait()
	took := time.Since(start)
	if err := failed.Load(); err != nil {
		return 0, fmt.Errorf("%s: %w", name, *err)
	}
	return float64(calls.Load()) / took.Seconds(), nil
}
