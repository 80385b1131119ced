// Package sqlstore keeps idempotency records in the database that the handlers
// write to, so that a call's record and its effect are committed together or
// not at all: at most one committed effect per key, through kill -9, failover
// and handlers that outlive their lease.
//
// A handler takes its transaction from the store and writes through it:
//
//	func (s *server) Charge(ctx context.Context, req *pb.ChargeRequest) (*pb.ChargeResponse, error) {
//		tx, err := s.store.Tx(ctx)
//		if err != nil {
//			return nil, err
//		}
//		_, err = tx.ExecContext(ctx, `INSERT INTO charges …`)
//		…
//	}
//
// It never commits: the server's dedupe half does, after the handler has
// returned. A [Tx] has no Commit and no Rollback, and is what sqlc generates as
// DBTX. The same handler runs under both modes, under a call that carries no key
// ([Store.Plain]) and outside gRPC ([Store.Run]).
//
// # Modes
//
// [SameTransaction], PostgreSQL's default: the first statement of the handler's
// transaction claims the key by inserting its row, and the last one writes the
// outcome into it. The row's uniqueness is the lock and the connection is the
// lease: a process that dies takes both with it. For short handlers.
//
//	BEGIN · INSERT record ON CONFLICT DO NOTHING · handler … · UPDATE record · COMMIT
//
// [Lease], SQLite's default: the claim is a statement of its own, the handler's
// transaction begins when it first asks for it and ends with a compare-and-set
// on the record. A handler slower than its lease may be overtaken; then one of
// the two commits, and the other is rolled back. For long handlers, handlers
// that call out, and databases with one writer.
//
//	INSERT record · … BEGIN · handler … · UPDATE record WHERE owner is still mine · COMMIT
//
// Either way a keyed success costs the handler's own statements plus two. On
// SQLite it is three: some failures there (a full disk, an interrupted
// statement) end the whole transaction and let the next statement commit by
// itself, so a savepoint, set when the transaction begins, must still be there
// when it ends.
//
// # What a handler must not do
//
//   - End the transaction in SQL (COMMIT, ROLLBACK). It is found out when the
//     handler returns; by then nobody knows what is committed, so the record
//     becomes UNKNOWN and [EventTxSevered] says so.
//   - Use a Tx, or a statement prepared on it, after it has returned.
//   - Have effects elsewhere that must happen once. Only what is written through
//     Tx is undone and committed with the record.
//
// A handler may use the *sql.DB beside its Tx: at most half of the pool is ever
// held by the store's transactions. On SQLite it may read that way; a write
// through the *sql.DB meets the write lock of the handler's own Tx and fails
// with SQLITE_BUSY when busy_timeout is over, which is why Check bounds that.
//
// # What the database must do
//
// PostgreSQL 13 or newer, or SQLite 3.37 or newer in a file; [Store.Check] says
// what is missing. Records are read from the same *sql.DB that writes them, which
// must be the primary. Any driver of database/sql will do: errors are told apart
// by their SQLSTATE (PostgreSQL) or result code (SQLite). PgBouncer in
// transaction mode is fine.
//
// On PostgreSQL in Lease mode, set idle_in_transaction_session_timeout for the
// role: it is what frees the rows that a host held which has vanished without a
// word. In SameTransaction mode the claim sets it.
package sqlstore
