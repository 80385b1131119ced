package sqlstore

import (
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"
)

// Dialect is the kind of database. There is no default.
type Dialect uint8

// The dialects.
const (
	// PostgreSQL 13 or newer.
	PostgreSQL Dialect = iota + 1
	// SQLite 3.37 or newer, in a file.
	SQLite
)

// String returns the product's name.
func (d Dialect) String() string {
	switch d {
	case PostgreSQL:
		return "PostgreSQL"
	case SQLite:
		return "SQLite"
	default:
		return fmt.Sprintf("Dialect(%d)", uint8(d))
	}
}

// Mode says how a record and the handler's writes come to be committed together.
// Processes in different modes may share one table, so a mode can be changed by
// a rolling deployment.
type Mode uint8

// The modes.
const (
	// DefaultMode is SameTransaction on PostgreSQL and Lease on SQLite.
	DefaultMode Mode = iota
	// SameTransaction claims the key inside the handler's own transaction, which
	// is open for as long as the handler runs.
	SameTransaction
	// Lease claims the key in a statement of its own and begins the handler's
	// transaction when the handler asks for it.
	Lease
)

// String returns the mode's name.
func (m Mode) String() string {
	switch m {
	case DefaultMode:
		return "DefaultMode"
	case SameTransaction:
		return "SameTransaction"
	case Lease:
		return "Lease"
	default:
		return fmt.Sprintf("Mode(%d)", uint8(m))
	}
}

// Defaults of Config.
const (
	DefaultTable       = "belay_idempotency"
	DefaultLockTimeout = 5 * time.Second
	DefaultIdleTimeout = 30 * time.Second

	// DefaultMaxConcurrent is Config.MaxConcurrent for a pool without a limit.
	DefaultMaxConcurrent = 64
)

// Config says where and how a Store keeps its records. Dialect must be set; the
// zero value of everything else is the default.
type Config struct {
	// Dialect of the database.
	Dialect Dialect

	// Mode, see the constants.
	Mode Mode

	// Table holds the records, by default DefaultTable: letters, digits and
	// underscores, on PostgreSQL with a schema before it if need be
	// ("app.belay_idempotency"), else the search_path finds it. The case is kept.
	// Migrate makes it, and Table + "_schema" beside it.
	Table string

	// MaxConcurrent bounds the transactions that the store holds open for
	// handlers. The next one waits, as long as its caller does and LockTimeout
	// lasts, and is then refused with idempotency.ErrBusy.
	//
	// Default: half of the pool (sql.DB.SetMaxOpenConns, called before New), so
	// that a handler which also uses the *sql.DB finds a connection; it cannot
	// be more. DefaultMaxConcurrent for a pool without a limit. On SQLite it is
	// 1: there is one writer, and waiting in this process is in turn, while
	// SQLite's own waiting is by chance.
	MaxConcurrent int

	// LockTimeout bounds the wait for another execution of the same key, for a
	// turn, and for SQLite's write lock. Default 5 s. On PostgreSQL it is also
	// the lock_timeout of a handler's transaction in SameTransaction mode, since
	// the claim sets it in the one statement it has.
	LockTimeout time.Duration

	// IdleTimeout is for how long a handler's transaction may wait for its next
	// statement before PostgreSQL ends it, in SameTransaction mode: so long does
	// a key stay taken when the process's host vanishes. It must therefore be
	// longer than a handler ever pauses between two statements. Default:
	// DefaultIdleTimeout, or the claim's lease where that is longer.
	IdleTimeout time.Duration

	// Isolation of the handlers' transactions. The default is READ COMMITTED in
	// Lease mode, and in SameTransaction mode what the connection has:
	// default_transaction_isolation, READ COMMITTED unless somebody has set it.
	// With sql.LevelRepeatableRead and sql.LevelSerializable the database may
	// refuse a commit, which the caller sees as idempotency.ErrConflict and may
	// repeat. A handler that sets the level of its session (SET SESSION
	// CHARACTERISTICS) sets it for who has the connection next, as with any pool;
	// a level that is given here is given to each transaction. PostgreSQL only:
	// SQLite's transactions are serializable.
	Isolation sql.IsolationLevel

	// RelaxedDurability lets Check pass where the database may forget its last
	// commits in a crash: PostgreSQL with fsync or synchronous_commit off,
	// SQLite with synchronous NORMAL or OFF. Record and effect are then forgotten
	// together, so no effect happens twice, but a caller may have been told OK
	// for an effect that is gone.
	RelaxedDurability bool

	// FailOnTxUnused makes Finish fail, with ErrTxUnused, a call that ended OK
	// without ever asking for its Tx: its effects, if any, went past the record.
	// It is for tests. Without it such a call is an event and a log line.
	FailOnTxUnused bool

	// OnEvent, when set, is told what no reply says. It is called without a lock
	// held, on the goroutine that ends the call, so it must be quick.
	OnEvent func(Event)

	// Logger gets a line for every event. Nil means slog.Default().
	Logger *slog.Logger
}

