//go:build unix

package main

import (
	"errors"
	"testing"

	"github.com/belayrpc/belay/idempotency"
)

func TestJudge(t *testing.T) {
	ok := func(token string, executed bool) reply { return reply{token: token, executed: executed} }
	no := reply{declined: true, executed: true}
	for name, c := range map[string]struct {
		replies         []reply
		effects, halves []string
		want            result
	}{
		"one effect, told twice":      {[]reply{ok("a", true), ok("a", false)}, []string{"a"}, []string{"a"}, result{}},
		"declined, twice":             {[]reply{no, {declined: true}}, nil, nil, result{}},
		"two effects":                 {[]reply{ok("a", true)}, []string{"a", "b"}, []string{"b", "a"}, result{duplicates: 1}},
		"OK without an effect":        {[]reply{ok("a", true)}, nil, nil, result{wrong: 1}},
		"OK with another's token":     {[]reply{ok("a", true)}, []string{"b"}, []string{"b"}, result{wrong: 1}},
		"declined, with an effect":    {[]reply{no}, []string{"a"}, []string{"a"}, result{wrong: 1}},
		"executed twice":              {[]reply{ok("a", true), ok("a", true)}, []string{"a"}, []string{"a"}, result{wrong: 1}},
		"half an effect":              {[]reply{ok("a", true)}, []string{"a"}, nil, result{torn: 1}},
		"halves of two":               {[]reply{ok("a", true)}, []string{"a"}, []string{"b"}, result{torn: 1}},
		"no verdict":                  {nil, nil, nil, result{unresolved: 1}},
		"no verdict, with an effect":  {nil, []string{"a"}, []string{"a"}, result{unresolved: 1}},
		"no verdict, with two":        {nil, []string{"a", "b"}, []string{"a", "b"}, result{unresolved: 1, duplicates: 1}},
		"OK and declined, one effect": {[]reply{ok("a", true), {declined: true}}, []string{"a"}, []string{"a"}, result{wrong: 1}},
	} {
		var got result
		got.judge(&intent{key: idempotency.NewKey(), replies: c.replies, last: errors.New("away")}, c.effects, c.halves)
		if got.duplicates != c.want.duplicates || got.wrong != c.want.wrong || got.torn != c.want.torn || got.unresolved != c.want.unresolved {
			t.Errorf("%s: duplicates %d, wrong %d, torn %d, unresolved %d; want %d, %d, %d, %d", name,
				got.duplicates, got.wrong, got.torn, got.unresolved, c.want.duplicates, c.want.wrong, c.want.torn, c.want.unresolved)
		}
		if got.duplicates+got.wrong+got.torn+got.unresolved > 0 && len(got.notes) == 0 {
			t.Errorf("%s: nothing is noted", name)
		}
	}
}
