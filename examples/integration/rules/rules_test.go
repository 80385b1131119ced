package rules_test

import (
	"fmt"
	"strings"
	"testing"
)

// mutant is the library without one rule, or without one half of one.
type mutant struct {
	what    string // what it does wrong
	file    string // from the root of the tree
	rule    string // the text that keeps the rule; it is there once
	without string // what stands there instead
	suite   suite
	red     string // the test that notices
}

const (
	memory = "idempotency/memory.go"
	engine = "idempotency/claim.go"
	sqlite = "idempotency/sqlstore/sqlite.go"

	// sqliteConclude moves an execution's own record on.
	sqliteConclude = "SET state = ?3, outcome = ?4, completed_at = {now}, expires_at = {now} + ?5\nWHERE id = ?1 AND owner = ?2 AND state IN (1, 4)"

	// ofMemory is the contract on the memory store, in fake time.
	ofMemory = "TestMemoryStoreKeepsTheContract/"
)

// withoutRule has the mutants of rule Rn at n-1.
var withoutRule = [8][]mutant{
	{ // R1: one atomic step, guarded by state and owner
		{
			what: "a claim reads in one step and writes in the next", file: memory,
			rule:    "	en := s.entries[c.ID]\n	if en != nil && en.expiredAt(now) {\n		s.removeLocked(en)\n		en = nil\n	}\n	switch {\n	case en == nil && c.Late:",
			without: "	en := s.entries[c.ID]\n	s.mu.Unlock()\n	time.Sleep(time.Millisecond)\n	s.mu.Lock()\n	switch {\n	case en == nil && c.Late:",
			suite:   ofIdempotency, red: ofMemory + "OneOfManyIsGranted",
		},
		{
			what: "whoever has an execution may end it, whosever the record is", file: memory,
			rule: "if en == nil || en.owner != x.owner {", without: "if en == nil {",
			suite: ofIdempotency, red: ofMemory + "TakeoverLeavesTheFirstOwnerNothing",
		},
		{
			what: "the SQL store ends whosever record it is", file: sqlite,
			rule: sqliteConclude, without: strings.Replace(sqliteConclude, "owner = ?2", "(owner = ?2 OR TRUE)", 1),
			suite: onDatabases, red: "TestStore/sqlite_lease/TakeoverLeavesTheFirstOwnerNothing",
		},
	},
	{ // R2: the store's clock
		{
			what: "the store leaves it to the owner to say when its lease is over", file: memory,
			rule: "over := en.state == StateUnknown || !now.Before(en.until)", without: "over := en.state == StateUnknown",
			suite: ofIdempotency, red: ofMemory + "LeaseOverIsUnknown",
		},
		{
			what: "the finish reads a clock that its transaction froze", file: "idempotency/sqlstore/postgresql.go",
			rule: "greatest(expires_at, clock_timestamp() + $4", without: "greatest(expires_at, now() + $4",
			suite: onDatabases, red: "TestStore/postgresql_same/RetentionRunsFromTheFinish",
		},
	},
	{ // R3: retention from the claim and again from the finish; the lease is a field
		{
			what: "retention does not start again at the finish", file: memory,
			rule: "	en.expires = now.Add(en.retention)\n", without: "",
			suite: ofIdempotency, red: ofMemory + "RetentionRunsFromTheFinish",
		},
		{
			what: "the lease is the record's time to live", file: memory,
			rule: "return en.state != StateRunning && en.state != StateUnknown && !now.Before(en.expires)", without: "return !now.Before(en.until)",
			suite: ofIdempotency, red: ofMemory + "LeaseOverIsUnknown",
		},
	},
	{ // R4: ending twice is ending once
		{
			what: "a repeated finish is refused", file: memory,
			rule: "	case StateDone: // our own, whose reply was lost (R4): it stands as it is (R8)\n", without: "",
			suite: ofIdempotency, red: ofMemory + "EndingTwiceIsTheSame",
		},
		{
			what: "a repeated release is refused", file: memory,
			rule: "	case en.state == state:\n		return nil\n", without: "",
			suite: ofIdempotency, red: ofMemory + "EndingTwiceIsTheSame",
		},
	},
	{ // R5: the lease ends being a promise, not being an owner
		{
			what: "an execution whose lease is over is lost, whosever the record is", file: memory,
			rule: "if en == nil || en.owner != x.owner {", without: "if en == nil || en.owner != x.owner || !time.Now().Before(en.until) {",
			suite: ofIdempotency, red: ofMemory + "FinishAfterTheLease",
		},
		{
			what: "the SQL store writes an outcome within the lease only", file: sqlite,
			rule: sqliteConclude, without: strings.Replace(sqliteConclude, "IN (1, 4)", "IN (1, 4) AND NOT {over}", 1),
			suite: onDatabases, red: "TestStore/sqlite_lease/FinishAfterTheLease",
		},
	},
	{ // R6: the same owner's claim is the same claim
		{
			what: "the memory store tells an owner that its own claim is in flight", file: memory,
			rule: "	case en.owner == c.Owner:\n		return s.grantLocked(en, c, now, en.epoch), nil, nil\n", without: "",
			suite: ofIdempotency, red: ofMemory + "OwnerMayClaimAgain",
		},
		{
			what: "the SQL store tells an owner that its own claim is in flight", file: "idempotency/sqlstore/record.go",
			rule: "		case r.owner == c.Owner:\n			return nil, r.epoch // its own claim, whose reply was lost\n", without: "",
			suite: ofSQLStore, red: "TestDecide/running,_mine",
		},
		{
			what: "the engine repeats a claim as somebody else", file: engine,
			rule: "	exec, rec, err := e.store.Begin(ctx, f.claim)\n", without: "	_, _ = rand.Read(f.claim.Owner[:])\n	exec, rec, err := e.store.Begin(ctx, f.claim)\n",
			suite: ofIdempotency, red: "TestLostReplyOfTheClaim",
		},
	},
	{ // R7: absence after a conflict is no permission
		{
			what: "what conflicted and is gone may run", file: "idempotency/sqlstore/claim.go",
			rule:    "				lookFirst = false\n				continue // R7",
			without: "				return &execution{store: s, claim: *c, epoch: 1, session: &session{store: s}}, nil, nil // R7",
			suite:   ofSQLStore, red: "TestBegin_ClaimsAgainWhatVanished",
		},
	},
	{ // R8: DONE never changes
		{
			what: "a second finish writes over the first", file: memory,
			rule:    "	case StateDone: // our own, whose reply was lost (R4): it stands as it is (R8)\n",
			without: "	case StateDone:\n		s.keepLocked(en, o.Data)\n",
			suite:   ofIdempotency, red: ofMemory + "DoneNeverChanges",
		},
		{
			what: "DONE can be resolved", file: memory,
			rule: "	case en.state == StateUnknown, en.state == StateRunning &&", without: "	case en.state == StateDone, en.state == StateUnknown, en.state == StateRunning &&",
			suite: ofIdempotency, red: ofMemory + "DoneNeverChanges",
		},
		{
			what: "DONE is claimed again", file: memory,
			rule: "	case StateFree:\n		return s.grantLocked(", without: "	case StateFree, StateDone:\n		return s.grantLocked(",
			suite: ofIdempotency, red: ofMemory + "DoneNeverChanges",
		},
	},
}

// Each rule of idempotency.Store, switched off, turns a test red, which is green
// with it.
func TestRules(t *testing.T) {
	root := rootOfTree(t)
	var all []mutant
	for _, mutants := range withoutRule {
		all = append(all, mutants...)
	}
	checkSound(t, root, all)
	for i, mutants := range withoutRule {
		t.Run(fmt.Sprintf("R%d", i+1), func(t *testing.T) {
			for _, m := range mutants {
				out := m.suite.test(t.Context(), root, []string{m.red}, "-overlay="+m.overlay(t, root))
				if !failed(out, m.red) {
					t.Errorf("%s, and %s did not fail:\n%s", m.what, m.red, out)
				}
			}
		})
	}
}
