// Package testpg gives tests a PostgreSQL of their own.
//
// It finds the server's programs on the machine (pg_config, the PATH,
// Debian's folders) or unpacks Debian's packages into a cache, without
// installing anything and without touching a service. It starts one server per
// test binary, on a free port of the loopback interface, with its data in a
// temporary folder and never as root, and one database per test. The server
// stops with the test binary, however that ends.
//
// BELAY_TEST_PG, a connection string, names a server to use instead: its role
// must be allowed to create databases. Where there is neither a server nor a way
// to get one, tests fail and say which packages to install: a test that skips
// itself proves nothing.
package testpg
