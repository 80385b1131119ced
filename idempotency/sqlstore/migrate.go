package sqlstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// The schema's versions are the files' numbers. A file that has been released is
// never changed: the next version is the next file.
//
//go:embed schema/*/*.sql
var schemas embed.FS

// Migrate brings the schema to the version that this package wants: it makes the
// tables where there are none. It may run in every process at start, also in
// several at once, and needs the rights to create tables. To apply the schema by
// other means, see [Store.Schema].
func (s *Store) Migrate(ctx context.Context) error {
	steps, err := s.steps()
	if err != nil {
		return err
	}
	err = s.patiently(ctx, func() error {
		return s.dialect.migration(ctx, s.db, s.names.plainTable, func(tx Tx) error {
			return s.migrate(ctx, tx, steps)
		})
	})
	if err != nil {
		return fmt.Errorf("sqlstore: migrate %s: %w", s.names.plainTable, err)
	}
	return nil
}

// migrate runs the steps that the schema has not had. Nobody else migrates.
func (s *Store) migrate(ctx context.Context, tx Tx, steps [][]string) error {
	if _, err := tx.ExecContext(ctx, s.createVersion()); err != nil {
		return err
	}
	version, err := s.version(ctx, tx)
	if err != nil || version >= len(steps) {
		return err
	}
	queries := slices.Concat(steps[version:]...)
	queries = append(queries, `DELETE FROM `+s.names.version, s.insertVersion(len(steps)))
	for _, query := range queries {
		if _, err := tx.ExecContext(ctx, query); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) createVersion() string {
	return `CREATE TABLE IF NOT EXISTS ` + s.names.version + ` (version integer NOT NULL)`
}

func (s *Store) insertVersion(version int) string {
	return fmt.Sprintf(`INSERT INTO %s (version) VALUES (%d)`, s.names.version, version)
}

// Schema returns the statements that Migrate runs on an empty database, for
// those who apply them with a tool of their own.
func (s *Store) Schema() ([]string, error) {
	steps, err := s.steps()
	if err != nil {
		return nil, err
	}
	return slices.Concat([]string{s.createVersion()}, slices.Concat(steps...), []string{s.insertVersion(len(steps))}), nil
}

// steps are the statements of each version, in order.
func (s *Store) steps() ([][]string, error) {
	dir := path.Join("schema", strings.ToLower(s.cfg.Dialect.String()))
	files, err := fs.ReadDir(schemas, dir)
	if err != nil {
		return nil, fmt.Errorf("sqlstore: read the embedded schema: %w", err)
	}
	fill := strings.NewReplacer("{table}", s.names.table, "{index_expires}", s.names.indexExpires, "{index_open}", s.names.indexOpen)
	steps := make([][]string, 0, len(files))
	for _, file := range files { // ReadDir sorts
		text, err := schemas.ReadFile(path.Join(dir, file.Name()))
		if err != nil {
			return nil, fmt.Errorf("sqlstore: read the embedded schema: %w", err)
		}
		var step []string
		// One statement at a time: drivers that prepare take no more.
		for query := range strings.SplitSeq(fill.Replace(string(text)), ";\n") {
			if query = strings.TrimSpace(query); query != "" {
				step = append(step, query)
			}
		}
		steps = append(steps, step)
	}
	return steps, nil
}

// version returns the schema's version, 0 when it is empty.
func (s *Store) version(ctx context.Context, q querier) (int, error) {
	var version int
	err := q.QueryRowContext(ctx, `SELECT version FROM `+s.names.version).Scan(&version)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	return version, err
}

// Check verifies what the store relies on and says what is wrong by name: the
// schema and its version, that the server is recent enough, a primary and
// durable, SQLite's file, journal, synchronous and busy_timeout, and that the
// pool is still as large as New found it.
func (s *Store) Check(ctx context.Context) error {
	turns, err := s.cfg.concurrency(s.db.Stats().MaxOpenConnections)
	if err != nil {
		return err
	}
	if turns < cap(s.turns) {
		return fmt.Errorf("sqlstore: db's pool became smaller since New (SetMaxOpenConns): must leave room for twice %d transactions", cap(s.turns))
	}
	if err := s.dialect.check(ctx, s.db, s.cfg.RelaxedDurability); err != nil {
		return err
	}
	steps, err := s.steps()
	if err != nil {
		return err
	}
	version, err := s.version(ctx, s.db)
	switch {
	case s.dialect.missing(err), err == nil && version == 0:
		return fmt.Errorf("sqlstore: table %s does not exist: run Migrate", s.names.plainVersion)
	case err != nil:
		return fmt.Errorf("sqlstore: read the schema's version: %w", err)
	case version < len(steps):
		return fmt.Errorf("sqlstore: %s is at schema version %d: must be at %d, run Migrate", s.names.plainTable, version, len(steps))
	case version > len(steps):
		return fmt.Errorf("sqlstore: %s is at schema version %d: must be at %d, the newest that this release knows", s.names.plainTable, version, len(steps))
	}
	var none [32]byte
	if _, err := s.read(ctx, s.db, s.dialect.read(none, false)); err != nil {
		return fmt.Errorf("sqlstore: table %s is not what Migrate makes: %w", s.names.plainTable, err)
	}
	return nil
}
