// Package sqltap puts a hook between database/sql and a driver, so that a
// program can count what is sent to a database, or fail in the middle of it,
// without a switch in the code under test.
package sqltap
