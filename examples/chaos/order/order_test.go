package order_test

import (
	"strings"
	"testing"
	"time"

	"github.com/belayrpc/belay/examples/chaos/order"
)

func TestParse_ReadsWhatStringWrote(t *testing.T) {
	for _, deed := range []order.Deed{order.Kill, order.Stop, order.Hold} {
		for _, point := range order.Points {
			want := order.Order{Deed: deed, Point: point, For: 140 * time.Millisecond}
			if got, err := order.Parse(want.String()); err != nil || got != want {
				t.Errorf("Parse(%q) = %v, %v", want, got, err)
			}
		}
	}
}

func TestParse_Errors(t *testing.T) {
	for text, want := range map[string]string{
		"":                        "must be a deed, a point and a duration",
		"kill before-claim":       "must be a deed, a point and a duration",
		"kill before-claim later": "invalid duration",
		"maim before-claim 0s":    `deed is "maim"`,
		"kill elsewhere 0s":       `point is "elsewhere"`,
	} {
		if _, err := order.Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Parse(%q) = %v, want …%s…", text, err, want)
		}
	}
}
