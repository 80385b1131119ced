// Command chaos kills, stops and cuts off servers in the middle of keyed calls,
// and then looks whether any effect has happened twice.
//
// Three server processes work on one database, PostgreSQL or SQLite, in one of
// the store's two modes. Clients call them, each call with a key of its own that
// is repeated until there is a verdict, and often by several clients at once. In
// the phase "kills" the servers are killed (kill -9) at every step of the
// protocol, in the phase "stale" their handlers, or the whole processes, are held
// up for longer than their lease. Replies of PostgreSQL are lost on the way. The
// table of effects has no constraint that would keep a second one out.
//
// Afterwards what the clients were told is held against what is in the database:
//
//		RESULT chaos store=… mode=… phase=… mutant=… keys=… kills=… takeovers=…
//		       duplicates=… wrong_replies=… unresolved=… torn=… stales=… dropped_replies=… seconds=…
//		RESULT chaos-kills store=… … before-claim=… after-claim-sent=… …
//
//	  - takeovers: handlers started for a key after the first,
//	  - duplicates: effects of a key after the first,
//	  - wrong_replies: an OK whose token is in no effect, an OK without an effect, a
//	    final error with one, two replies to one key that say "executed",
//	  - unresolved: keys without a verdict, records without an outcome,
//	  - torn: keys of which only one of the two rows of an effect is there.
//
// All of it runs a second time with mutants, in which one rule of the store is
// taken out (go build -overlay): a harness that does not find them would find
// nothing.
//
// The servers (package server) are ordinary ones. What breaks them is a hook
// around the database's driver, an interceptor and a stats handler: nothing in the
// library knows of any of this.
package main
