//go:build unix

package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/belayrpc/belay/idempotency"
)

func TestCommands_OnCall(t *testing.T) {
	dsn := databases["sqlite"](t)
	o := newOffice(t, dsn)
	key := idempotency.NewKey()
	id := o.lose(t, key)
	for _, c := range []struct{ args, want string }{
		{"find -db " + dsn + " " + key.Value, id.String() + " UNKNOWN /belay.payments.v1.PaymentsService/Charge claimed "},
		{"open -db " + dsn, id.String() + " UNKNOWN "},
		{"resolve -db " + dsn + " " + id.String() + " free", "resolved as free"},
		{"find -db " + dsn + " " + key.Value, id.String() + " FREE "},
	} {
		var out bytes.Buffer
		if err := run(t.Context(), strings.Fields(c.args), &out, io.Discard); err != nil || !strings.Contains(out.String(), c.want) {
			t.Errorf("%s = %q, %v; want …%s…", c.args, out.String(), err, c.want)
		}
	}
}

func TestCommands_Errors(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "pending.json")
	if err := os.WriteFile(broken, []byte(`{"key": "two words", "cents": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"":                          `command "": must be serve, charge, find, open or resolve`,
		"refund":                    `command "refund"`,
		"find":                      "0 arguments after the flags: must be 1",
		"resolve x":                 "1 arguments after the flags: must be 2",
		"charge -pending " + broken: broken + ": idempotency: first-sent",
	} {
		if err := run(t.Context(), strings.Fields(args), io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("payments %s: %v, want …%s…", args, err, want)
		}
	}
}
