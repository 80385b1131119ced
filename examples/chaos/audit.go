package main

import (
	"cmp"
	"context"
	"slices"
)

// audit holds what the clients were told against what is in the database.
func (r *result) audit(ctx context.Context, d *database, intents []*intent) error {
	effects, err := d.tokens(ctx, "effects")
	if err != nil {
		return err
	}
	halves, err := d.tokens(ctx, "halves")
	if err != nil {
		return err
	}
	open, states, err := d.openRecords(ctx)
	if err != nil {
		return err
	}
	if open > 0 {
		r.unresolved += open
		r.notef("records that nobody has concluded: %s", states)
	}
	r.keys = len(intents)
	for _, i := range intents {
		r.judge(i, effects[i.key.Value], halves[i.key.Value])
	}
	return nil
}

// judge looks at one intent. Nobody calls any more.
func (r *result) judge(i *intent, effects, halves []string) {
	if extra := len(effects) - 1; extra > 0 {
		r.duplicates += extra
		r.notef("key %s: %d effects %v", i.key.Value, len(effects), effects)
	}
	slices.Sort(effects)
	slices.Sort(halves)
	if !slices.Equal(effects, halves) {
		r.torn++
		r.notef("key %s: one half has the effects %v and the other %v", i.key.Value, effects, halves)
	}
	if len(i.replies) == 0 {
		r.unresolved++
		r.notef("key %s: no verdict (%v), %d effects", i.key.Value, cmp.Or(i.stranded, i.last), len(effects))
		return
	}
	executed := 0
	for _, reply := range i.replies {
		if reply.executed {
			executed++
		}
		switch {
		case reply.declined && len(effects) > 0:
			r.wrong++
			r.notef("key %s: declined, and has the effects %v", i.key.Value, effects)
		case !reply.declined && !slices.Contains(effects, reply.token):
			r.wrong++
			r.notef("key %s: answered OK with %s, and has the effects %v", i.key.Value, reply.token, effects)
		}
	}
	if executed > 1 {
		r.wrong++
		r.notef("key %s: %d replies say that theirs was executed", i.key.Value, executed)
	}
}