// Validate reports the first field that breaks its rule, with its value. What
// depends on the *sql.DB is checked by New.
func (c *Config) Validate() error {
	switch {
	case c.Dialect != PostgreSQL && c.Dialect != SQLite:
		return fmt.Errorf("sqlstore: Config.Dialect is %v: must be PostgreSQL or SQLite", c.Dialect)
	case c.Mode > Lease:
		return fmt.Errorf("sqlstore: Config.Mode is %v: must be DefaultMode, SameTransaction or Lease", c.Mode)
	case c.MaxConcurrent < 0:
		return fmt.Errorf("sqlstore: Config.MaxConcurrent is %d: must not be negative", c.MaxConcurrent)
	case c.Dialect == SQLite && c.MaxConcurrent > 1:
		return fmt.Errorf("sqlstore: Config.MaxConcurrent is %d: must be 0 or 1 on SQLite, which has one writer", c.MaxConcurrent)
	case c.LockTimeout < 0:
		return fmt.Errorf("sqlstore: Config.LockTimeout is %v: must not be negative", c.LockTimeout)
	case c.LockTimeout > 0 && c.LockTimeout < time.Millisecond:
		return fmt.Errorf("sqlstore: Config.LockTimeout is %v: must be at least 1ms, the database's own unit", c.LockTimeout)
	case c.IdleTimeout < 0:
		return fmt.Errorf("sqlstore: Config.IdleTimeout is %v: must not be negative", c.IdleTimeout)
	case c.IdleTimeout > 0 && c.IdleTimeout < time.Millisecond:
		return fmt.Errorf("sqlstore: Config.IdleTimeout is %v: must be at least 1ms, the database's own unit", c.IdleTimeout)
	}
	if err := c.validateIsolation(); err != nil {
		return err
	}
	_, err := parseTable(c.Table, c.Dialect)
	return err
}

func (c *Config) validateIsolation() error {
	if c.Dialect == SQLite {
		if c.Isolation != sql.LevelDefault && c.Isolation != sql.LevelSerializable {
			return fmt.Errorf("sqlstore: Config.Isolation is %v: must be Default or Serializable on SQLite, which has no other", c.Isolation)
		}
		return nil
	}
	switch c.Isolation {
	case sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable:
		return nil
	default:
		return fmt.Errorf("sqlstore: Config.Isolation is %v: must be Default, Read Committed, Repeatable Read or Serializable", c.Isolation)
	}
}

// withDefaults fills in every default that does not depend on the pool.
func (c *Config) withDefaults() Config {
	cfg := *c
	if cfg.Mode == DefaultMode {
		cfg.Mode = SameTransaction
		if cfg.Dialect == SQLite {
			cfg.Mode = Lease
		}
	}
	if cfg.Table == "" {
		cfg.Table = DefaultTable
	}
	if cfg.LockTimeout == 0 {
		cfg.LockTimeout = DefaultLockTimeout
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return cfg
}

// concurrency returns how many transactions the store may hold open, or what is
// wrong with the pool.
func (c *Config) concurrency(pool int) (int, error) {
	if pool == 1 {
		return 0, errors.New("sqlstore: db has a pool of 1 connection (SetMaxOpenConns): must be at least 2, " +
			"or a handler that uses db beside its Tx waits for itself")
	}
	switch {
	case c.Dialect == SQLite:
		return 1, nil
	case pool == 0 && c.MaxConcurrent == 0:
		return DefaultMaxConcurrent, nil
	case pool == 0:
		return c.MaxConcurrent, nil
	case c.MaxConcurrent > pool/2:
		return 0, fmt.Errorf("sqlstore: Config.MaxConcurrent is %d: must be at most %d, half of db's pool of %d connections (SetMaxOpenConns)",
			c.MaxConcurrent, pool/2, pool)
	case c.MaxConcurrent == 0:
		return pool / 2, nil
	default:
		return c.MaxConcurrent, nil
	}
}

// names are the SQL names that a Config's Table leads to, quoted.
type names struct {
	table, version           string
	indexExpires, indexOpen  string
	plainTable, plainVersion string // unquoted, for messages
}

// maxIdentifier leaves room for the suffixes within PostgreSQL's 63 bytes.
const maxIdentifier = 48

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func parseTable(table string, d Dialect) (names, error) {
	if table == "" {
		table = DefaultTable
	}
	schema, name, qualified := strings.Cut(table, ".")
	if !qualified {
		schema, name = "", table
	}
	if d == SQLite && qualified {
		return names{}, fmt.Errorf("sqlstore: Config.Table is %q: must not name a schema on SQLite", table)
	}
	for _, part := range []string{name, schema} {
		if part == "" && !qualified {
			continue
		}
		if !identifier.MatchString(part) || len(part) > maxIdentifier {
			return names{}, fmt.Errorf("sqlstore: Config.Table is %q: must be letters, digits and underscores, at most %d, "+
				"not starting with a digit, with at most one schema and a dot before it", table, maxIdentifier)
		}
	}
	prefix, plainPrefix := "", ""
	if qualified {
		prefix, plainPrefix = `"`+schema+`".`, schema+"."
	}
	return names{
		table:        prefix + `"` + name + `"`,
		version:      prefix + `"` + name + `_schema"`,
		indexExpires: `"` + name + `_expires"`,
		indexOpen:    `"` + name + `_open"`,
		plainTable:   plainPrefix + name,
		plainVersion: plainPrefix + name + "_schema",
	}, nil
}
