package main

import (
	"encoding/binary"
	"testing"
)

func TestExecutes(t *testing.T) {
	message := func(kind byte, body string) string {
		return string(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4))) + body
	}
	parse, bind, execute, sync := message('P', "s\x00INSERT E\x00\x00\x00"), message('B', "E\x00\x00"), message('E', "\x00\x00\x00\x00\x00"), message('S', "")
	for name, c := range map[string]struct {
		sent string
		want bool
	}{
		"nothing":             {"", false},
		"prepare":             {parse + message('D', "Ss\x00") + sync, false},
		"bind and execute":    {bind + message('D', "P\x00") + execute + sync, true},
		"query":               {message('Q', "commit\x00"), true},
		"cut in the header":   {bind + "E\x00", false},
		"cut in the body":     {parse[:len(parse)-2], false},
		"a length of nothing": {"P\x00\x00\x00\x00" + execute, false},
		"a huge length":       {"P\xff\xff\xff\xff" + execute, false},
	} {
		if got := executes([]byte(c.sent)); got != c.want {
			t.Errorf("%s: executes = %v, want %v", name, got, c.want)
		}
	}
}
